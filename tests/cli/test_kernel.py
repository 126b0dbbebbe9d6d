"""`signalprop kernel`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import commandline
from commandline import Command, Refused
from signalprop import Architecture, scheme, trace
from signalprop.data.batches import default_statistics
from signalprop.kernels.causal_shaping import uniform_kernel
from signalprop.kernels.gallery import figure_7

SMALL = ["--layers", "3", "--set", "d_model=32", "--seq-len", "12", "--set", "vocab_size=200"]


def result_of(command: Command, *arguments: str) -> Any:
    return commandline.result_of(command, "kernel", *arguments)


def names_of(result: Any) -> list[str]:
    return [item["name"] for item in result["configurations"]]


def test_the_numbers_are_the_library_s(command: Command) -> None:
    found = result_of(command, "gpt2", "--scheme", "xavier", *SMALL)
    assert found["schema"] == "signalprop/kernel/1"
    a = Architecture.preset("gpt2", n_layers=3, d_model=32, seq_len=12, vocab_size=200)
    wanted = trace(scheme("xavier")(a), inputs=default_statistics(a))
    (item,) = found["configurations"]
    assert wanted.gradient is not None
    for direction, series in (("forward", wanted.forward), ("gradient", wanted.gradient)):
        assert item[direction].keys() == series.columns().keys()
        for name, column in series.columns().items():
            np.testing.assert_allclose(item[direction][name], column, rtol=1e-12, err_msg=name)
    assert (item["n_layers"], item["n_tokens"], item["sequences"]) == (3, 12, 1)


def test_the_gallery(command: Command) -> None:
    found = result_of(command, "gallery", "--layers", "5", "--seq-len", "20")
    wanted = figure_7(5, 20, 0.02)
    assert names_of(found) == list(wanted)
    for item in found["configurations"]:
        series = trace(wanted[item["name"]], uniform_kernel(0.02, 20), backward=False).forward
        np.testing.assert_allclose(item["forward"]["distance"], series.distance, rtol=1e-9, atol=1e-15)


def test_several_schemes_and_their_options(command: Command, refused: Refused) -> None:
    found = result_of(command, "gpt2", "--scheme", "xavier,deepscalelm", *SMALL)
    assert names_of(found) == ["xavier", "deepscalelm"]
    post = ("--scheme", "deepscalelm:k=1.5", "--norm", "post")
    (item,) = result_of(command, "gpt2", *post, *SMALL)["configurations"]
    assert item["options"]["k"] == 1.5 and item["architecture"]["norm_placement"] == "post"
    assert "2 times" in refused("kernel", "gpt2", "--scheme", "xavier,xavier")


def test_the_tokens_of_a_text(command: Command, tmp_path: Path) -> None:
    text = tmp_path / "book.txt"
    text.write_text("one two three " * 50)
    (item,) = result_of(command, "tgs", *SMALL, "--data", str(text))["configurations"]
    assert (item["source"], item["sequences"]) == (str(text), 4)


@pytest.mark.slow
def test_tables_and_pictures(command: Command, tmp_path: Path) -> None:
    maps = tmp_path / "maps.svg"
    status, out, err = command("kernel", "gallery", "--layers", "4", "--seq-len", "10", "--all", "--plot", maps)
    assert (status, "tracing: 7 of 7" in err) == (0, True)
    lines = out.splitlines()
    assert lines[0].split()[:2] == ["configuration", "depth"]
    assert [line.split()[-7] for line in lines[2:7]] == ["0", "1", "2", "3", "4"]
    (found,) = [line for line in lines if line.startswith("finding")]
    assert all(name in found for name in figure_7(4, 10, 0.02))
    assert str(maps) in out and maps.read_text().startswith("<?xml")


def test_the_gallery_fits_a_screen_and_ends_with_its_finding(command: Command) -> None:
    _, out, _ = command("kernel", "gallery", "--layers", "20", "--seq-len", "10")
    lines = out.splitlines()
    assert len(lines) <= 22 and max(map(len, lines[:17])) <= 80
    assert lines[-1].startswith("finding") and "rank collapse: skipless from layer" in lines[-1]
    _, out, _ = command("kernel", "gallery", "--layers", "9", "--seq-len", "10", "--all")
    assert len(out.splitlines()) > 60


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "ARCH"),
        (["gallery", "--set", "d_model=64"], "not d_model"),
        (["gallery", "--scheme", "xavier"], "leave out --scheme"),
        (["t5-small"], "encoder-decoder"),
    ],
)
def test_mistakes(refused: Refused, arguments: list[str], says: str) -> None:
    assert says in refused("kernel", *arguments)

"""`signalprop kernel`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import commandline
from commandline import Command, Refused
from signalprop import Architecture, InputStatistics, scheme, trace
from signalprop.data.batches import default_statistics
from signalprop.kernels.gallery import figure_7
from signalprop.kernels.shaping import uniform_kernel

SMALL = ["--layers", "3", "--d-model", "32", "--seq-len", "12", "--set", "vocab_size=200"]


def result_of(command: Command, *arguments: str) -> Any:
    return commandline.result_of(command, "kernel", *arguments)


def names_of(result: Any) -> list[str]:
    return [item["name"] for item in result["configurations"]]


def test_the_numbers_are_the_library_s(command: Command) -> None:
    found = result_of(command, "gpt2 xavier", *SMALL, "--repeats", "0.1")
    assert found["schema"] == "signalprop/kernel/1"
    a = Architecture.preset("gpt2", n_layers=3, d_model=32, seq_len=12, vocab_size=200)
    wanted = trace(scheme("xavier")(a), inputs=with_repeats(a, 0.1))
    (item,) = found["configurations"]
    assert wanted.gradient is not None
    for direction, series in (("forward", wanted.forward), ("gradient", wanted.gradient)):
        assert item[direction].keys() == series.columns().keys()
        for name, column in series.columns().items():
            np.testing.assert_allclose(item[direction][name], column, rtol=1e-12, err_msg=name)
    assert (item["n_layers"], item["n_tokens"], item["sequences"]) == (3, 12, 1)


def with_repeats(a: Architecture, repeats: float) -> InputStatistics:
    return replace(default_statistics(a), token_correlation=repeats)


def test_the_gallery(command: Command) -> None:
    found = result_of(command, "gallery", "--layers", "5", "--seq-len", "20", "--no-gradient")
    wanted = figure_7(5, 20, 0.02)
    assert names_of(found) == list(wanted)
    for item in found["configurations"]:
        series = trace(wanted[item["name"]], uniform_kernel(0.02, 20), backward=False).forward
        np.testing.assert_allclose(item["forward"]["distance"], series.distance, rtol=1e-9, atol=1e-15)
        assert item["gradient"] is None


def test_schemes_multiply_what_has_none(command: Command) -> None:
    found = result_of(
        command, "gpt2", "gpt2 fixed std=0.05", "--scheme", "xavier", "--scheme", "deepscalelm k=1.5 norm=post", *SMALL,
        "--no-gradient",
    )  # fmt: skip
    assert names_of(found) == ["xavier", "deepscalelm k=1.5 norm=post", "fixed std=0.05"]
    assert [item["scheme"] for item in found["configurations"]] == ["xavier", "deepscalelm", "fixed"]
    assert found["configurations"][1]["options"]["k"] == 1.5
    assert found["configurations"][1]["architecture"]["norm_placement"] == "post"
    assert found["configurations"][2]["options"]["std"] == 0.05


def test_inputs(command: Command, tmp_path: Path) -> None:
    arguments = ["tgs xavier", *SMALL, "--no-gradient"]
    sampled = [
        result_of(command, *arguments, "--input", "sampled", "--repeats", "0.2", "--samples", "3", "--seed", seed)
        for seed in ("0", "0", "1")
    ]
    assert sampled[0] == sampled[1] != sampled[2]
    (item,) = sampled[0]["configurations"]
    assert item["sequences"] == 3
    assert len(item["forward"]["mean_cosine_sd"]) == 4
    text = tmp_path / "book.txt"
    text.write_text("one two three " * 50)
    (item,) = result_of(command, *arguments, "--text", str(text), "--samples", "2")["configurations"]
    assert (item["source"], item["sequences"]) == (str(text), 2)
    kernel = 0.7 * np.eye(9) + 0.3
    np.save(tmp_path / "k.npy", kernel)
    (item,) = result_of(command, "tgs xavier", "--layers", "2", "--input", str(tmp_path / "k.npy"))["configurations"]
    assert item["n_tokens"] == 9
    assert item["forward"]["mean_cosine"][0] == pytest.approx(0.3)


def test_tables_pictures_and_matrices(command: Command, tmp_path: Path) -> None:
    maps, curves, arrays = (tmp_path / name for name in ("maps.svg", "curves.png", "kernels.npz"))
    status, out, err = command(
        "kernel", "gpt2", "--scheme", "xavier", "--scheme", "deepscalelm", *SMALL, "--repeats", "0.1", "--at", "0,2,3",
        "--plot", str(maps), "--plot-curves", str(curves), "--matrices", str(arrays),
    )  # fmt: skip
    assert (status, "tracing: 2 of 2" in err) == (0, True)
    lines = out.splitlines()
    assert lines[0].split()[:2] == ["configuration", "depth"]
    assert [line.split()[-10] for line in lines[2:5]] == ["0", "2", "3"]
    assert sum(line.startswith("rank collapse") for line in lines) == 2
    assert all(str(path) in out for path in (maps, curves, arrays))
    assert maps.read_text().startswith("<?xml")
    assert curves.read_bytes().startswith(b"\x89PNG")
    with np.load(arrays) as stored:
        assert len(stored.files) == 2 * 3 * 2
        a = Architecture.preset("gpt2", n_layers=3, d_model=32, seq_len=12, vocab_size=200)
        found = trace(scheme("xavier")(a), inputs=with_repeats(a, 0.1), at=[3])
        np.testing.assert_allclose(stored["xavier/forward/3"], found.kernels[3], atol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "CONFIG"),
        (["gpt3 xavier"], "known presets"),
        (["gpt2 magic"], "deepscalelm"),
        (["gpt2 xavier more"], "'ARCH [SCHEME] [KEY=VALUE ...]'"),
        (["norm=post gpt2"], "'ARCH [SCHEME] [KEY=VALUE ...]'"),
        (["gpt2 'xavier"], "'ARCH [SCHEME] [KEY=VALUE ...]'"),
        (["gpt2 xavier wings=2"], "unknown architecture field 'wings'"),
        (["gpt2", "--scheme", "xavier post"], "two names"),
        (["gallery", "--d-model", "64"], "not d_model"),
        (["t5-small"], "encoder-decoder"),
        (["gpt2", "--layers", "2", "--at", "3"], "from 0 to 2"),
        (["gpt2", "--layers", "2", "--at", "1;2"], "commas"),
        (["gpt2", "--input", "noise"], "average, sampled, text"),
        (["gpt2", "--input", "missing.npy"], "cannot read missing.npy"),
        (["gpt2", "--repeats", "1"], "--repeats"),
        (["gpt2", "--input", "sampled", "--repeats", "-0.1"], "--repeats"),
        (["gpt2", "--repeats", "nan"], "--repeats"),
        (["vit-base", "--repeats", "0.1"], "reads patches"),
        (["gpt2", "--matrices", "a.txt"], ".npz"),
        (["gpt2", "--plot-curves", "a.bmp"], ".png, .svg or .pdf"),
        (["gpt2", "--samples", "0"], "--samples"),
    ],
)  # fmt: skip
def test_mistakes(refused: Refused, arguments: list[str], says: str) -> None:
    assert says in refused("kernel", *arguments)

"""What a prediction takes is known before the work: announced where it is long, refused where it does not fit."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import signalprop as sp
from damage import check_command, commanded
from signalprop.cli import output
from signalprop.data.batches import default_statistics
from signalprop.diagnosis.loading import parameters_of
from signalprop.errors import InputError
from signalprop.files.limits import check_fits, memory_limit
from signalprop.network.presets import PRESETS
from signalprop.prediction import Cost, expected_cost

LIMITED = (
    "import resource, sys; from signalprop.cli import run\n"
    "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
    "sys.exit(run(sys.argv[1:]))"
)


def limited(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process that may take 4 GB."""
    command = [sys.executable, "-c", LIMITED, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def test_what_does_not_fit_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signalprop.files.limits.memory_limit", lambda: 4 << 30)
    result = commanded("predict", "gpt2", "--layers", "400000")
    assert result.status == 2 and result.out == ""
    assert re.search(r"800,000 sublayers needs at least 8\.0 GB .* fewer layers", result.err)


@pytest.mark.parametrize(
    "arguments",
    [
        ("predict", "gpt2", "--layers", "100000"), ("predict", "gpt2", "--layers", "1000000"),
        ("compare", "gpt2", "--layers", "100000", "--set", "d_model=12"),
        pytest.param(("schemes", "--for", "gpt2", "--layers", "30000"), marks=pytest.mark.slow),
        ("advise", "gpt2", "--layers", "3000"),
    ],
)  # fmt: skip
def test_what_takes_long_is_refused_where_nobody_said_how_to_do_it(arguments: tuple[str, ...]) -> None:
    result = commanded(*arguments)
    check_command(result)
    assert result.status == 2 and re.search(r"this would take about [\d,]+ s\b.* --fidelity moments", result.err)


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [
        (("measure", "gpt2", "--layers", "48", "--seeds", "100"), 100),
        (("kernel", "tgs", "--layers", "1000", "--seq-len", "512"), 100),
        (("predict", "gpt2", "--fidelity", "simulate", "--layers", "40", "--seq-len", "1024"), 100),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, tuple) else "",
)
def test_other_commands_say_what_they_take(
    arguments: tuple[str, ...], seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the work, which is not done here."""
    said = []

    class Begun(InputError):
        pass

    def announced(costs: Sequence[Cost], **_: bool) -> None:
        said.append(sum(cost.seconds for cost in costs))
        raise Begun("the work begins")

    monkeypatch.setattr(output, "announce", announced)
    assert "the work begins" in commanded(*arguments).err
    assert said[0] > seconds


def test_commands_on_files_say_what_they_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the headers of the weights, here of a file without room on the disk, before any of them is read."""
    said: list[Cost] = []

    class Begun(InputError):
        pass

    def announced(costs: Sequence[Cost], **_: object) -> None:
        said.extend(costs)
        raise Begun("the work begins")

    n = 1_000_000_000
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    header = json.dumps({"x": {"dtype": "F32", "shape": [n], "data_offsets": [0, 4 * n]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 4 * n)
    with (tmp_path / "a.json").open("wb") as file:
        file.truncate(n)
    monkeypatch.setattr(output, "announce", announced)
    out = ("--out", tmp_path / "new")
    for arguments in (
        ("check", tmp_path, "--scheme", "lns"), ("apply", tmp_path, "--scheme", "lns", *out), ("fold", tmp_path, *out),
        ("fit", tmp_path, *out), ("anatomy", tmp_path), ("measure", tmp_path),
        ("compare", tmp_path), ("diagnose", tmp_path), ("report", tmp_path / "a.json", *out),
    ):  # fmt: skip
        said.clear()
        assert "the work begins" in commanded(*arguments).err, arguments
        assert said[0].seconds > 10 and said[0].bytes > 1e9, arguments


TINY = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 10, "n_positions": 4}


@pytest.mark.parametrize(("config", "n"), [(TINY, 1000), ({"model_type": "x"}, 0)])
def test_parameters_of_a_directory_without_weights(config: dict[str, object], n: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert parameters_of(tmp_path) == n


def test_progress_of_one_prediction() -> None:
    seen: list[tuple[int, int]] = []
    table = sp.scheme("xavier")(sp.Architecture.preset("gpt2", n_layers=60, seq_len=64))
    quiet = sp.predict(table)
    told = sp.predict(table, progress=lambda done, total: seen.append((done, total)))
    assert told.to_json() == quiet.to_json()
    assert [done for done, _ in seen] == sorted({done for done, _ in seen}) and seen[-1] == (240, 240)
    assert len(seen) > 50


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layers"), [("gpt2", 24), ("tgs", 48), ("gpt2", 4)])
def test_estimates_of_runs_against_what_they_take(name: str, layers: int) -> None:
    """Within a factor of 3 of the memory; of the time only that it is not far too little, whatever else runs here."""
    code = (
        "import resource, time, torch, signalprop as sp\n"
        "from signalprop.data.batches import default_batch, shortened\n"
        "from signalprop.prediction import cost_of_runs\n"
        "torch.set_num_threads(1)\n"
        f"p = sp.scheme('xavier')(shortened(sp.Architecture.preset({name!r}, n_layers={layers})))\n"
        "cost, model = cost_of_runs(p, 4), sp.build(p)\n"
        "begun = time.process_time()\n"
        "sp.measure(model, default_batch(p.architecture, batch_size=4))\n"
        "peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(cost.seconds / (time.process_time() - begun), cost.bytes / peak)"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    seconds, memory = map(float, done.stdout.split())
    assert 0.05 < seconds < 5 and 1 / 3 < memory < 3, done.stdout


@pytest.mark.slow
def test_10_000_layers_fit_into_4_gigabytes() -> None:
    done = limited("predict", "gpt2", "--layers", "10000")
    assert done.returncode == 0 and "gradient ratio" in done.stdout
    assert "this takes about" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_fits_into_4_gigabytes(name: str) -> None:
    done = limited("predict", name)
    assert done.returncode == 0, done.stderr


def test_cost_grows_with_layers_and_tokens() -> None:
    def cost(fidelity: str, **changes: int) -> tuple[float, float]:
        table = sp.scheme("xavier")(sp.Architecture.preset("gpt2", **changes))
        return expected_cost(table, default_statistics(table.architecture), fidelity)  # type: ignore[arg-type]

    for fidelity in ("auto", "moments"):
        few, many = cost(fidelity, n_layers=12), cost(fidelity, n_layers=1200)
        assert many[0] == pytest.approx(100 * few[0])
        assert few[1] < many[1] < 30e6 + 100 * few[1]
    assert cost("kernel", seq_len=1024)[0] > 10 * cost("auto", seq_len=1024)[0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["predict", "gpt2", "--fidelity", "kernel", "--seq-len", "1000000"],
            "a token kernel of 1,000,000 tokens needs at least 280,000.0 GB",
        ),
        (["kernel", "gpt2", "--seq-len", "1000000"], "fewer tokens"),
        (["measure", "tgs", "--set", "d_model=1000000", "--layers", "4"], "parameters on 512 tokens needs at least"),
        (["predict", "tgs", "--layers", "100000", "--fidelity", "kernel", "--seq-len", "100000"], "needs at least"),
    ],
)
def test_the_memory_needed_is_stated(arguments: list[str], says: str) -> None:
    begun = time.process_time()
    result = commanded(*arguments)
    check_command(result)
    assert result.status == 2 and says in result.err and "GB of memory; there are" in result.err
    assert time.process_time() - begun < 20


def test_what_fits_is_left_alone() -> None:
    limit = memory_limit()
    assert limit is not None and limit > 10 * 1024**2
    check_fits(limit, "this", "do that")

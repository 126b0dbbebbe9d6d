"""Runs that are stopped, killed or starved go on to the same numbers; in processes of their own (slow) too."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import trained
from signalprop.errors import InputError
from signalprop_lab.training.recipe import parse
from signalprop_lab.training.result import Result
from signalprop_lab.training.run import train
from signalprop_lab.training.run_logs import Metrics
from signalprop_lab.training.weight_files import WEIGHTS
from trained import checkpoint_steps, finish, recipe_of, run, same_course, start, stderr_of, stop, wait_for


class Crash(Exception):
    """What nobody expects."""


def here(folder: Path, out: Path, **options: Any) -> Result:
    return train(parse(recipe_of(folder)), out, progress=False, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the text and a run that nothing disturbed are."""
    folder = tmp_path_factory.mktemp("resume")
    here(folder, folder / "whole")
    return folder


WhenLogged = Callable[[Callable[[int], None]], None]


@pytest.fixture
def when_logged(monkeypatch: pytest.MonkeyPatch) -> WhenLogged:
    """Have a function called with the step whenever a loss has been logged."""
    real = Metrics.logged

    def watch(act: Callable[[int], None]) -> None:
        def logged(self: Metrics, step: int, numbers: Mapping[str, float]) -> bool:
            goes_on = real(self, step, numbers)
            if "loss" in numbers:
                act(step)
            return goes_on

        monkeypatch.setattr(Metrics, "logged", logged)

    return watch


def test_a_run_that_crashed_goes_on_bit_by_bit(folder: Path, when_logged: WhenLogged) -> None:
    out, crashes = folder / "crashed", [1, 8, 16]  # before the first checkpoint, between two, at an evaluation

    def crash(step: int) -> None:
        if step in crashes:
            crashes.remove(step)
            raise Crash

    when_logged(crash)
    while crashes:
        with pytest.raises(Crash):
            here(folder, out, resume=True)
    (out / ".0123.tmp").write_bytes(b"half")
    assert here(folder, out, resume=True).status == "finished"
    assert same_course(folder / "whole", out)
    one, other = (load_file(folder / name / "final" / WEIGHTS) for name in ("whole", "crashed"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert not list(out.rglob("*.tmp"))


def test_sigterm(folder: Path, when_logged: WhenLogged, capfd: pytest.CaptureFixture[str]) -> None:
    out = folder / "stopped"
    when_logged(lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 4 else None)
    first = here(folder, out)
    assert (first.status, first.steps, first.eval_loss) == ("stopped", 5, None)
    assert first.reason == "SIGTERM after step 5; it can be resumed" and checkpoint_steps(out) == [3, 5]
    assert "SIGTERM: stopping with a checkpoint after this step" in capfd.readouterr().err
    after = here(folder, out, resume=True)
    assert same_course(folder / "whole", out)
    assert after.status == "finished" and after.seconds >= first.seconds > 0


def test_a_finished_run_is_not_touched(folder: Path) -> None:
    out = folder / "whole"
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    here(folder, out, resume=True)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_two_at_once(folder: Path, tmp_path: Path, when_logged: WhenLogged) -> None:
    out = tmp_path / "run"

    def another(_: int) -> None:
        with pytest.raises(InputError, match=f"another process is training in {out}; wait for it, or choose a new"):
            here(folder, out, resume=True)
        raise Crash

    when_logged(another)
    with pytest.raises(Crash):
        here(folder, out)


def test_after_damage_it_goes_on_from_the_last_good_one(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without a good one it starts anew."""
    shutil.copytree(folder / "whole", out := tmp_path / "run")
    assert checkpoint_steps(out) == [21, 24]
    (out / "result.json").unlink()
    os.truncate(out / "checkpoints" / "checkpoint-24" / WEIGHTS, 100)
    here(folder, out, resume=True)
    said = capfd.readouterr().err
    assert said.count("is not used") == 1 and "checkpoint-24 is not used: model.safetensors has 100 bytes" in said
    assert same_course(folder / "whole", out)

    (out / "result.json").unlink()
    for item in (out / "checkpoints").iterdir():
        (item / "complete.json").unlink()
    here(folder, out, resume=True)
    assert capfd.readouterr().err.count("so it was not written to its end") == 2
    assert same_course(folder / "whole", out)


def test_what_only_watches_a_run_does_not_end_it(
    folder: Path, tmp_path: Path, when_logged: WhenLogged, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines of JSON wait until they can be written."""
    out, aside = tmp_path / "run", tmp_path / "aside"
    metrics = out / "metrics.jsonl"

    def hide(step: int) -> None:
        if step == 12:
            metrics.rename(aside)
            metrics.mkdir()
        if step == 16:
            metrics.rmdir()
            aside.rename(metrics)

    when_logged(hide)
    assert here(folder, out).status == "finished"
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"cannot write {metrics} (Is a directory)" in said
    assert same_course(folder / "whole", out)


def test_numbers_for_tensorboard(folder: Path, tmp_path: Path) -> None:
    read = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    recipe = parse(recipe_of(folder, report_to=["tensorboard"], budget={"steps": 4}))
    result = train(recipe, tmp_path / "run", progress=False)
    shown = read(str(tmp_path / "run" / recipe.name)).Reload()
    assert [event.step for event in shown.Scalars("train/loss")] == [1, 4]
    assert shown.Scalars("eval/loss")[-1].value == pytest.approx(result.eval_loss)


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of a process of its own, whose number of threads may be another."""
    folder = tmp_path_factory.mktemp("apart")
    run(recipe_of(folder), folder / "whole")
    return folder


def killed_until_done(folder: Path, out: Path, kills: int, seed: int) -> int:
    """Kill a run at random moments and resume it, over and over; how often it was killed before it was done."""
    chance, done = random.Random(seed), 0
    while True:
        process = start(recipe_of(folder), out, stderr_of(out), resume=True)
        if done < kills:
            # from the first moments in which anything is written, to the last
            process.join(chance.uniform(0.0, 0.2))
            last = max(checkpoint_steps(out), default=-1)
            step = chance.choice([s for s in range(0, trained.STEPS + 1, 3) if s > last] or [0])  # 0: as it begins
            if step:
                for _ in range(2000):
                    if not process.is_alive() or step in checkpoint_steps(out):
                        break
                    process.join(0.002)
            process.join(chance.uniform(0.0, 0.05))
        else:
            process.join(120)
        if not process.is_alive():
            assert process.exitcode == 0, stderr_of(out).read_text()
            return done
        process.kill()
        process.join()
        done += 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 8))
def test_killed_many_times(seed: int, apart: Path) -> None:
    out = apart / f"killed{seed}"
    assert killed_until_done(apart, out, 8, seed) >= 1
    assert same_course(apart / "whole", out)
    assert not list(out.rglob("*.tmp"))


@pytest.mark.slow
def test_a_full_disk(apart: Path, tmp_path: Path) -> None:
    """The system refuses to let a file grow, as it does on a full disk."""
    out = tmp_path / "full"
    recipe = recipe_of(apart)
    process = start(recipe, out, stderr_of(out))
    wait_for(out / "checkpoints" / "checkpoint-6", process)
    stop(process)
    had = checkpoint_steps(out)
    said = tmp_path / "said"
    assert finish(start(recipe, out, said, resume=True, file_size=60_000)) == 2
    text = said.read_text()
    assert text.count("\n") == 1 and "cannot write the checkpoint" in text and "File too large" in text
    assert f"the one of step {had[-1]} remains" in text
    assert checkpoint_steps(out) == had
    run(recipe, out, resume=True)
    assert same_course(apart / "whole", out)

"""Runs in processes of their own that are stopped, killed or starved, and go on to the same numbers."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import trained
from signalprop_lab.training.recipe import parse
from signalprop_lab.training.run import train
from signalprop_lab.training.weight_files import WEIGHTS
from trained import checkpoint_steps, finish, recipe_of, result_of, run, same_course, start, stderr_of, stop, wait_for


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the text and a run that nothing disturbed are."""
    folder = tmp_path_factory.mktemp("resume")
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


class TestKilled:
    def test_the_same_course_bit_by_bit(self, folder: Path) -> None:
        assert killed_until_done(folder, folder / "killed", 3, seed=1) >= 1
        assert same_course(folder / "whole", folder / "killed")
        one, other = (load_file(folder / name / "final" / WEIGHTS) for name in ("whole", "killed"))
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        assert not list((folder / "killed").rglob("*.tmp"))

    @pytest.mark.slow
    @pytest.mark.parametrize("seed", range(2, 8))
    def test_many_times(self, seed: int, folder: Path) -> None:
        out = folder / f"killed{seed}"
        killed_until_done(folder, out, 8, seed)
        assert same_course(folder / "whole", out)


class TestStopped:
    def test_sigterm(self, folder: Path) -> None:
        out = folder / "stopped"
        process = start(recipe_of(folder), out, stderr_of(out))
        wait_for(out / "checkpoints" / "checkpoint-3", process)
        assert stop(process, signal.SIGTERM) == 0
        result = result_of(out)
        step = result["steps"]
        assert result["status"] == "stopped" and result["reason"] == f"SIGTERM after step {step}; it can be resumed"
        assert step in checkpoint_steps(out) and step < trained.STEPS
        assert "SIGTERM: stopping with a checkpoint after this step" in stderr_of(out).read_text()

        run(recipe_of(folder), out, resume=True)
        assert same_course(folder / "whole", out)
        after = result_of(out)
        assert after["status"] == "finished" and after["seconds"] > result["seconds"] > 0

    def test_a_finished_run_is_not_touched(self, folder: Path) -> None:
        out = folder / "whole"
        before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
        run(recipe_of(folder), out, resume=True)
        assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


class TestDamaged:
    @pytest.fixture
    def out(self, folder: Path, tmp_path: Path) -> Path:
        """The run as it was before its result was written."""
        shutil.copytree(folder / "whole", tmp_path / "run")
        (tmp_path / "run" / "result.json").unlink()
        return tmp_path / "run"

    def test_it_goes_on_from_the_last_good_one(self, folder: Path, out: Path) -> None:
        assert checkpoint_steps(out) == [21, 24]
        os.truncate(out / "checkpoints" / "checkpoint-24" / WEIGHTS, 100)
        said = run(recipe_of(folder), out, resume=True)
        assert said.count("is not used") == 1 and "checkpoint-24 is not used: model.safetensors has 100 bytes" in said
        assert same_course(folder / "whole", out)

    def test_without_a_good_one_it_starts_anew(self, folder: Path, out: Path) -> None:
        for item in (out / "checkpoints").iterdir():
            (item / "complete.json").unlink()
        said = run(recipe_of(folder), out, resume=True)
        assert said.count("so it was not written to its end") == 2
        assert same_course(folder / "whole", out)


class TestNoRoom:
    @pytest.mark.slow
    def test_a_full_disk(self, folder: Path, tmp_path: Path) -> None:
        """The system refuses to let a file grow, as it does on a full disk."""
        out = tmp_path / "full"
        recipe = recipe_of(folder)
        process = start(recipe, out, stderr_of(out))
        wait_for(out / "checkpoints" / "checkpoint-6", process)
        stop(process)
        had = checkpoint_steps(out)
        said = tmp_path / "said"
        assert finish(start(recipe, out, said, resume=True, file_size=60_000)) == 2
        text = said.read_text()
        assert text.count("\n") == 1 and "cannot write the checkpoint" in text and "File too large" in text
        assert f"the one of step {had[-1]} is kept" in text
        assert checkpoint_steps(out) == had
        run(recipe, out, resume=True)
        assert same_course(folder / "whole", out)


class TestLogs:
    """What only watches a run does not end it."""

    def test_lines_that_cannot_be_written_for_a_while(
        self, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out, aside = tmp_path / "run", tmp_path / "aside"

        def hide(step: int, loss: float) -> bool:
            lines = out / "metrics.jsonl"
            if step == 4:
                lines.rename(aside)
                lines.mkdir()
            if step == 12:
                lines.rmdir()
                aside.rename(lines)
            return True

        result = train(parse(recipe_of(folder)), out, keep_going=hide, progress=False)
        assert result.status == "finished"
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and f"cannot write {out / 'metrics.jsonl'} (Is a directory)" in said
        assert same_course(folder / "whole", out)

    def test_tensorboard_s_folder_is_removed(
        self, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """What is logged later is in a new one; a file in its place is said once."""
        out = tmp_path / "run"
        read = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator

        def remove(step: int, loss: float) -> bool:
            if step in (4, 20):
                shutil.rmtree(out / "tensorboard")
            if step == 12:
                shutil.rmtree(out / "tensorboard")
                (out / "tensorboard").write_text("")
            if step == 16:
                (out / "tensorboard").unlink()
            return True

        result = train(parse(recipe_of(folder)), out, keep_going=remove, progress=False)
        assert result.status == "finished"
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and f"cannot write {out / 'tensorboard'}" in said and "the run goes on" in said
        assert same_course(folder / "whole", out)
        shown = read(str(out / "tensorboard")).Reload()
        assert [event.step for event in shown.Scalars("train/loss")] == [24]
        assert shown.Scalars("eval/loss")[-1].value == pytest.approx(result.eval_loss)


class TestTwoAtOnce:
    def test_one_is_refused(self, folder: Path, tmp_path: Path) -> None:
        out, said = tmp_path / "run", tmp_path / "said"
        first = start(recipe_of(folder), out, stderr_of(out))
        wait_for(out / "recipe.yaml", first)
        assert finish(start(recipe_of(folder), out, said, resume=True)) == 2
        assert (
            said.read_text()
            == f"signalprop: another process is training in {out}; wait for it, or choose a new directory\n"
        )
        assert finish(first) == 0
        assert same_course(folder / "whole", out)

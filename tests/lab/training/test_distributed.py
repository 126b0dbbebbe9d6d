"""Several processes give what one gives: the same course, the same weights, the same care about faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import trained
from signalprop_lab.training.recipe import parse
from trained import (
    BUILT,
    LLAMA,
    checkpoint_steps,
    finish,
    lines,
    recipe_of,
    result_of,
    run,
    run_together,
    same_course,
    start,
    stderr_of,
    together,
    wait_for,
)

PLAIN = {"dropout": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "built": {"model": {"architecture": BUILT | PLAIN, "scheme": "deepscalelm"}},
    "llama": {"model": {"architecture": None, "huggingface": LLAMA, "scheme": "layerscale"}},
    # the processes have different numbers of labels, and take two passes per step
    "masked": {
        "task": "masked-lm",
        "model": {"architecture": BUILT | PLAIN | {"preset": "bert-base"}, "scheme": "deepscalelm"},
        "budget": {"batch_size": 8, "micro_batch": 2},
    },
}
WAYS: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": {"parallel": {"fsdp": True}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distributed")


def differences(one: Path, other: Path) -> dict[str, float]:
    """The largest relative difference of every logged number; of the weights, of those that have a gradient."""
    pairs = list(zip(lines(one / "metrics.jsonl"), lines(other / "metrics.jsonl"), strict=True))
    assert all(a.keys() == b.keys() and a["step"] == b["step"] for a, b in pairs)
    out = {
        key: max(abs(a[key] / b[key] - 1) for a, b in pairs if key in a) for key in ("loss", "eval_loss", "grad_norm")
    }
    a, b = (load_file(path / "final" / "model.safetensors") for path in (one, other))
    assert a.keys() == b.keys()
    # softmax does not see a bias of keys: its gradient is rounding, which Adam blows up
    seen = [name for name in a if not name.endswith("key.bias")]
    return out | {"weights": max(float((a[name] - b[name]).abs().max()) for name in seen)}


def compare(folder: Path, case: str, way: str) -> None:
    recipe = recipe_of(folder, name=case, **CASES[case])
    if not (folder / case).is_dir():
        run(recipe, folder / case)
    out = folder / f"{case}-{way}"
    if not out.is_dir():
        run_together(recipe | WAYS[way], out)
    for name, difference in differences(folder / case, out).items():
        assert difference < 1e-5, name
    assert result_of(out)["status"] == "finished"
    assert result_of(out)["parameters"] == result_of(folder / case)["parameters"]


class TestSameCourse:
    @pytest.mark.slow
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("case", CASES)
    def test_every_way(self, case: str, way: str, folder: Path) -> None:
        compare(folder, case, way)
        assert (folder / f"{case}-{way}" / "signal.jsonl").is_file() == (way == "ddp")

    @pytest.mark.slow
    def test_shards_within_replicas(self, folder: Path) -> None:
        recipe = recipe_of(folder, name="built", **CASES["built"])
        if not (folder / "built").is_dir():
            run(recipe, folder / "built")
        out = folder / "built-hsdp"
        run_together(recipe | {"parallel": {"fsdp": True, "replicas": 2}}, out, 4)
        assert max(differences(folder / "built", out).values()) < 1e-5
        odd = recipe | {"parallel": {"fsdp": True, "replicas": 3}}
        assert [finish(process) for process in together(odd, folder / "odd")] == [2, 2]
        assert "replicas 3 does not divide the 2 processes" in stderr_of(folder / "odd").read_text()

    @pytest.mark.slow
    def test_what_is_left_out_of_a_sharded_model_is_said(self, folder: Path) -> None:
        out = folder / "built-fsdp"
        if not out.is_dir():
            run_together(recipe_of(folder, name="built", **CASES["built"]) | WAYS["fsdp"], out)
        assert "the signal is not measured while the model is sharded" in stderr_of(out).read_text()
        assert not (out / "signal.jsonl").exists()


@pytest.mark.slow
class TestAnotherNumberOfProcesses:
    @pytest.mark.parametrize("way", WAYS)
    def test_a_run_goes_on(self, way: str, folder: Path) -> None:
        """A checkpoint holds whole tensors, whoever wrote it."""
        recipe = recipe_of(folder, name="built", **CASES["built"])
        if not (folder / "built").is_dir():
            run(recipe, folder / "built")
        out = folder / f"grown-{way}"
        process = start(recipe | WAYS["ddp"], out, stderr_of(out))
        wait_for(out / "checkpoints" / "checkpoint-6", process)
        process.kill()
        process.join()
        # the way is a part of the recipe, which a run keeps to
        (out / "recipe.yaml").write_text(parse(recipe | WAYS[way]).to_yaml(), encoding="utf-8")
        run_together(recipe | WAYS[way], out, resume=True)
        assert max(differences(folder / "built", out).values()) < 1e-5

    def test_and_shrinks(self, folder: Path) -> None:
        recipe = recipe_of(folder, name="built", **CASES["built"])
        if not (folder / "built").is_dir():
            run(recipe, folder / "built")
        out = folder / "shrunk"
        processes = together(recipe, out)
        wait_for(out / "checkpoints" / "checkpoint-6", processes[0])
        for process in processes:
            process.kill()
            process.join()
        run(recipe, out, resume=True)
        assert max(differences(folder / "built", out).values()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
class TestFaults:
    def test_sigterm_to_one_of_them(self, way: str, folder: Path) -> None:
        """The same course bit by bit, dropout and all."""
        recipe = recipe_of(folder) | WAYS[way]
        whole, out = folder / f"whole-{way}", folder / f"stopped-{way}"
        run_together(recipe, whole)
        processes = together(recipe, out)
        wait_for(out / "checkpoints" / "checkpoint-3", processes[0])
        assert processes[1].pid is not None
        os.kill(processes[1].pid, signal.SIGTERM)
        assert [finish(process) for process in processes] == [0, 0]
        assert result_of(out)["status"] == "stopped" and result_of(out)["steps"] in checkpoint_steps(out)
        run_together(recipe, out, resume=True)
        assert lines(whole / "metrics.jsonl") == lines(out / "metrics.jsonl")

    def test_a_diverged_run_ends_in_all_of_them(self, way: str, folder: Path) -> None:
        out = folder / f"diverged-{way}"
        recipe = recipe_of(folder, optimizer={"learning_rate": 1e15, "clip": None}) | WAYS[way]
        run_together(recipe, out)
        result = result_of(out)
        assert result["status"] == "diverged" and result["steps"] == 1
        assert "the loss is not finite in step 2: layer 0 attention, branch: the signal holds" in result["reason"]

    def test_a_full_disk_ends_all_of_them(self, way: str, folder: Path) -> None:
        out = folder / f"full-{way}"
        processes = together(recipe_of(folder) | WAYS[way], out, file_size=60_000)
        assert [finish(process) for process in processes] == [2, 2]
        assert all("cannot write the checkpoint" in stderr_of(out, rank).read_text() for rank in (0, 1))

    def test_a_directory_of_another_run(self, way: str, folder: Path) -> None:
        out = folder / f"other-{way}"
        out.mkdir()
        (out / "notes.txt").write_text("x")
        processes = together(recipe_of(folder) | WAYS[way], out)
        assert [finish(process) for process in processes] == [2, 2]
        assert [item.name for item in out.iterdir()] == ["notes.txt"]


@pytest.mark.slow
class TestTorchrun:
    def command(self, folder: Path, out: Path, *more: str) -> list[str]:
        path = trained.write_recipe(folder, recipe_of(folder))
        module = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        return [*module, "-m", "signalprop", "train", str(path), "--out", str(out), *more]

    def test_from_start_to_end_and_by_sigterm(self, folder: Path) -> None:
        whole, out = folder / "torchrun", folder / "torchrun-stopped"
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(self.command(folder, whole), env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        assert json.loads((whole / "environment.json").read_text())["processes"] == 2
        assert done.stdout.count("status") == 1  # the first process alone prints

        process = subprocess.Popen(self.command(folder, out), env=environment, stderr=subprocess.DEVNULL)
        while checkpoint_steps(out)[-1:] != [3]:
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) != 0
        assert result_of(out)["status"] == "stopped"
        resumed = subprocess.run(
            self.command(folder, out, "--resume"), env=environment, capture_output=True, text=True, timeout=300
        )
        assert resumed.returncode == 0, resumed.stderr[-3000:]
        assert same_course(whole, out)

"""Checkpoints: whole or not used, found by their step, the same weights and optimizer after reading them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import trained
from applied import vanilla
from signalprop.models import build
from signalprop.network.architecture import Architecture
from signalprop.repair import apply
from signalprop.schemes import scheme
from signalprop_lab.training import checkpoints, weight_files
from signalprop_lab.training.checkpoints import MARKER, SCHEMA, last_good, mark, problem_of, thin_out
from signalprop_lab.training.weight_files import OPTIMIZER, STATE, WEIGHTS


def written(folder: Path, step: int) -> Path:
    """A small whole checkpoint."""
    target = folder / f"checkpoint-{step}"
    target.mkdir(parents=True)
    weight_files.save_tensors({"a": torch.arange(8.0) + step}, target / WEIGHTS)
    (target / STATE).write_text('{"seconds": 1.0}')
    mark(target, step)
    return target


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def other_step(path: Path) -> None:
    path.write_text(path.read_text().replace('"step": 5', '"step": 4'))


DAMAGES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "no marker": (MARKER, Path.unlink),
    "empty marker": (MARKER, lambda path: path.write_text("")),
    "half a marker": (MARKER, lambda path: path.write_text(path.read_text()[:30])),
    "marker of a list": (MARKER, lambda path: path.write_text("[]")),
    "marker without files": (MARKER, lambda path: path.write_text(json.dumps({"schema": SCHEMA, "step": 5}))),
    "marker of another step": (MARKER, other_step),
    "truncated weights": (WEIGHTS, lambda path: os.truncate(path, 40)),
    "one bit of the weights": (WEIGHTS, flip),
    "no weights": (WEIGHTS, Path.unlink),
    "weights that are a directory": (WEIGHTS, lambda path: (path.unlink(), path.mkdir())),
    "changed state": (STATE, lambda path: path.write_text('{"seconds": 2.0}')),
}  # fmt: skip


class TestFinding:
    def test_the_newest_whole_one(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for step in (5, 10, 100):
            written(tmp_path, step)
        assert last_good(tmp_path) == tmp_path / "checkpoint-100"
        assert capsys.readouterr().err == ""

    @pytest.mark.parametrize("damage", DAMAGES)
    def test_a_damaged_one_is_named_and_left_out(
        self, damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        good, bad = written(tmp_path, 4), written(tmp_path, 5)
        name, do = DAMAGES[damage]
        do(bad / name)
        assert last_good(tmp_path) == good
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and str(bad) in said and name in said


class TestThinning:
    def test_what_is_later_than_the_new_one_goes(self, tmp_path: Path) -> None:
        for step in (1, 2, 3, 9):
            written(tmp_path, step)
        thin_out(tmp_path, 2, 3)
        assert sorted(item.name for item in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-3"]

    def test_leftovers(self, tmp_path: Path) -> None:
        kept = written(tmp_path, 1)
        (tmp_path / ".checkpoint-2.tmp").mkdir()
        (tmp_path / ".checkpoint-2.tmp" / WEIGHTS).write_bytes(b"half")
        (tmp_path / ".0123.tmp").write_bytes(b"half")
        checkpoints.clear_leftovers(tmp_path)
        assert list(tmp_path.iterdir()) == [kept] and problem_of(kept) is None


def built(seed: int) -> nn.Module:
    a = Architecture.preset("gpt2", n_layers=2, d_model=16, n_heads=2, d_ff=32, vocab_size=40, seq_len=8)
    return build(scheme("deepscalelm")(a), seed=seed)


def applied(seed: int) -> nn.Module:
    model = vanilla("llama", 2)
    apply(model, "layerscale", seed=seed)
    return model


def adapted(seed: int) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    model: nn.Module = peft.get_peft_model(vanilla("llama", 2), peft.LoraConfig(r=2, target_modules="all-linear"))
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(seed)
    return model


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers by an old name
class TestWeights:
    @pytest.mark.parametrize("make", [built, applied, adapted])
    def test_bit_by_bit(self, make: Callable[[int], nn.Module], tmp_path: Path) -> None:
        one, other = make(1), make(2)
        weight_files.save_tensors(weight_files.weights_of(one), tmp_path / WEIGHTS)
        before = [p for p in one.parameters() if p.requires_grad]
        assert any(not torch.equal(p, q) for p, q in zip(before, other.parameters(), strict=False))
        checkpoints.load_weights(other, tmp_path)
        theirs = other.state_dict()
        assert all(torch.equal(value, theirs[name]) for name, value in one.state_dict().items())

    def test_a_tied_table_is_stored_once_and_stays_tied(self, tmp_path: Path) -> None:
        model = built(1)
        names = model.state_dict().keys() - weight_files.weights_of(model).keys()
        assert len(names) == 1
        weight_files.save_tensors(weight_files.weights_of(built(2)), tmp_path / WEIGHTS)
        checkpoints.load_weights(model, tmp_path)
        assert model.decoder.embedding.token.weight is model.head.weight  # type: ignore[union-attr]


class TestOfATraining:
    @pytest.fixture(scope="class")
    @staticmethod
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Checkpoints of three steps."""
        folder = tmp_path_factory.mktemp("run")
        recipe = trained.recipe_of(folder, budget={"steps": 3}, cadence={"save": 1, "evaluate": 0, "log": 2})
        trained.loop_of(recipe, folder).train()
        return folder

    def test_optimizer_by_names(self, folder: Path) -> None:
        checkpoint = folder / "checkpoints" / "checkpoint-3"
        weights, moments = load_file(checkpoint / WEIGHTS), load_file(checkpoint / OPTIMIZER)
        groups = json.loads((checkpoint / STATE).read_text())["optimizer"]
        names = [name for group in groups for name in group["params"]]
        assert {key.rpartition("/")[0] for key in moments} == set(names) and len(names) == len(set(names))
        for name in names:
            assert moments[f"{name}/exp_avg"].shape == weights[name].shape
            assert moments[f"{name}/step"] == 3

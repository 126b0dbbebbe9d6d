"""SignalCallback in real runs of the Hugging Face Trainer."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import signalprop as sp
from monitored import VOCABULARY, gpt2, hooks, sequences
from signalprop.errors import InputError

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from transformers import Trainer, TrainingArguments
from transformers.integrations import integration_utils

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
DATA = [{"input_ids": ids, "labels": ids} for ids in sequences(64)]


def trainer(folder: Path, *, model: Any = None, data: Any = None, callbacks: Any = None, **options: Any) -> Trainer:
    settings = {
        "output_dir": str(folder), "max_steps": 11, "per_device_train_batch_size": 4, "logging_steps": 3,
        "report_to": "none", "save_strategy": "no", "learning_rate": 1e-3, "use_cpu": True, "seed": 3,
        "disable_tqdm": True,
    } | options  # fmt: skip
    return Trainer(
        model=gpt2() if model is None else model,
        args=TrainingArguments(**settings),
        train_dataset=DATA if data is None else data,
        eval_dataset=DATA[:4],
        callbacks=callbacks,
    )


def losses(trained: Trainer) -> list[tuple[int, float]]:
    return [(entry["step"], entry["loss"]) for entry in trained.state.log_history if "loss" in entry]


def signals(trained: Trainer) -> dict[int, dict[str, float]]:
    """What was logged of the signal, by step."""
    entries = [entry for entry in trained.state.log_history if "signal/sensitivity" in entry]
    return {
        int(entry["step"]): {name: value for name, value in entry.items() if name.startswith("signal/")}
        for entry in entries
    }


def same(one: Trainer, other: Trainer) -> bool:
    return all(torch.equal(p, q) for p, q in zip(one.model.parameters(), other.model.parameters(), strict=True))


def test_training_is_the_same_to_the_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 5}
    bare = trainer(tmp_path, **more)  # which seeds what its training draws
    bare.train()
    watched = trainer(tmp_path, **more)
    callback = sp.SignalCallback(watched, every=5, jsonl=tmp_path / "signal.jsonl")
    watched.add_callback(callback)
    own = hooks(watched.model)
    passes: list[float] = []
    recorded: list[tuple[int, float]] = []
    one_pass, record = Trainer.training_step, callback.monitor.record

    def passed(*args: Any, **kwargs: Any) -> Any:
        loss = one_pass(*args, **kwargs)
        passes.append(float(loss))
        return loss

    def recording(step: int, loss: Any) -> None:
        recorded.append((step, float(loss)))
        record(step, loss)

    monkeypatch.setattr(Trainer, "training_step", passed)
    monkeypatch.setattr(callback.monitor, "record", recording)
    capsys.readouterr()
    watched.train()
    assert recorded == list(enumerate(passes[1::2], 1))  # after the last pass of every step
    assert "signal" not in capsys.readouterr().out  # tens of numbers are not for the console
    assert losses(watched) == losses(bare) and len(losses(bare)) == 3
    assert same(bare, watched)
    found = signals(watched)
    assert list(found) == [1, 5, 10]
    assert len(found[5]) == len(found[10]) > len(found[1])  # which nothing had updated yet
    lines = [json.loads(line) for line in (tmp_path / "signal.jsonl").read_text().splitlines()]
    assert [{k: v for k, v in line.items() if k.startswith("signal")} for line in lines] == list(found.values())
    assert [line["step"] for line in lines] == list(found)
    assert callback.monitor.warnings == []
    assert "training_step" not in vars(watched)
    assert hooks(watched.model) == own == 0


def test_a_callback_finds_the_trainer_that_calls_it(tmp_path: Path) -> None:
    callback = sp.SignalCallback(every=5)
    watched = trainer(tmp_path, callbacks=[callback], max_steps=5)
    watched.train()
    assert list(signals(watched)) == [1, 5]
    assert callback.monitor.warnings == [] and "training_step" not in vars(watched)


class Logged(dict[int, dict[str, float]]):
    """Stands in for a logger's package: what it was given, by step."""

    @property
    def run(self) -> SimpleNamespace:
        return SimpleNamespace(summary={})

    def log(self, metrics: dict[str, float]) -> None:
        if "train/signal/outside" in metrics:
            self[int(metrics["train/global_step"])] = metrics

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        if "signal/outside" in metrics:
            self[step] = metrics


@pytest.mark.parametrize("name", ["WandbCallback", "MLflowCallback"])
def test_the_loggers_of_transformers_get_the_numbers(name: str, tmp_path: Path) -> None:
    kind = getattr(integration_utils, name)
    logger, seen = kind.__new__(kind), Logged()  # its __init__ wants the package
    vars(logger).update(_wandb=seen, _ml_flow=seen, _initialized=True, _async_log=False, _auto_end_run=False)
    logger.on_train_begin = logger.on_train_end = lambda *_, **__: None
    watched = trainer(tmp_path, callbacks=[logger], max_steps=3)
    watched.add_callback(sp.SignalCallback(watched, every=2))
    watched.train()
    prefix = "train/" if name == "WandbCallback" else ""
    for step, numbers in signals(watched).items():
        assert {k: seen[step][prefix + k] for k in numbers} == numbers
    assert list(seen) == [1, 2]


@pytest.mark.slow
def test_a_run_that_is_resumed(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 6}
    whole = trainer(tmp_path / "whole")
    whole.train()
    first = trainer(tmp_path / "parts", **saving)
    first.add_callback(sp.SignalCallback(first, every=5, scores=False))
    first.train()
    second = trainer(tmp_path / "parts", **saving)
    callback = sp.SignalCallback(second, every=5, scores=False)
    second.add_callback(callback)
    second.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-6"))
    assert list(signals(second)) == [1, 5, 7, 10]  # up to 6 from the checkpoint's history
    assert same(whole, second)
    assert signals(first)[10] == pytest.approx(signals(second)[10])


def test_an_error_in_a_step_leaves_no_hooks(tmp_path: Path) -> None:
    class Breaks(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"input_ids": DATA[0]["input_ids"], "labels": torch.full_like(DATA[0]["labels"], VOCABULARY + 7)}

    watched = trainer(tmp_path, data=Breaks())
    watched.add_callback(sp.SignalCallback(watched, every=1))
    with pytest.raises(IndexError, match="out of bounds"):
        watched.train()
    assert hooks(watched.model) == 0
    assert "training_step" not in vars(watched)


@pytest.mark.slow
def test_compiled(tmp_path: Path) -> None:
    compiling = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 6}
    bare = trainer(tmp_path, **compiling)
    bare.train()
    watched = trainer(tmp_path, **compiling)
    watched.add_callback(sp.SignalCallback(watched, every=3))
    watched.train()
    assert losses(watched) == losses(bare) and same(bare, watched)
    assert list(signals(watched)) == [1, 3, 6]
    torch._dynamo.reset()


# --- lightningSignalCallback in real runs of Lightning's Trainer


@pytest.fixture(scope="module")
def training() -> Any:
    pytest.importorskip("lightning", reason="Lightning is not installed", exc_type=ImportError)
    return import_module("in_lightning")


@pytest.mark.filterwarnings("ignore")
def test_trainings_of_lightning_are_the_same_to_the_bit(tmp_path: Path, training: Any) -> None:
    bare = training.fit(tmp_path, [], accumulate_grad_batches=2)
    logger, callback = training.Kept(), sp.LightningSignalCallback(every=5)
    watched = training.fit(tmp_path, [callback], logger, accumulate_grad_batches=2)
    assert all(torch.equal(p, q) for p, q in zip(bare.parameters(), watched.parameters(), strict=True))
    assert logger.signals() == [1, 5, 10]
    names = {name for _, metrics in logger.rows for name in metrics}
    assert {"signal/layer_0/variance", "signal/layer_2/score_std"} <= names
    assert callback.monitor is not None and callback.monitor.warnings == []
    assert hooks(watched.net) == 0


@pytest.mark.filterwarnings("ignore")
def test_an_error_in_lightning_leaves_no_hooks(tmp_path: Path, training: Any) -> None:
    module = training.Module(breaks=True)
    with pytest.raises(RuntimeError, match="training broke"):
        training.fit(tmp_path, [sp.LightningSignalCallback(every=5)], module=module)
    assert hooks(module.net) == 0


def test_a_model_that_cannot_be_told(tmp_path: Path, training: Any) -> None:
    module = training.Module()
    module.second = gpt2()
    with pytest.raises(InputError, match=r"holds 2 models of known families; give model=.*net, second"):
        training.fit(tmp_path, [sp.LightningSignalCallback()], module=module)
    with pytest.raises(InputError, match="model='third'"):
        training.fit(tmp_path, [sp.LightningSignalCallback("third")], module=module)

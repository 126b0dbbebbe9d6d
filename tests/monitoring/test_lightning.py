"""LightningSignalCallback in real runs of Lightning's Trainer."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import signalprop as sp
from monitored import gpt2, hooks
from signalprop.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def training() -> Any:
    pytest.importorskip("lightning", reason="Lightning is not installed", exc_type=ImportError)
    return import_module("in_lightning")


def test_training_is_the_same_to_the_bit(tmp_path: Path, training: Any) -> None:
    bare = training.fit(tmp_path, [], accumulate_grad_batches=2)
    logger, callback = training.Kept(), sp.LightningSignalCallback(every=5)
    watched = training.fit(tmp_path, [callback], logger, accumulate_grad_batches=2)
    assert all(torch.equal(p, q) for p, q in zip(bare.parameters(), watched.parameters(), strict=True))
    assert logger.signals() == [1, 5, 10]
    names = {name for _, metrics in logger.rows for name in metrics}
    assert {"signal/layer_0/variance", "signal/layer_2/score_std"} <= names
    assert callback.monitor is not None and callback.monitor.warnings == []
    assert hooks(watched.net) == 0


def test_an_error_leaves_no_hooks(tmp_path: Path, training: Any) -> None:
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

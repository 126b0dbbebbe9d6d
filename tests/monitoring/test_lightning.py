"""LightningSignalCallback in real runs of Lightning's Trainer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import signalprop as sp
from monitored import gpt2, hooks, sequences

lightning = pytest.importorskip("lightning", reason="Lightning is not installed", exc_type=ImportError)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings("ignore")


class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.net = gpt2()
        self.breaks = breaks

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(input_ids=batch, labels=batch).loss
        if self.breaks and index == 4:
            raise RuntimeError("training broke")
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.net(input_ids=batch, labels=batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Kept(lightning.pytorch.loggers.logger.Logger):  # type: ignore[misc,name-defined]
    """A logger that keeps what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    name = "kept"
    version = 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step or 0, dict(metrics)))

    def signals(self) -> list[int]:
        return [step for step, metrics in self.rows if "signal/sensitivity" in metrics]


def fit(folder: Path, callbacks: list[Any], logger: Any = None, module: Any = None, **options: Any) -> Any:
    lightning.seed_everything(1, verbose=False)
    module = Module() if module is None else module
    settings = {
        "max_steps": 11, "accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False,
        "enable_checkpointing": False, "log_every_n_steps": 4, "default_root_dir": str(folder), "val_check_interval": 3,
        "logger": logger if logger is not None else False,
    } | options  # fmt: skip
    trainer = lightning.Trainer(callbacks=callbacks, **settings)
    loader = torch.utils.data.DataLoader(list(sequences(64)), batch_size=4)
    trainer.fit(module, loader, loader)
    return module


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_is_the_same_to_the_bit(accumulate: int, tmp_path: Path) -> None:
    bare = fit(tmp_path, [], accumulate_grad_batches=accumulate)
    logger, callback = Kept(), sp.LightningSignalCallback(every=5, also=("identity", "removal", "attention"))
    watched = fit(tmp_path, [callback], logger, accumulate_grad_batches=accumulate)
    assert all(torch.equal(p, q) for p, q in zip(bare.parameters(), watched.parameters(), strict=True))
    assert logger.signals() == [1, 5, 10]
    names = {name for _, metrics in logger.rows for name in metrics}
    assert {"signal/layer_0/variance", "signal/layer_2/jacobian", "signal/layer_1/removal"} <= names
    assert callback.monitor is not None and callback.monitor.warnings == []
    assert hooks(watched.net) == 0


def test_an_error_leaves_no_hooks(tmp_path: Path) -> None:
    module = Module(breaks=True)
    with pytest.raises(RuntimeError, match="training broke"):
        fit(tmp_path, [sp.LightningSignalCallback(every=5)], module=module)
    assert hooks(module.net) == 0

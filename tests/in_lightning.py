"""A small training by Lightning's Trainer; apart from its tests, since Lightning takes seconds to import."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning
import torch

from monitored import gpt2, sequences

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


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

"""The callback of Lightning (package `lightning`, or `pytorch_lightning`)."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from torch import nn

from signalprop.attachment.families import mapping_of
from signalprop.errors import InputError, MissingExtra
from signalprop.files.validation import typed
from signalprop.monitoring.monitor import SignalMonitor
from signalprop.streams.wrappers import unwrapped


def _callback_class() -> Any:
    """The base class of the package that is in use: a Trainer takes no callback of the other's."""
    names = ["lightning.pytorch", "pytorch_lightning"]
    names.sort(key=lambda name: name not in sys.modules)
    for name in names:
        try:
            return import_module(f"{name}.callbacks").Callback
        except ImportError:
            continue
    raise MissingExtra("this needs Lightning; install it with: pip install lightning")


class LightningSignalCallback(_callback_class()):  # type: ignore[misc]
    """Logs the signal of the model that Lightning trains, to the loggers of its Trainer.

    ```python
    trainer = lightning.Trainer(callbacks=[LightningSignalCallback(every=50)])
    ```

    See `SignalMonitor` for what is measured and when; training is not changed.

    Args:
        model: path of the model inside the LightningModule (`"model"`). Default: the LightningModule itself, or the
            only one of its direct children whose family is known, or that has weights at all.
        options: as for `SignalMonitor`, without `writer` and `steps_done`.

    Attributes:
        monitor: the SignalMonitor, from the start of the training on.
    """

    @typed
    def __init__(self, model: str | None = None, **options: Any) -> None:
        super().__init__()
        self._path, self._options = model, options
        self.monitor: SignalMonitor | None = None
        self._attached: int | None = None
        self._loss: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Find the model."""
        self.monitor = SignalMonitor(_model_in(pl_module, self._path, self._options.get("mapping")), **self._options)
        self._attached = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Put the hooks on before the first pass of a step that is sampled."""
        step = trainer.global_step + 1
        if self.monitor is not None and step != self._attached and self.monitor.due(step):
            self._attached = step
            self.monitor.attach(step)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Keep the loss."""
        self._loss = loss.detach()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Keep how every sublayer moves."""
        if self.monitor is not None:
            self.monitor.record(trainer.global_step + 1, self._loss)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        """Read what the pass showed, and log it."""
        numbers = None if self.monitor is None else self.monitor.end()
        if numbers is not None and self.monitor is not None and self._attached is not None:
            self.monitor.write(numbers, self._attached)
            for logger in trainer.loggers:
                logger.log_metrics(dict(numbers), step=self._attached)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Remove all hooks."""
        self._close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Remove all hooks."""
        self._close()

    def _close(self) -> None:
        if self.monitor is not None:
            self.monitor.close()


def _model_in(module: nn.Module, path: str | None, mapping: Any) -> nn.Module:
    if path is not None:
        try:
            return module.get_submodule(path)
        except AttributeError as error:
            raise InputError(f"model={path!r}: {error}; expected the path of a module of the LightningModule") from None
    found = [item for item in (module, *module.children()) if mapping is None and _known(item)]
    if mapping is not None or found[:1] == [module]:
        return module
    holders = [item for item in module.children() if any(p.ndim > 1 for p in item.parameters())]
    if not found and len(holders) == 1:  # a model that no family knows: its stream is found
        return holders[0]
    if len(found) != 1:
        names = ", ".join(name for name, _ in module.named_children())
        raise InputError(
            f"{type(module).__name__} holds {len(found)} models of known families; give model=, one of its modules: "
            f"{names}"
        )
    return found[0]


def _known(module: nn.Module) -> bool:
    if hasattr(module, "signalprop_mapping"):
        return True
    try:
        mapping_of(unwrapped(module))
    except InputError:
        return False
    return True

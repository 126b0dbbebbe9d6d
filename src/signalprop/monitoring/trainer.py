"""The callback of the Hugging Face Trainer."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

from signalprop.errors import InputError, require

require("transformers", "models")

from transformers import TrainerCallback  # noqa: E402
from transformers.trainer_callback import PrinterCallback, ProgressCallback  # noqa: E402

from signalprop.files.validation import typed  # noqa: E402
from signalprop.monitoring.monitor import SignalMonitor  # noqa: E402


class SignalCallback(TrainerCallback):
    """Logs the signal of the model that a Trainer trains, through that Trainer.

    ```python
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[SignalCallback(every=50)])
    trainer.train()
    ```

    The numbers go wherever the Trainer reports to (TensorBoard, for one, under `train/signal/...`) and into its
    `log_history`, but not to its console. See `SignalMonitor` for what is measured and when; training is not changed.

    Args:
        trainer: the Trainer that it is added to. Default: the one that begins to train with it.
        options: as for `SignalMonitor`, without `writer` and `steps_done`.

    Attributes:
        monitor: the SignalMonitor; without `trainer`, from the start of the training on.
    """

    @typed
    def __init__(self, trainer: Any = None, **options: Any) -> None:
        self._trainer, self._options = trainer, options
        self._model: Any = None
        self.monitor: SignalMonitor = None  # type: ignore[assignment]  # until there is a model
        if trainer is not None:
            self._model = trainer.model
            self.monitor = self._made()
        self._numbers: dict[str, float] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Follow the Trainer to another model (`model_init` makes one for every training)."""
        if self._trainer is None:
            self._trainer = _trainer_of(self)
        if self._trainer.model is not self._model:
            self._model = self._trainer.model
            self.monitor = self._made()

    def _made(self) -> SignalMonitor:
        compiled = True if self._trainer.args.torch_compile else None  # the Trainer compiles when the training begins
        return SignalMonitor(self._model, **{"compiled": compiled, **self._options})

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Watch the passes of the step, and sample the first one if the step is due."""
        self._see_next(state.global_step + 1)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Read the numbers before the optimizer changes the weights."""
        self._numbers = self.monitor.end()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the numbers of the step that has just ended."""
        numbers, self._numbers = self._numbers, None
        if numbers is not None:
            self.monitor.write(numbers, state.global_step)
            self._report(numbers)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remove the hooks and close the file."""
        self.monitor.close()

    def _see_next(self, step: int) -> None:
        """The Trainer does not call callbacks after an error in a step, so the hooks live inside the step itself.

        Gradients are looked at after the step's last pass, before the Trainer clips them.
        """
        held = vars(self._trainer)
        own, inner = "training_step" in held, self._trainer.training_step
        due = self.monitor.due(step)

        def seen(*args: Any, **kwargs: Any) -> Any:
            nonlocal due
            if own:
                held["training_step"] = inner
            else:
                del held["training_step"]
            with self.monitor.sampling(step) if due else nullcontext():
                loss = inner(*args, **kwargs)
            due = False
            if self._trainer.accelerator.sync_gradients:
                self.monitor.record(step, loss)
            else:
                held["training_step"] = seen
            return loss

        held["training_step"] = seen

    def _report(self, numbers: dict[str, float]) -> None:
        """Through `Trainer.log`, without the callbacks that print; the next log of the loss is not moved."""
        trainer = self._trainer
        handler, due = trainer.callback_handler, trainer.control.should_log
        before = handler.callbacks
        handler.callbacks = [item for item in before if not _prints(item)]
        try:
            trainer.log(dict(numbers))
        finally:
            handler.callbacks = before
            trainer.control.should_log = due


def _trainer_of(callback: SignalCallback) -> Any:
    """The Trainer that is calling this callback, which gets no word of who calls it."""
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        handler = getattr(caller, "callback_handler", None)
        if handler is not None and any(item is callback for item in handler.callbacks):
            return caller
        frame = frame.f_back  # type: ignore[assignment]
    raise InputError("no Trainer calls this callback; give it: trainer.add_callback(SignalCallback(trainer))")


def _prints(callback: Any) -> bool:
    # the notebook's class is known by name, because its module needs IPython
    return isinstance(callback, (PrinterCallback, ProgressCallback)) or any(
        base.__name__ == "NotebookProgressCallback" for base in type(callback).__mro__
    )

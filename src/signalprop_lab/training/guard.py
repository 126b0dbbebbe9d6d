"""What ends a run early: a loss or gradient that is not finite, and the wish to stop (SIGTERM, Ctrl-C)."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from signalprop.attachment.attached import attach
from signalprop.errors import InputError
from signalprop.measurement.losses import lent_gradients
from signalprop.measurement.result import not_finite, tables
from signalprop.watching.recording import Recorder
from signalprop_lab.training.checkpoints import pending_loss
from signalprop_lab.training.networks import Network, network_of
from signalprop_lab.training.processes import anywhere, first, gathered, several, sharded, told
from signalprop_lab.training.weight_files import fill_weights, weights_of

if TYPE_CHECKING:
    from signalprop_lab.training.trainer import RecipeTrainer

# A scale of float16's loss below which gradients still overflow: they would in any case.
_SMALLEST_SCALE = 1.0


class Diverged(Exception):
    """A run that cannot go on, because a number is not finite. The message is one line."""


@dataclass(frozen=True)
class Pass:
    """A forward and backward pass as it was.

    Attributes:
        inputs: the model's arguments, and `labels`. count: of labels, by which the loss was divided.
        random: PyTorch's states before it.
    """

    inputs: dict[str, Tensor]
    count: Tensor | float | None
    loss: Tensor
    random: tuple[Tensor, Tensor | None]

    def on_cpu(self) -> Pass:
        """The same, to be told to other processes."""
        count = self.count.cpu() if isinstance(self.count, Tensor) else self.count
        return Pass({name: tensor.cpu() for name, tensor in self.inputs.items()}, count, self.loss.cpu(), self.random)


def random_states() -> tuple[Tensor, Tensor | None]:
    """PyTorch's random states, of the CPU and of the GPU."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None


@contextlib.contextmanager
def replayed(states: tuple[Tensor, Tensor | None]) -> Iterator[None]:
    """PyTorch's random numbers as from these states on; afterwards as they were."""
    with torch.random.fork_rng([] if states[1] is None else [torch.cuda.current_device()]):
        torch.set_rng_state(states[0])
        if states[1] is not None:
            torch.cuda.set_rng_state(states[1])
        yield


# --- the wish to stop -------------------------------------------------------------------------------------------------


class Interrupts:
    """Takes SIGTERM, and SIGINT once, for a wish to stop after the step; a second SIGINT interrupts as always.

    A signal that the process ignores (SIGINT in a shell's background) stays ignored.

    Attributes:
        received: the signal's name, or None.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # others cannot have handlers
            for number in (signal.SIGTERM, signal.SIGINT):
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def pass_on(self) -> None:
        """Raise the received signal again: it came when no step was left to stop after, and is for the caller."""
        if self.received is not None:
            signal.raise_signal(signal.Signals[self.received])

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, self._before[signal.SIGINT])
        # a handler may run in the midst of another write to the stream, which only the system's own call survives
        with contextlib.suppress(OSError):
            os.write(2, f"signalprop: {self.received}: stopping with a checkpoint after this step\n".encode())


# --- numbers that are not finite --------------------------------------------------------------------------------------


class Guard(TrainerCallback):
    """Stops a run before an optimizer step with a loss or gradient that is not finite, or after a step by a signal; and
    has the logs of a resumed one go on where they were.

    With float16 a gradient that is not finite is part of looking for the loss scale; the Trainer leaves such steps out.

    Attributes:
        stopping: whether the run was asked to stop.
    """

    def __init__(self, trainer: RecipeTrainer, interrupts: Interrupts) -> None:
        self._trainer, self._interrupts = trainer, interrupts
        self.stopping = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Go on with the losses that waited to be logged when the checkpoint was written."""
        trainer = self._trainer
        if trainer.recipe.parallel.fsdp and several() and not sharded(trainer.live):
            raise InputError("parallel.fsdp is set, and accelerate has not sharded the model; see its configuration")
        if trainer.goes_on_from is not None:
            waiting, last = pending_loss(trainer.goes_on_from, args.process_index, args.world_size)
            trainer._tr_loss += waiting
            trainer._globalstep_last_logged = last

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Forget the passes of the last step."""
        self._trainer.passes.clear()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Look at the numbers of the step before they get into the weights.

        Raises:
            Diverged: they are not finite.
        """
        trainer = self._trainer
        loss_bad, norm_bad = self._bad()
        scaler = trainer.accelerator.scaler
        if scaler is not None and scaler.get_scale() >= _SMALLEST_SCALE:
            norm_bad = False
        wish = self._interrupts.received is not None
        loss_bad, norm_bad, self.stopping = anywhere([loss_bad, norm_bad, wish], args.device)
        if loss_bad or norm_bad:
            what = "the loss" if loss_bad else "the gradient"
            raise Diverged(f"{what} is not finite in step {state.global_step + 1}: {explain(trainer)}")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Have a checkpoint written and the run ended, where it was asked for."""
        if self.stopping and state.global_step < state.max_steps:
            control.should_save = True
            control.should_training_stop = True

    def _bad(self) -> tuple[bool, bool]:
        """Whether loss and gradient of the step are not finite; one look at the device."""
        losses = [one.loss for one in self._trainer.passes]
        norm = self._trainer.last_norm
        if not isinstance(norm, Tensor):
            norm = losses[0].new_tensor(0.0 if norm is None else norm)
        full = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        seen = torch.stack([torch.stack(losses).sum().float(), full.detach().float().to(losses[0].device)])
        loss, gradient = seen.tolist()
        return not math.isfinite(loss), not math.isfinite(gradient)


def explain(trainer: RecipeTrainer) -> str:
    """Where the passes of the step went wrong first, in words; every process calls it."""
    if not sharded(trainer.live):
        found = gathered(_first_fault(trainer, trainer.network, trainer.passes, _gradients(trainer.network.base)))
        return next((place for place in found if place), _NOT_AGAIN)
    # a sharded model runs in all processes or in none, so the first one repeats the step with a whole model
    weights = weights_of(trainer.live)
    passes = gathered([one.on_cpu() for one in trainer.passes])
    place = None
    if first():
        network = network_of(trainer.recipe, trainer.prepared)
        fill_weights(network.module, weights, trainer.folder)
        network.module.train()
        place = next((p for p in (_first_fault(trainer, network, some, "") for some in passes) if p), None)
    return told(place) or _NOT_AGAIN


_NOT_AGAIN = "it was finite when the step was repeated"


def _gradients(module: nn.Module) -> str:
    """The first parameter whose gradient is not finite, in words, or ""."""
    for name, p in module.named_parameters():
        if p.grad is not None and not torch.isfinite(p.grad).all():
            return f"the gradient of {name} holds NaN or infinite values"
    return ""


def _first_fault(trainer: RecipeTrainer, network: Network, passes: list[Pass], otherwise: str) -> str:
    """Repeat the passes, as they were, until one is not finite; where it is so first, or `otherwise`."""
    for one in passes:
        try:
            with trainer.accelerator.autocast(), replayed(one.random):
                place = fault_of(network, one, trainer)
        except InputError as error:
            place = str(error)
        if place:
            return place
    return otherwise


def fault_of(network: Network, one: Pass, trainer: RecipeTrainer) -> str:
    """The first sublayer and point of a pass that is not finite, in words: of the signal, the logits, the gradient; or
    ""."""
    base = network.base
    recorder = Recorder(attach(base, network.mapping), backward=True)
    given = {name: value for name, value in one.inputs.items() if name != "labels"}
    try:
        recorder.attach()
        with torch.enable_grad(), lent_gradients(base):
            logits = trainer.logits_of(base(**given))
            place = not_finite(recorder, tables(recorder)[0])
            if place:
                return place
            if not torch.isfinite(logits).all():
                return "head: the logits hold NaN or infinite values first here"
            trainer.loss_of(logits, one.inputs["labels"], one.count).backward()  # type: ignore[no-untyped-call]
        # the advice on loss scales is not for this reader
        return not_finite(recorder, tables(recorder)[1], gradient=True).partition(";")[0]
    finally:
        recorder.detach()

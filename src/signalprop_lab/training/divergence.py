"""Where a step's numbers stopped being finite: its passes are repeated as they were, with a probe at every sublayer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.errors import InputError
from signalprop.measurement.losses import lent_gradients
from signalprop.measurement.result import not_finite, tables
from signalprop.watching.recording import Recorder
from signalprop_lab.training.networks import Network


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
    count: Tensor | float
    loss: Tensor
    random: tuple[Tensor, Tensor | None]

    def on_cpu(self) -> Pass:
        """The same, to be sent to other processes."""
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


def explained(
    network: Network,
    passes: Sequence[Pass],
    logits_of: Callable[[Any], Tensor],
    loss_of: Callable[[Tensor, Tensor, Tensor | float], Tensor],
    autocast: Callable[[], contextlib.AbstractContextManager[Any]],
) -> str:
    """Where the passes went wrong first, in words: repeated until one is not finite; else the first parameter whose
    gradient is not finite; else ""."""
    otherwise = _gradients(network.base)
    for one in passes:
        try:
            with autocast(), replayed(one.random):
                place = _fault_of(network, one, logits_of, loss_of)
        except InputError as error:
            place = str(error)
        if place:
            return place
    return otherwise


def _gradients(module: nn.Module) -> str:
    for name, p in module.named_parameters():
        if p.grad is not None and not torch.isfinite(p.grad).all():
            return f"the gradient of {name} holds NaN or infinite values"
    return ""


def _fault_of(network: Network, one: Pass, logits_of: Any, loss_of: Any) -> str:
    """The first sublayer and point of a pass that is not finite, in words: of the signal, the logits, the gradient; or
    ""."""
    base = network.base
    recorder = Recorder(network.anatomy, backward=True)
    given = {name: value for name, value in one.inputs.items() if name != "labels"}
    try:
        recorder.attach()
        with torch.enable_grad(), lent_gradients(base):
            logits = logits_of(base(**given))
            place = not_finite(recorder, tables(recorder)[0])
            if place:
                return place
            if not torch.isfinite(logits).all():
                return "head: the logits hold NaN or infinite values first here"
            loss_of(logits, one.inputs["labels"], one.count).backward()
        # the advice on loss scales is not for this reader
        return not_finite(recorder, tables(recorder)[1], gradient=True).partition(";")[0]
    finally:
        recorder.detach()

"""The streams of a model, found in one small forward pass and proved in a second."""

from __future__ import annotations

import random
from collections.abc import Iterator
from collections.abc import Mapping as Dictionary
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.errors import InputError, first_line
from signalprop.streams.arguments import tiny_arguments
from signalprop.streams.calls import UnknownCall, first_sequence, remembered
from signalprop.streams.finder import Finder
from signalprop.streams.live_model import device_of, evaluating, without_numbers
from signalprop.streams.proof import Norm, prove
from signalprop.streams.streams import Streams
from signalprop.streams.tape import record
from signalprop.streams.token_axis import with_token_axis


def streams_of(model: nn.Module, arguments: Dictionary[str, Any] | None = None) -> Streams:
    """The streams of a model without wrappers, called with arguments of its forward by name; see `anatomy`."""
    invented = arguments is None and remembered(model) is None
    given = tiny_arguments(model) if arguments is None else first_sequence(arguments)
    numbers = not without_numbers(model)
    if numbers:
        device = device_of(model)
        given = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in given.items()}
    with as_it_was(model):
        try:
            finder = Finder(model, record(model, given))
        except InputError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {first_line(error)}"
            why = f"{type(model).__name__} does not run on {', '.join(given)} ({what})"
            if not numbers:
                raise InputError(f"initialise it, since this model needs numbers to run: {why}") from None
            refusal = UnknownCall(f"{why}, which are random") if invented else InputError(f"change the inputs: {why}")
            raise refusal from None
        stacks = tuple(finder.stacks())
        if not stacks:
            raise InputError(
                "give a mapping, which names the branches: no residual stream was found, that is, no list of layers in "
                f"which {type(model).__name__} adds to what it carries (layers with stacked weights "
                "first need a module each)"
            )
        silent = tuple(finder.not_run(stacks))
        norms: tuple[Norm, ...] = ()
        if numbers:
            stacks, norms = prove(model, given, stacks)
            stacks = with_token_axis(model, given, stacks)
    return Streams(type(model).__name__, stacks, norms, tuple(given), invented, numbers, silent)


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, and single precision; afterwards modes and random states are as before.

    A model that accelerate has prepared for mixed precision has a forward that casts, in place of the original one.
    """
    states = torch.get_rng_state(), random.getstate()
    device = device_of(model)
    original, casting = (vars(model).get(name) for name in ("_original_forward", "forward"))
    if original is not None and casting is not None:
        vars(model)["forward"] = original
    try:
        with evaluating(model), torch.autocast("cpu" if device.type == "meta" else device.type, enabled=False):
            yield
    finally:
        if original is not None and casting is not None:
            vars(model)["forward"] = casting
        torch.set_rng_state(states[0])
        random.setstate(states[1])

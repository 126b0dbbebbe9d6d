"""How a model is called: whatever a user hands over, as the arguments of its forward.

`arguments_in` is the one place that turns inputs into a call, `call` the one that makes it. What a model was called
with last, `remember` keeps (of one sequence), so that a verb that was given no inputs need not make any up.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from collections.abc import Mapping as Dictionary
from contextlib import suppress
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from signalprop.data.batches import Batch
from signalprop.errors import InputError
from signalprop.network.inputs import InputStatistics

_REMEDY = "give its inputs, what the model is called with: a tensor, a tuple, a dictionary, or a function of the model"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
_known: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()


class UnknownCall(InputError):
    """The arguments of the model are unknown, and random ones do not fit."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{_REMEDY}: {why}")


class _Captured(BaseException):
    """The model is being called: what with is known."""


def arguments_in(model: nn.Module, inputs: Any) -> dict[str, Any]:
    """The arguments of the model's forward, by name.

    Args:
        inputs: a tensor or array (the first argument), a tuple or list (the first arguments; those that the forward
            does not take, as the labels of a loader's batch, are left out), a dictionary of arguments, or a function
            that is given the model and calls it.

    Raises:
        InputError: anything else, arguments that the forward does not take, tensors that hold no plain numbers, or a
            function that does not call the model.
    """
    if isinstance(inputs, Dictionary):
        named = {str(name): _tensor(value) for name, value in inputs.items()}
        try:
            return _named(model, (), named)
        except TypeError as error:
            first = next(iter(signature_of(model).parameters.values()), None)
            tensor = first is not None and first.annotation in (Tensor, "Tensor", "torch.Tensor")
            if first is not None and first.name not in named and not tensor:
                try:  # a forward that takes a dictionary
                    return _named(model, (inputs,), {})
                except TypeError:
                    pass
            raise InputError(f"inputs= do not fit the forward of {type(model).__name__}: {error}") from None
    if isinstance(inputs, (Tensor, np.ndarray)):
        inputs = (inputs,)
    if isinstance(inputs, (tuple, list)) and inputs:
        values = tuple(_tensor(value) for value in inputs)
        for n in range(len(values), 0, -1):
            try:
                return _named(model, values[:n], {})
            except TypeError as error:
                why = error
        raise InputError(f"inputs= do not fit the forward of {type(model).__name__}: {why}")
    if is_function(inputs):
        return _called_by(inputs, model)
    raise InputError(
        f"inputs= is a {type(inputs).__name__}; expected a tensor, a tuple of them, a dictionary of arguments, or a "
        "function that calls the model"
    )


def signature_of(model: nn.Module) -> inspect.Signature:
    """What the model's forward takes."""
    try:
        return inspect.signature(model.forward)
    except ValueError:
        raise InputError(
            f"give the model that this {type(model).__name__} was compiled from: TorchScript hides its modules"
        ) from None


def is_function(inputs: Any) -> TypeGuard[Callable[[nn.Module], Any]]:
    """Whether inputs are a function of the model."""
    return callable(inputs) and not isinstance(inputs, (nn.Module, type))


def call(model: nn.Module, arguments: Dictionary[str, Any]) -> Any:
    """Call the model with arguments by name."""
    parameters = signature_of(model).parameters
    args: list[Any] = []
    for name, parameter in parameters.items():
        if parameter.kind in _POSITIONAL and name in arguments:
            args += arguments[name] if parameter.kind is parameter.VAR_POSITIONAL else [arguments[name]]
    named = {k: v for k, v in arguments.items() if k not in parameters or parameters[k].kind not in _POSITIONAL}
    return model(*args, **named)


class Enough(BaseException):
    """All that a pass was to show has been seen; raised by a hook, so that what comes after it does not run."""


def call_until_enough(model: nn.Module, arguments: Dictionary[str, Any]) -> Any:
    """As `call`; None where the pass was ended by `Enough`."""
    with suppress(Enough):
        return call(model, arguments)
    return None


def can_end(model: nn.Module) -> bool:
    """Whether a pass may end midway: not where hooks of others (FSDP, accelerate) wait for the rest of it."""
    return not any(module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook")
                   for module in model.modules())  # fmt: skip


def remember(model: nn.Module, inputs: Any) -> dict[str, Any] | None:
    """Keep one sequence of what the model is called with, for whatever is asked of it later.

    Returns:
        All arguments, by name; None where the inputs are none, or a Batch or statistics, which say nothing of a call.
    """
    if inputs is None or isinstance(inputs, (Batch, InputStatistics)):
        return None
    arguments = arguments_in(model, inputs)
    empty = next((k for k, v in arguments.items() if isinstance(v, Tensor) and v.ndim > 1 and not v.numel()), None)
    if empty is not None:
        raise InputError(f"{empty} is empty, of shape {tuple(arguments[empty].shape)}; expected a token and more")
    _known[model] = first_sequence(arguments)
    return arguments


def remembered(model: nn.Module) -> dict[str, Any] | None:
    """One sequence of what the model was called with; None where nobody said."""
    found = _known.get(model)
    return None if found is None else dict(found)


def first_sequence(arguments: Dictionary[str, Any]) -> dict[str, Any]:
    """The arguments with the first sequence of each tensor alone, where all tensors hold as many.

    Tensors whose first dimension is longer than the second hold tokens first, and one of a single dimension is a row of
    tokens: they stay whole.
    """
    tensors = [v for v in arguments.values() if isinstance(v, Tensor) and v.ndim]
    main = max(tensors, key=lambda v: v.ndim, default=None)
    rows = main is not None and main.ndim > 1 and (main.ndim > 3 or main.shape[0] <= main.shape[1])
    one_length = rows and len({len(v) for v in tensors}) == 1
    return {k: v[:1].clone() if one_length and isinstance(v, Tensor) and v.ndim else v for k, v in arguments.items()}


def _tensor(value: Any) -> Any:
    """An array as a tensor; everything else as it is."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufc":
            raise InputError(f"inputs= holds an array of {value.dtype}; expected numbers")
        return torch.as_tensor(value)
    if isinstance(value, Tensor) and value.layout != torch.strided:
        raise InputError(f"inputs= holds a tensor of layout {value.layout}; give a dense one: .to_dense()")
    if isinstance(value, Tensor) and value.is_meta:
        raise InputError("inputs= holds a tensor on the meta device, which has no numbers; give one that has")
    return value


def _named(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name; those of **kwargs beside the others. TypeError: the forward does not take them."""
    signature = signature_of(model)
    bound = dict(signature.bind(*args, **kwargs).arguments)
    rest = next((n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), None)
    return {**bound, **bound.pop(rest)} if rest in bound else bound


def _called_by(function: Callable[[nn.Module], Any], model: nn.Module) -> dict[str, Any]:
    """What the function calls the model with; the model itself does not run."""
    found: list[dict[str, Any]] = []

    def capture(_: nn.Module, args: Any, kwargs: Any) -> None:
        found.append(_named(model, args, kwargs))
        raise _Captured

    handle = model.register_forward_pre_hook(capture, with_kwargs=True, prepend=True)
    states = torch.get_rng_state()
    try:
        function(model)
    except _Captured:
        pass
    finally:
        handle.remove()
        torch.set_rng_state(states)
    if not found:
        raise InputError(
            "inputs= is a function that never calls the model it is given; expected one as lambda model: model(batch)"
        )
    return found[0]

"""All or nothing: whatever ends a change midway, an interrupt included, the model is bit by bit as it was."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from signalprop.files.limits import memory_free

_SHARE = 0.5  # of the memory that is free: the most that a copy of old weights takes
_THROWN_AWAY: WeakSet[nn.Module] = WeakSet()


def thrown_away(model: nn.Module) -> None:
    """Whoever changes this model drops it if that fails, as a command does: its numbers need no copies."""
    _THROWN_AWAY.add(model)


@contextmanager
def all_or_nothing(model: nn.Module, overwritten: Iterable[Tensor] = ()) -> Iterator[None]:
    """Put the model back as it was, whatever ends the block but its end.

    Classes, attributes, hooks and names of modules, marks on parameters, and configurations are put back; numbers only
    of the tensors that are `overwritten`, of which there is a copy in memory meanwhile (a warning says so where that
    would take more than half of what is free, and there is none). Numbers on the meta device need none.
    """
    saved = Saved(model, () if model in _THROWN_AWAY else overwritten)
    try:
        yield
    except BaseException:
        saved.restore()
        raise


class Saved:
    """What a model is, to be put back."""

    def __init__(self, model: nn.Module, overwritten: Iterable[Tensor] = ()) -> None:
        modules = list(model.modules())
        self._objects: list[tuple[Any, type, dict[str, Any], list[tuple[Any, Any]]]] = []
        for item in {id(found): found for found in (*modules, *configs_of(modules))}.values():
            inner = [(value, value.copy()) for value in vars(item).values() if isinstance(value, (dict, set))]
            self._objects.append((item, type(item), dict(vars(item)), inner))
        tensors = [tensor for module in modules for held in (module._parameters, module._buffers)
                   for tensor in held.values() if tensor is not None]  # fmt: skip
        self._marks = [(tensor, dict(vars(tensor)), tensor.requires_grad) for tensor in tensors]
        there = {id(tensor): local(tensor) for tensor in overwritten if not tensor.is_meta}
        self._numbers = list(zip(there.values(), _copies(list(there.values())), strict=True))

    def restore(self) -> None:
        """Put everything back."""
        for item, cls, attributes, inner in self._objects:
            if type(item) is not cls:
                item.__class__ = cls
            _refill(vars(item), attributes)
            for value, content in inner:
                _refill(value, content)
        for tensor, marks, trains in self._marks:
            _refill(vars(tensor), marks)
            if tensor.requires_grad != trains:
                tensor.requires_grad_(trains)
        with torch.no_grad():
            for tensor, before in self._numbers:
                tensor.copy_(before)


def everything(model: nn.Module) -> list[Tensor]:
    """All parameters and buffers."""
    return [*model.parameters(), *model.buffers()]


def _refill(now: Any, before: Any) -> None:
    """Give a dictionary or set the content that it had."""
    same = list(now) == list(before)
    if not same or (isinstance(now, dict) and any(now[key] is not before[key] for key in before)):
        now.clear()
        now.update(before)


def configs_of(modules: Iterable[nn.Module]) -> list[Any]:
    """The configurations of transformers that modules hold, and those inside them."""
    found: dict[int, Any] = {}
    waiting = [config for module in modules if hasattr(config := vars(module).get("config"), "__dict__")]
    while waiting:
        config = waiting.pop()
        if id(config) not in found:
            found[id(config)] = config
            waiting += [value for value in vars(config).values() if hasattr(value, "to_dict")]
    return list(found.values())


def local(tensor: Tensor) -> Tensor:
    """The numbers that this process holds."""
    found: Tensor = tensor.detach()
    return found.to_local() if hasattr(found, "to_local") else found


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of tensors, outside of accelerators."""
    needed = sum(tensor.nbytes for tensor in tensors)
    free = memory_free()
    if free is None or needed <= _SHARE * free:
        return [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    warnings.warn(
        f"no memory for a copy of the weights that are overwritten ({needed / 1e9:.1f} GB): an interruption "
        "would leave some of them new and some old",
        UserWarning,
        stacklevel=5,
    )
    return tensors

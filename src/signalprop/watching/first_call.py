"""A model whose call nobody knows is looked at when it is first called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from signalprop.attachment.attached import Attached, attach
from signalprop.attachment.mapping import Mapping
from signalprop.hooks import is_compiled, plainly_before
from signalprop.streams.calls import UnknownCall, remember
from signalprop.streams.wrappers import unwrapped

Takes = Callable[[Attached], None]
Begins = Callable[[nn.Module, Any, Any], None]


class FirstCall:
    """Waits for the first call of a model, and resolves its mapping by that.

    Args:
        take: is given the model with its mapping. begin: is called after that with the model and its arguments, before
            the call that they are of.
    """

    def __init__(self, model: nn.Module, mapping: Mapping | None, take: Takes, begin: Begins) -> None:
        self._outer, self._mapping, self._take, self._begin = model, mapping, take, begin
        self._handle = plainly_before(unwrapped(model), self._called)

    def remove(self) -> None:
        """Wait no longer."""
        self._handle.remove()

    def _called(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self.remove()
        bound = inspect.signature(model.forward).bind_partial(*args)
        rest = next((n for n, p in inspect.signature(model.forward).parameters.items() if p.kind is p.VAR_KEYWORD), "")
        named = {**bound.arguments, **kwargs}
        self._take(attach(self._outer, self._mapping, {**named, **named.pop(rest, {})}))
        self._begin(model, args, kwargs)


def attached_now_or_later(
    model: nn.Module, mapping: Mapping | None, inputs: Any, take: Takes, begin: Begins, *, now: bool
) -> FirstCall | None:
    """Give `take` the model with its mapping: now where it is known how the model is called, else at its first call.

    Args:
        inputs: what it is called with, where somebody says so. now: there is no later, as of compiled code.
    """
    arguments = remember(unwrapped(model), inputs)
    try:
        attached = attach(model, mapping, arguments)
    except UnknownCall:
        if now or is_compiled(model):
            raise
        return FirstCall(model, mapping, take, begin)
    take(attached)
    return None

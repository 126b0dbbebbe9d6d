"""A model whose call nobody knows is looked at when it is first called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from signalprop.attachment.anatomy import Anatomy, attach, bare
from signalprop.attachment.mapping import Mapping
from signalprop.hooks import is_compiled, plainly_before
from signalprop.streams.calls import UnknownCall

Takes = Callable[[Anatomy], None]
Begins = Callable[[nn.Module, Any, Any], None]


def attached_now_or_later(
    model: nn.Module | Anatomy, mapping: Mapping | None, inputs: Any, take: Takes, begin: Begins, *, now: bool
) -> Callable[[], None]:
    """Give `take` the model with its mapping: now where it is known how the model is called, else at its first call.

    Args:
        inputs: what it is called with, if somebody says so. now: it cannot be later, as with compiled code.
        begin: called at the first call, after `take` and before the model runs, with the model and its arguments.

    Returns:
        What ends the waiting.
    """
    inner = bare(model)
    try:
        attached = attach(model, mapping, inputs)
    except UnknownCall:
        if now or not isinstance(model, nn.Module) or is_compiled(model):
            raise
    else:
        take(attached)
        return lambda: None

    def called(inner: nn.Module, args: Any, kwargs: Any) -> None:
        handle.remove()
        signature = inspect.signature(inner.forward)
        rest = next((n for n, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD), "")
        named = {**signature.bind_partial(*args).arguments, **kwargs}
        take(attach(model, mapping, {**named, **named.pop(rest, {})}))
        begin(inner, args, kwargs)

    handle = plainly_before(inner, called)
    return handle.remove

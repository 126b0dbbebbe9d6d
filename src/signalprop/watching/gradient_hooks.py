"""Hooks on the gradients of tensors that pass in a forward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from signalprop.hooks import Handle


class GradientHooks:
    """Hooks on the gradients of tensors of one pass, by a number, each tensor's once.

    Under gradient checkpointing a tensor is computed twice, and the one that has a gradient comes second where the
    checkpoint is reentrant: the first that has one is hooked. An addition hands one and the same gradient to both of
    its terms: what was made of it is taken again, not made anew.

    Args:
        keep: called with the number and what was made of its gradient, once for each number.
    """

    def __init__(self, keep: Callable[[int, Any], None]) -> None:
        self._keep = keep
        self._handles: dict[int, Handle] = {}
        self._kept: set[int] = set()
        self._last: tuple[weakref.ref[Tensor], int, Any] | None = None

    def see(self, index: int, tensor: Tensor, make: Callable[[int, Tensor], Any]) -> None:
        """Hook the gradient of a number's first tensor; `make` is called with both, once for each gradient."""
        if index not in self._handles:
            self._handles[index] = tensor.register_hook(partial(self._flows, index, make))  # type: ignore[no-untyped-call]

    def clear(self) -> None:
        """Take all hooks off, for another pass."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._kept.clear()
        self._last = None

    def _flows(self, index: int, make: Callable[[int, Tensor], Any], gradient: Tensor | None) -> None:
        if index in self._kept or gradient is None:  # None: quantised maps follow, which have no gradient
            return
        self._kept.add(index)
        last = self._last
        if last is None or last[0]() is not gradient or last[1] != gradient._version:
            made = make(index, gradient.detach())
            # weakly: what is held cannot be added to in place, nor its memory be used again, at twice the cost of all
            self._last = last = weakref.ref(gradient), gradient._version, made
        self._keep(index, last[2])

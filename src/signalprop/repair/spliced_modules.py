"""The modules that carry a scheme's multipliers inside a model whose forward code stays as it is.

Every number is a plain float attribute, which neither a meta device nor `to_empty` can erase; what trains is a
parameter.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from signalprop.repair.module_swaps import Splice


class _Local(threading.local):
    tensor: Tensor | None = None


class Passed:
    """A tensor on its way from the module that saw it to the module that needs it, within one sublayer.

    All sublayers of a model share one: each reads the stream and takes it again before the next one does, so that a
    tensor which an interrupted forward pass leaves behind is gone once the next one begins. Threads see their own. It
    is not a module, so it adds no keys, and it is empty outside of a forward pass.

    Compiled code writes to a plain attribute: what it writes to a thread's own is lost where a graph breaks.
    """

    def __init__(self) -> None:
        self.traced: Tensor | None = None
        self.own = _Local()

    def __reduce__(self) -> Any:
        return Passed, ()  # what is on its way is not part of a copy

    def put(self, tensor: Tensor) -> None:
        """Leave the tensor for the module that needs it."""
        if torch.compiler.is_compiling():
            self.traced = tensor
        else:
            self.traced, self.own.tensor = None, tensor

    def take(self) -> Tensor:
        """The tensor; it is let go of."""
        if self.traced is not None:
            tensor, self.traced = self.traced, None
            return tensor
        found, self.own.tensor = self.own.tensor, None
        assert found is not None, "the module that reads the stream did not run before the one that writes to it"
        return found


class Multiplied(Splice):
    """A module whose (first) input and whose output, bias included, are multiplied by numbers."""

    brings = ("input_scale", "branch_scale")
    input_scale: float
    branch_scale: float

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.input_scale != 1.0:
            args = (args[0] * self.input_scale, *args[1:])
        out = super().forward(*args, **kwargs)
        if self.branch_scale == 1.0:
            return out
        return (out[0] * self.branch_scale, *out[1:]) if isinstance(out, tuple) else out * self.branch_scale


class Reading(Splice):
    """A module whose first argument is the stream that a later module of the layer needs again."""

    brings = ("stream",)
    adaptable = True
    stream: Passed

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.stream.put(args[0])
        return super().forward(*args, **kwargs)


class Rewired(Splice):
    """The last map of a branch, which returns what the model has to add to the stream to get the wanted one.

    The model computes `stream + this`. With the stream x and the branch f (output dropout included, which is done
    here): this = gauge * multiplier * f as long as the stream goes on as it is (`stream` None), else
    this = (skip - 1) * x + multiplier * f.

    Attributes:
        multiplier, skip: numbers, or parameters of shape (1,) or (features,).
        gauge: factor on the multiplier, where the stream is carried in other units.
        dropout_p: probability of the output dropout that this module took over.
        point: an identity without parameters, where the branch can be seen.
    """

    brings = ("stream", "multiplier", "skip", "gauge", "dropout_p", "point")
    stream: Passed | None
    multiplier: float | nn.Parameter
    skip: float | nn.Parameter
    gauge: float
    dropout_p: float
    point: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # taken first: checkpointing stops its recomputation at the last tensor it needs, which the map itself may save
        stream = None if self.stream is None else self.stream.take()
        out = super().forward(*args, **kwargs)
        first = out[0] if isinstance(out, tuple) else out
        branch = self.point(F.dropout(first, self.dropout_p, self.training))
        multiplier = self.multiplier if stream is not None else self.multiplier * self.gauge
        if isinstance(multiplier, Tensor) or multiplier != 1.0:
            branch = _number(multiplier, branch) * branch
        added = branch if stream is None else _plus(branch, self.skip - 1.0, stream)
        return (added, *out[1:]) if isinstance(out, tuple) else added


def _number(value: float | Tensor, like: Tensor) -> float | Tensor:
    """A multiplier in the type of what it multiplies, so that autocast's types stay."""
    return value.to(like.dtype) if isinstance(value, Tensor) else value


def _plus(branch: Tensor, factor: float | Tensor, stream: Tensor) -> Tensor:
    """branch + factor * stream, in one pass where that is not compiled (`alpha` would be a constant of the graph)."""
    if isinstance(factor, Tensor) or torch.compiler.is_compiling():
        return branch + _number(factor, stream) * stream
    return torch.add(branch, stream, alpha=factor)

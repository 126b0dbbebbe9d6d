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

from signalprop.errors import InputError
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


class Emitting(Splice):
    """The map whose output holds the values, for the output projection that adds them (Value-SkipInit)."""

    brings = ("values",)
    values: Passed

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        self.values.put(out)
        return out


class Passing(Splice):
    """A norm that was taken out of its place: the stream passes. `normalise` is what it did."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0]

    def normalise(self, stream: Tensor) -> Tensor:
        """The norm itself, for a place after the addition."""
        out: Tensor = super().forward(stream)
        return out

    def _replicate_for_data_parallel(self) -> Any:
        raise InputError(
            "nn.DataParallel copies modules but not what they hold of each other, such as a norm that a scheme moved; "
            "use DistributedDataParallel"
        )


class Placed:
    """Holds a norm for the module that calls it, without owning it: its keys stay where they were."""

    def __init__(self, norm: Passing) -> None:
        self.norm = norm


class Rewired(Splice):
    """The last map of a branch, which returns what the model has to add to the stream to get the wanted one.

    The model computes `stream + this`. With the stream x and the branch f (output dropout included, which is done
    here): this = gauge * multiplier * f as long as the stream goes on as it is (`stream` None), else
    this = (skip - 1) * x + multiplier * f, or, if `placed` holds a norm, norm(skip * x + multiplier * f) - x.

    Attributes:
        multiplier, skip: numbers, or parameters of shape (1,) or (features,).
        gauge: factor on the multiplier, where the stream is carried in other units.
        dropout_p: probability of the output dropout that this module took over.
        post_norm: second norm of a sandwich that the vanilla model does not have; or None.
        point, after: identities without parameters, where the branch, and a stream that was normed here, can be seen.
    """

    brings = ("stream", "placed", "multiplier", "skip", "gauge", "dropout_p", "post_norm", "point", "after")
    stream: Passed | None
    placed: Placed | None
    multiplier: float | nn.Parameter
    skip: float | nn.Parameter
    gauge: float
    dropout_p: float
    post_norm: nn.Module | None
    point: nn.Module
    after: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # taken first: checkpointing stops its recomputation at the last tensor it needs, which the map itself may save
        stream = None if self.stream is None else self.stream.take()
        out = super().forward(*args, **kwargs)
        first = out[0] if isinstance(out, tuple) else out
        branch = F.dropout(first, self.dropout_p, self.training)
        if self.post_norm is not None:
            branch = self.post_norm(branch)
        branch = self.point(branch)
        multiplier = self.multiplier if stream is not None else self.multiplier * self.gauge
        if isinstance(multiplier, Tensor) or multiplier != 1.0:
            branch = _number(multiplier, branch) * branch
        if stream is None:
            added = branch
        elif self.placed is None:
            added = _plus(branch, self.skip - 1.0, stream)
        else:
            after = self.placed.norm.normalise(_plus(branch, self.skip, stream))
            added = self.after(after) - stream
        return (added, *out[1:]) if isinstance(out, tuple) else added


def _number(value: float | Tensor, like: Tensor) -> float | Tensor:
    """A multiplier in the type of what it multiplies, so that autocast's types stay."""
    return value.to(like.dtype) if isinstance(value, Tensor) else value


def _plus(branch: Tensor, factor: float | Tensor, stream: Tensor) -> Tensor:
    """branch + factor * stream, in one pass where that is not compiled (`alpha` would be a constant of the graph)."""
    if isinstance(factor, Tensor) or torch.compiler.is_compiling():
        return branch + _number(factor, stream) * stream
    return torch.add(branch, stream, alpha=factor)


class Mixing(Splice):
    """An output projection that reads `attention_gain * (A V) + value_skip * V` (He et al. 2023, section 3.1).

    V is taken from the projection that makes it, so caches, masks and attention kernels do not matter.

    Attributes:
        value_skip, attention_gain: numbers, or parameters of shape (1,).
        value_rows: the output features of that projection which are values; None: all.
        groups: query heads per value head. d_head: features of a head.
    """

    brings = ("values", "value_skip", "attention_gain", "value_rows", "groups", "d_head")
    values: Passed
    value_skip: float | nn.Parameter
    attention_gain: float | nn.Parameter
    value_rows: Any
    groups: int
    d_head: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mixed, values = args[0], self.values.take()
        if self.value_rows is not None:
            values = values[..., self.value_rows]
        if self.groups > 1:
            heads = values.reshape(*values.shape[:-1], -1, 1, self.d_head)
            values = heads.expand(*heads.shape[:-2], self.groups, self.d_head).flatten(-3)
        mixed = _number(self.attention_gain, mixed) * mixed + _number(self.value_skip, values) * values
        return super().forward(mixed, *args[1:], **kwargs)

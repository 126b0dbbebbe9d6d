"""Splices: modules of a model that exists get another `forward`, without new keys, wrappers or hooks.

`splice(module, mixin)` replaces the module's class by a subclass that mixes the mixin in. There is one such class per
mixin and base, so that torch.compile sees one type where the vanilla model has one; pickle and deepcopy rebuild it.
What mixins bring are plain float attributes, which neither a meta device nor `to_empty` can erase; what trains is a
parameter.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from signalprop.errors import InputError


class Splice(nn.Module):
    """What all mixins share: they come before the vanilla class, so that `super().forward` is its forward.

    `brings`: the attributes that a mixin sets on a module. `adaptable`: an adapter may be parallel to its map.
    `keeps_name`: the class that it makes has the vanilla one's name.
    """

    brings: tuple[str, ...] = ()
    adaptable = keeps_name = False
    _mixins: tuple[type[Splice], ...] = ()
    _vanilla: type[nn.Module] = nn.Module

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _empty, (self._mixins, self._vanilla), self.__dict__


def _empty(mixins: tuple[type[Splice], ...], vanilla: type[nn.Module]) -> nn.Module:
    """A module without contents, of the class that splicing the mixins gives; pickle fills it."""
    cls: Any = vanilla
    for mixin in mixins:
        cls = spliced(mixin, cls)
    made: nn.Module = cls.__new__(cls)
    return made


_CLASSES: dict[tuple[type, type], type] = {}


def spliced(mixin: type[Splice], base: type[nn.Module]) -> Any:
    """The class of a `base` with the mixin before it; always the same class for the same two."""
    if (mixin, base) in _CLASSES:
        return _CLASSES[mixin, base]
    mixins: tuple[type[Splice], ...] = (*getattr(base, "_mixins", ()), mixin)
    vanilla = getattr(base, "_vanilla", base)
    name = base.__name__ if mixin.keeps_name else mixin.__name__ + base.__name__
    body = {"__module__": base.__module__, "__qualname__": name, "__doc__": base.__doc__}
    made = _CLASSES[mixin, base] = type(name, (mixin, base), body | {"_mixins": mixins, "_vanilla": vanilla})
    return made


def refuse_adapters(model: nn.Module) -> None:
    """Raise InputError where an adapter (peft's, which call the map `base_layer`) is parallel to a multiplied map."""
    for path, module in model.named_modules():
        child = module._modules.get("base_layer")
        if isinstance(child, Splice) and not all(mixin.adaptable for mixin in child._mixins):
            raise InputError(
                f"{path} has an adapter on a map with a scheme's multiplier, which the adapter does not "
                "get, so merging would change the function; load the model again and fold(model) before adapters are "
                "added, or adapt other maps"
            )


def splice(module: nn.Module, mixin: type[Splice], **attributes: Any) -> None:
    """Mix the mixin into this one module, and set plain attributes on it."""
    if "forward" in mixin.__dict__ and "forward" in module.__dict__:
        raise InputError(
            f"a {type(module).__name__} has had its forward replaced on the instance (by accelerate's device_map, or a "
            "kernel), which hides multipliers; apply the scheme first"
        )
    module.__class__ = spliced(mixin, type(module))
    for name, value in attributes.items():
        setattr(module, name, value)


def carry_over(old: nn.Module, new: nn.Module) -> None:
    """Splice what the old module carries into one that takes its place."""
    if new is old or not isinstance(old, Splice):
        return
    for mixin in old._mixins:
        splice(new, mixin, **{name: getattr(old, name) for name in mixin.brings})


def restore(module: nn.Module) -> None:
    """Give a module its vanilla class back; attributes that mixins brought are deleted."""
    if not isinstance(module, Splice):
        return
    for mixin in module._mixins:
        for name in mixin.brings:
            for place in (module.__dict__, module._parameters, module._modules):
                place.pop(name, None)
    vanilla: Any = module._vanilla
    module.__class__ = vanilla


# --- what carries a scheme's multipliers ------------------------------------------------------------------------------


class _Local(threading.local):
    tensor: Tensor | None = None


class Passed:
    """A tensor on its way from the module that saw it to the module that needs it, within one sublayer.

    All sublayers of a model share one: each reads the stream and takes it again before the next one does, so that a
    tensor which an interrupted forward pass leaves is gone once the next one begins. Each thread sees its tensor. It
    is not a module, so it adds no keys, and it is empty outside of a forward pass.

    Compiled code writes to a plain attribute: what it writes to a thread's copy is lost where a graph breaks.
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

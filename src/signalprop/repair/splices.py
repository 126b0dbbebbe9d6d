"""Splices: modules of a model that exists get another `forward`, without new keys, wrappers or hooks.

`splice(module, mixin)` replaces the module's class by a subclass that mixes the mixin in. There is one such class per
mixin and base, so that torch.compile sees one type where the vanilla model has one; pickle and deepcopy rebuild it.
What mixins bring are plain float attributes, which neither a meta device nor `to_empty` can erase; what trains is a
parameter.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import nn

from signalprop.errors import InputError


class Splice(nn.Module):
    """What all mixins share: they come before the vanilla class, so that `super().forward` is its forward.

    `brings`: the attributes that a mixin sets on a module. `keeps_name`: the class that it makes has the vanilla name.
    """

    brings: tuple[str, ...] = ()
    keeps_name = False
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
        if isinstance(module._modules.get("base_layer"), Splice):
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


def trained_multipliers(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a scheme added to a model, by their names."""
    found = ((path, module) for path, module in model.named_modules() if isinstance(module, TrainedMultiplier))
    return {f"{path}.multiplier": module.multiplier for path, module in found}


class TrainedMultiplier(Splice):
    """The last map of a branch, whose output is multiplied by a parameter after the branch's dropout.

    Attributes:
        multiplier: of shape (1,) or (features,).
        gauge: factor beside it, for the units in which the stream is carried.
        dropout_p: probability of the output dropout that this module took over.
        point: an identity without parameters, where the branch can be seen.
    """

    brings = ("multiplier", "gauge", "dropout_p", "point")
    multiplier: nn.Parameter
    gauge: float
    dropout_p: float
    point: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        first = out[0] if isinstance(out, tuple) else out
        branch = self.point(F.dropout(first, self.dropout_p, self.training))
        branch = (self.multiplier * self.gauge).to(branch.dtype) * branch  # so that autocast's types stay
        return (branch, *out[1:]) if isinstance(out, tuple) else branch

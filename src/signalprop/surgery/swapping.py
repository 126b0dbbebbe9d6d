"""Class swap: give a module that exists another `forward`, without new keys, wrappers or hooks.

`splice(module, mixin)` replaces the module's class by a subclass that mixes the mixin in. There is one such class per
mixin and base, so that torch.compile sees one type where the vanilla model has one; pickle and deepcopy rebuild it.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class Splice(nn.Module):
    """What all mixins share: they come before the vanilla class, so that `super().forward` is its forward."""

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
    name = base.__name__ if mixin.__dict__.get("keeps_name") else mixin.__name__ + base.__name__
    body = {"__module__": base.__module__, "__qualname__": name, "__doc__": base.__doc__}
    made = _CLASSES[mixin, base] = type(name, (mixin, base), body | {"_mixins": mixins, "_vanilla": vanilla})
    return made


def splice(module: nn.Module, mixin: type[Splice], **attributes: Any) -> None:
    """Mix the mixin into this one module, and set plain attributes on it."""
    module.__class__ = spliced(mixin, type(module))
    for name, value in attributes.items():
        setattr(module, name, value)


def has(module: nn.Module, mixin: type[Splice]) -> bool:
    """Whether the mixin was spliced into the module."""
    return isinstance(module, mixin)


def restore(module: nn.Module) -> None:
    """Give a module its vanilla class back; attributes that mixins brought are deleted."""
    if not isinstance(module, Splice):
        return
    for mixin in module._mixins:
        for name in mixin.__dict__.get("brings", ()):
            for place in (module.__dict__, module._parameters, module._modules):
                place.pop(name, None)
    vanilla: Any = module._vanilla
    module.__class__ = vanilla

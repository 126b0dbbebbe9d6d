"""The epsilon of the norms on a stream, and which entry of a configuration it comes from: a fresh model shows it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from signalprop.attachment.anatomy import Anatomy
from signalprop.repair.undoing import configs_of

_NAMES = ("eps", "variance_epsilon")
Holder = tuple[nn.Module, str]  # a module and the attribute


@dataclass(frozen=True)
class Epsilon:
    """The epsilon of the norms on the stream.

    Attributes:
        holders: of these. entries: (configuration, key) that they take it from. beside: holders of other norms that
            take it from there, too, by their path.
        problem: why it cannot be divided, in the modules and in the configuration; "".
    """

    holders: Sequence[Holder]
    problem: str = ""
    entries: Sequence[tuple[Any, str]] = ()
    beside: Mapping[str, Holder] = field(default_factory=dict)

    @classmethod
    def of(cls, attached: Anatomy) -> Epsilon:
        """Of a model: an entry counts where norms on the stream follow it in a model built anew."""
        model: Any = attached.model
        known = {
            path: norm for path, norm in model.named_modules() if any(norm is one for one in attached.norm_modules)
        }
        holders = [holder for norm in known.values() if (holder := _holder(norm)) is not None]
        if len(holders) < len(known) or any(row.normed for row in attached.rows):
            return cls(holders, "some norms have it in their code")
        if not hasattr(getattr(model, "config", None), "to_dict"):
            return cls(holders)
        values, entries, met = {getattr(*holder) for holder in holders}, [], set[str]()
        given = [(config, *item) for config in configs_of([model]) for item in vars(config).items()]
        for config, key, value in given:
            if "eps" in key and isinstance(value, float) and value in values:
                following = _following(model, config, key)
                if following & known.keys():
                    entries.append((config, key))
                    met |= following
        if not known.keys() <= met:
            return cls(holders, "the configuration has no entry for it")
        others = ((path, _holder(module)) for path, module in model.named_modules() if path in met - known.keys())
        return cls(holders, "", entries, {path: holder for path, holder in others if holder is not None})

    @property
    def exact(self) -> bool:
        """Whether it can be divided, and no other norm's with it."""
        return not self.problem and not self.beside

    def divide(self, by: float) -> None:
        """Divide the modules' and the configuration's epsilon, where it can be."""
        for owner, name in (*self.holders, *self.entries, *self.beside.values()) if not self.problem else ():
            setattr(owner, name, getattr(owner, name) / by)

    def in_words(self, stream: float) -> str:
        """What became of it."""
        if stream == 1:
            return "unchanged"
        if self.beside:
            some = ", ".join(list(self.beside)[:3]) + (" and more" if len(self.beside) > 3 else "")
            return f"divided by {stream**2:g}, and with it that of norms outside the stream, whose input stays: {some}"
        if not self.problem:
            return f"divided by {stream**2:g}: the same function"
        value = f" at {getattr(*self.holders[0]):g}" if self.holders else ""
        return f"stays{value} ({self.problem}), which counts as {stream**2:g} times as much to the divided stream"


def _holder(norm: nn.Module) -> Holder | None:
    return next(((norm, name) for name in _NAMES if isinstance(getattr(norm, name, None), float)), None)


def _following(model: Any, config: Any, key: str) -> set[str]:
    """Paths of the modules that have another epsilon in a model (without numbers) whose entry is another."""
    before = getattr(config, key)
    setattr(config, key, 1.25 * before)
    try:
        with torch.device("meta"):
            other = type(model)(copy.deepcopy(model.config))
    except Exception:  # whatever a constructor may raise: then nothing is known of the entry
        return set()
    finally:
        setattr(config, key, before)
    found = ((path, _holder(module)) for path, module in other.named_modules())
    return {path for path, holder in found if holder is not None and getattr(*holder) == 1.25 * before}

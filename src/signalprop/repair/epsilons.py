"""The epsilon of the norms on a stream, and which entry of a configuration it comes from: a model built anew tells."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from signalprop.attachment.attached import Attached

_NAMES = ("eps", "variance_epsilon")


@dataclass(frozen=True)
class Epsilon:
    """The epsilon of the norms on the stream.

    Attributes:
        holders: (module, attribute) of these. entries: (path, key) of the configuration that they take it from.
        beside: (module, attribute) of other norms that take it from there, too, by their path.
        problem: why it cannot be divided; "".
    """

    holders: tuple[tuple[nn.Module, str], ...]
    entries: tuple[tuple[str, str], ...]
    problem: str
    beside: Dictionary[str, tuple[nn.Module, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, attached: Attached) -> Epsilon:
        """Of a model: an entry counts where norms on the stream follow it in a model built anew."""
        known = attached.norms
        holders = tuple(
            (norm, name) for norm in known for name in _NAMES if isinstance(getattr(norm, name, None), float)
        )
        if len(holders) < len(known) or any(row.normed for row in attached.rows):
            return cls(holders, (), "some norms have it in their code")
        model: Any = attached.model
        config = getattr(model, "config", None)
        if config is None or not hasattr(config, "to_dict"):
            return cls(holders, (), "")
        names = {id(module): name for name, module in model.named_modules()}
        wanted = {names[id(norm)] for norm in known}
        values = {getattr(norm, name) for norm, name in holders}
        entries, met = [], set[str]()
        for path, key in _entries(config, values):
            following = _following(model, path, key)
            if following & wanted:
                entries.append((path, key))
                met |= following
        if not wanted <= met:
            return cls(holders, (), "the configuration has no entry for it")
        modules = {names[id(module)]: module for module in model.modules()}
        beside = {
            path: (modules[path], name) for path in sorted(met - wanted) if path in modules
            for name in _NAMES if isinstance(getattr(modules[path], name, None), float)
        }  # fmt: skip
        return cls(holders, tuple(entries), "", beside)

    @property
    def exact(self) -> bool:
        """Whether it can be divided, and no other norm's with it."""
        return self.movable and not self.beside

    @property
    def movable(self) -> bool:
        """Whether it can be divided, in the modules and in the configuration."""
        return not self.problem

    def divide(self, model: Any, by: float) -> None:
        """Divide the modules' and the configuration's epsilon, where it can be."""
        if not self.movable:
            return
        for module, name in (*self.holders, *self.beside.values()):
            setattr(module, name, getattr(module, name) / by)
        for path, key in self.entries:
            config = _at(model.config, path)
            setattr(config, key, getattr(config, key) / by)

    def in_words(self, stream: float) -> str:
        """What became of it."""
        if stream == 1:
            return "unchanged"
        if self.beside:
            some = ", ".join(list(self.beside)[:3]) + (" and more" if len(self.beside) > 3 else "")
            return f"divided by {stream**2:g}, and with it that of norms outside the stream, whose input stays: {some}"
        if self.movable:
            return f"divided by {stream**2:g}: the same function"
        value = next((f" at {getattr(module, name):g}" for module, name in self.holders), "")
        return f"stays{value} ({self.problem}), which counts as {stream**2:g} times as much to the divided stream"


def _entries(config: Any, values: set[float], path: str = "") -> Iterator[tuple[str, str]]:
    """(path, key) of every number in a configuration, and in those within it, that is one of these."""
    for key, value in vars(config).items():
        if isinstance(value, float) and value in values and "eps" in key:
            yield path, key
        elif hasattr(value, "sub_configs"):
            yield from _entries(value, values, f"{path}.{key}".removeprefix("."))


def _at(config: Any, path: str) -> Any:
    for name in filter(None, path.split(".")):
        config = getattr(config, name)
    return config


def _following(model: Any, path: str, key: str) -> set[str]:
    """Paths of the modules that have another epsilon in a model (without numbers) whose entry is another."""
    config = copy.deepcopy(model.config)
    marked = getattr(_at(config, path), key) * 1.25
    setattr(_at(config, path), key, marked)
    try:
        with torch.device("meta"):
            other = type(model)(config)
    except Exception:  # whatever a constructor may raise: then nothing is known of the entry
        return set()
    return {
        path for path, module in other.named_modules() if any(getattr(module, name, None) == marked for name in _NAMES)
    }

"""Modules that could be layers of a stack."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Container:
    """Modules that could be layers: a list's, or siblings whose names end in numbers.

    Attributes:
        layers: paths of the parts of every layer, where they stand in several lists.
    """

    path: str
    members: tuple[tuple[str, nn.Module], ...]
    parameters: int
    layers: tuple[tuple[str, ...], ...] = ()


def containers(model: nn.Module) -> list[Container]:
    """All of them, the largest first; of equal ones the outermost."""
    found = []
    for path, module in model.named_modules():
        children = list(module.named_children())
        groups: dict[str, list[tuple[str, nn.Module]]] = {}
        one_type = isinstance(module, nn.ModuleDict) and len({type(child) for _, child in children}) == 1
        if one_type or isinstance(module, (nn.ModuleList, nn.Sequential)):
            groups[""] = children
        else:
            for name, child in children:
                if match := re.fullmatch(r"(.*?)_?\d+", name):
                    groups.setdefault(f"{match[1]} {type(child).__name__}", []).append((name, child))
            groups = {name: members for name, members in groups.items() if len(members) > 1}
        for name, members in groups.items():
            prefix = f"{path}." if path else ""
            size = _parameters([m for _, m in members])
            if members and size:
                place = path if not name else f"{prefix}{name.split()[0]}*"
                found.append(Container(place, tuple((prefix + n, m) for n, m in members), size))
    return sorted(found, key=lambda one: (-one.parameters, one.path.count(".")))


def side_by_side(model: nn.Module) -> list[Container]:
    """Lists of one length in one module, of which each layer has a part (XLM: attentions, norms, feed-forwards)."""
    found = []
    for path, module in model.named_modules():
        lists = [(name, child) for name, child in module.named_children() if isinstance(child, nn.ModuleList)]
        prefix = f"{path}." if path else ""
        for n in {len(child) for _, child in lists if len(child) > 1}:
            some = [(f"{prefix}{name}", child) for name, child in lists if len(child) == n]
            members = tuple((f"{place}.{i}", m) for place, child in some for i, m in enumerate(child) if m is not None)
            if len(some) > 1 and (size := _parameters([m for _, m in members])):
                rows = tuple(tuple(f"{place}.{i}" for place, _ in some) for i in range(n))
                found.append(Container(f"{prefix}*", members, size, rows))
    return found


def called_again(model: nn.Module, counts: dict[int, int]) -> list[Container]:
    """Modules that run more than once in a pass: one block in a loop."""
    many = [(path, m) for path, m in model.named_modules() if path and counts.get(id(m), 0) > 1 and _parameters([m])]
    return [Container(path, ((path, m),), _parameters([m])) for path, m in many if any(True for _ in m.children())]


def _parameters(modules: list[nn.Module]) -> int:
    return sum(p.numel() for p in {id(p): p for m in modules for p in m.parameters()}.values())

"""What the names of a checkpoint's tensors say, and how many layers its configuration has."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from signalprop.errors import InputError
from signalprop.families import find
from signalprop.families.reading import read
from signalprop.network.layout import layout, stacks_of

_LAYER = re.compile(r"^(?:(.*?)\.)?(\d{1,9})\.(.+)$")


class Place(NamedTuple):
    """Where a tensor belongs.

    Attributes:
        role: its name within its layer; experts' numbers are `*`. layer: the first number in its name.
        stack: what stands before that, the path of the list that holds the layers.
    """

    role: str
    layer: int | None = None
    stack: str | None = None


def place_of(name: str) -> Place:
    """The place of a tensor by its name."""
    match = _LAYER.match(name)
    if match is None:
        return Place(name.removesuffix(".weight"))
    stack, layer, rest = match.groups()
    return Place(re.sub(r"\b\d+\b", "*", rest.removesuffix(".weight")), int(layer), stack)


def layers_of(source: Path, stacks: Collection[str]) -> dict[str, int]:
    """How many layers the config.json beside the tensors gives to each of these stacks; {} where none is understood."""
    folder = source if source.is_dir() else source.parent
    try:
        architecture = read(folder) if (folder / "config.json").is_file() else None
    except InputError:
        architecture = None
    family = None if architecture is None else find(architecture.family)
    if architecture is None or family is None:
        return {}
    rows = layout(architecture)
    sizes = [len({int(rows.layer[i]) for i in indices}) for _, indices in stacks_of(rows)]
    every = (
        {
            stack: n
            for own, n in zip(paths.stacks, sizes, strict=False)
            for stack in stacks
            if f".{stack}".endswith(f".{own.layers}")
        }
        for paths in family.paths
    )
    return max(every, key=len)

"""What the names of a checkpoint's tensors say: role, layer and stack, by the family's paths or by the name alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from signalprop.errors import InputError
from signalprop.families import find
from signalprop.families.base import ModelPaths, StackPaths
from signalprop.families.reading import read
from signalprop.network.architecture import Architecture
from signalprop.network.kinds import KINDS, kind_named
from signalprop.network.layout import STACKS, Layout, layout, stacks_of

_FUSED = ("query", "key", "value")
# Checkpoints hold experts one by one, and name what transformers 5 renames as it loads them.
_EXPERTS = {
    "gate_proj": "expert_gate", "up_proj": "expert_up", "down_proj": "expert_down",
    "w1": "expert_gate", "w3": "expert_up", "w2": "expert_down",
}  # fmt: skip
_STORED = (
    (r"^block_sparse_moe\b", "mlp"), (r"\binput_linear$", "experts.gate_up_proj"), (r"\brouter\.layer$", "router"),
    (r"\boutput_linear$", "experts.down_proj"), (r"\b\d+\b", "*"),
)  # fmt: skip
_LAYER = re.compile(r"^(?:(.*?)\.)?(\d+)\.(.+)$")


class Place(NamedTuple):
    """Where a tensor belongs.

    Attributes:
        role: of the library where the family is known, else the name within its layer; experts' numbers are `*`.
        roles, row: its roles in a Parametrization (three of a fused map), and the sublayer there; empty for others.
    """

    role: str
    layer: int | None = None
    stack: str | None = None
    roles: tuple[str, ...] = ()
    row: int = -1


class Places(NamedTuple):
    """Of every tensor, and what was found beside the files."""

    of: dict[str, Place]
    family: str | None = None
    architecture: Architecture | None = None
    notes: tuple[str, ...] = ()


def places_of(source: Path, names: Sequence[str]) -> Places:
    """The places of tensors of these names, by the config.json in their directory where that is known."""
    by_name = {name: _by_name(name) for name in names}
    folder = source if source.is_dir() else source.parent
    if not (folder / "config.json").is_file():
        return Places(by_name, notes=("no config.json: rows are by the names of tensors",))
    try:
        architecture = read(folder)
    except InputError as error:
        return Places(by_name, notes=(f"rows are by the names of tensors: {error}",))
    family = find(architecture.family)
    assert family is not None
    every = (_by_paths(paths, architecture, names) for paths in family.paths)
    known = max(every, key=lambda found: sum(bool(place.roles) for place in found.values()))
    return Places(by_name | known, architecture.family, architecture)


def _by_name(name: str) -> Place:
    """The first number in a name is the layer's."""
    match = _LAYER.match(name)
    if match is None:
        return Place(name.removesuffix(".weight"))
    stack, layer, rest = match.groups()
    if len(layer) > 9:
        return Place(name)
    return Place(re.sub(r"\b\d+\b", "*", rest.removesuffix(".weight")), int(layer), stack)


def _by_paths(paths: ModelPaths, a: Architecture, names: Sequence[str]) -> dict[str, Place]:
    """The places of those tensors that are the weights of a sublayer, or the token table."""
    rows = layout(a)
    out = {}
    for stack, (which, indices) in zip(paths.stacks, stacks_of(rows), strict=False):
        pattern = re.compile(rf"^(?:.*\.)?{re.escape(stack.layers)}\.(\d{{1,9}})\.(.+?)(?:\.weight)?$")
        places = _in_layers(stack, rows, indices)
        for name in names:
            match = pattern.match(name)
            if match is not None:
                found = places.get((int(match[1]), _plain(match[2]))) or Place(_plain(match[2]), int(match[1]))
                out[name] = found._replace(stack=STACKS[which])
    token = re.compile(rf"^(?:.*\.)?{re.escape(paths.token)}(?:\.weight)?$")
    return out | {name: Place("embedding") for name in names if token.match(name)}


def _plain(path: str) -> str:
    """A path in a layer as all checkpoints have it; experts' numbers are `*`."""
    for stored, name in _STORED:
        path = re.sub(stored, name, path)
    return path


def _in_layers(stack: StackPaths, rows: Layout, indices: range) -> dict[tuple[int, str], Place]:
    """By layer and path in it, as `_plain` writes it."""
    out, before, k = {}, -1, 0
    for index in indices:
        layer, kind = int(rows.layer[index]), KINDS[rows.kind[index]]
        k = k + 1 if layer == before else 0
        before = layer
        if k >= len(stack.sublayers) and kind not in stack.kinds:
            continue
        sublayer = stack.of(k, kind)
        prefix = "cross_" if kind_named(kind).reads_memory else ""
        paths: dict[str, tuple[str, ...]] = {path: (role,) for role, path in sublayer.weights.items()}
        paths |= sublayer.blocks
        if sublayer.fused:
            paths[sublayer.fused] = _FUSED
        for path, roles in tuple(paths.items()):
            place, _, _ = path.rpartition(".")
            if place.endswith("experts"):
                paths |= {f"{place}.*.{name}": (role,) for name, role in _EXPERTS.items() if role in roles}
        for path, roles in paths.items():
            out[layer, _plain(path)] = Place(prefix + ", ".join(roles), layer, None, roles, index)
    return out

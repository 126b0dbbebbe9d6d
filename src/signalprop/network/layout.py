"""Which sublayers and which weights an architecture has, before any number: the rows and roles of a Parametrization."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from signalprop.network.architecture import Architecture, Placement
from signalprop.network.kinds import KINDS as KINDS
from signalprop.network.kinds import ROLE, KindColumn, kind_named
from signalprop.network.kinds import ROLES as ROLES

Stack = Literal["encoder", "decoder"]
STACKS: tuple[str, ...] = get_args(Stack)
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
IntColumn = KindColumn


class HasStacks(Protocol):
    """Rows of sublayers that know their stack."""

    @property
    def stack(self) -> IntColumn:
        """Of each sublayer."""


class HasLayers(HasStacks, Protocol):
    """Rows of sublayers that know their layer and their stack."""

    @property
    def layer(self) -> NDArray[np.int32]:
        """Of each sublayer, within its stack."""


@dataclass(frozen=True)
class Layout:
    """The sublayers of an architecture, in the order of the stream; encoder first.

    Attributes:
        stack, layer, kind: of each sublayer: index into STACKS, layer within its stack, index into KINDS.
        placement: index into PLACEMENTS. parallel: the sublayer reads the same stream as the one before it.
    """

    stack: IntColumn
    layer: NDArray[np.int32]
    kind: IntColumn
    placement: IntColumn
    parallel: NDArray[np.bool_]


def layout(architecture: Architecture) -> Layout:
    """The sublayers of an architecture, layer by layer: the branches that it says each layer has."""
    a = architecture
    branches = a.layer_branches
    if len(set(branches[: a.n_layers])) == 1 and a.kind != "encoder-decoder":  # deep stacks of one layer
        sizes = np.full(a.n_layers, len(branches[0]))
        kinds = np.tile(_codes(branches[0]), a.n_layers)
    else:
        sizes = np.array([len(names) for names in branches])
        kinds = np.concatenate([_codes(names) for names in branches])
    second = np.arange(len(branches)) >= a.n_layers  # the decoder after an encoder
    stack = np.where(second | (a.kind == "decoder"), STACKS.index("decoder"), STACKS.index("encoder"))
    layer = np.concatenate([np.arange(a.n_layers), np.arange(a.n_decoder_layers or 0)])
    placement = np.array([PLACEMENTS.index(p) for p in a.placements], np.int8)
    first = np.zeros(len(kinds), bool)
    first[np.cumsum(sizes) - sizes] = True
    return Layout(
        stack=np.repeat(stack, sizes).astype(np.int8),
        layer=np.repeat(layer, sizes).astype(np.int32),
        kind=kinds,
        placement=np.repeat(placement, sizes),
        parallel=~first & (np.isin(kinds, _codes(a.parallel)) if isinstance(a.parallel, tuple) else a.parallel),
    )


def _codes(names: tuple[str, ...]) -> IntColumn:
    return np.array([KINDS.index(name) for name in names], np.int8)


def layer_starts(rows: HasLayers) -> NDArray[np.intp]:
    """Index of every layer's first sublayer; of a Layout, or of a Parametrization, which has the same columns."""
    return np.flatnonzero(np.diff(rows.layer, prepend=-1) | np.diff(rows.stack, prepend=-1))


def layer_ends(rows: HasLayers) -> NDArray[np.intp]:
    """Index of every layer's last sublayer."""
    return np.append(layer_starts(rows)[1:], len(rows.layer)) - 1


def stacks_of(rows: HasStacks) -> Iterator[tuple[int, range]]:
    """Every stack, in the order of the signal: index into STACKS, and its rows."""
    borders = [0, *(np.flatnonzero(np.diff(rows.stack)) + 1).tolist(), len(rows.stack)]
    for first, last in pairwise(borders):
        yield int(rows.stack[first]), range(first, last)


def fan(architecture: Architecture, role: str) -> tuple[int, int]:
    """(fan_in, fan_out) of a role's weight."""
    return ROLE[role].fan(architecture)


def role_mask(architecture: Architecture, role: str) -> NDArray[np.bool_]:
    """Which sublayers have a weight of this role."""
    return roles_of(architecture, layout(architecture).kind)[role]


def roles_of(architecture: Architecture, kind: IntColumn) -> dict[str, NDArray[np.bool_]]:
    """Per role, which of the sublayers of the given kinds have a weight of it."""
    there = set(kind.tolist())
    names = [kind_named(name).role_names(architecture) if code in there else () for code, name in enumerate(KINDS)]
    return {role: np.array([role in of_kind for of_kind in names])[kind] for role in ROLES}

"""Which sublayers and which weights an architecture has, before any number: the rows and roles of a Parametrization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from signalprop.network.architecture import Architecture, Placement

Kind = Literal["attention", "cross_attention", "feed_forward"]
Stack = Literal["encoder", "decoder"]
Role = Literal["query", "key", "value", "output", "gate", "up", "down"]
KINDS: tuple[str, ...] = get_args(Kind)
STACKS: tuple[str, ...] = get_args(Stack)
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
ROLES: tuple[str, ...] = get_args(Role)
ATTENTION_ROLES = ROLES[:4]
FEED_FORWARD_ROLES = ROLES[4:]
IntColumn = NDArray[np.int8]


class HasLayers(Protocol):
    """Rows of sublayers that know their layer and their stack."""

    @property
    def stack(self) -> IntColumn:
        """Of each sublayer."""

    @property
    def layer(self) -> NDArray[np.int32]:
        """Of each sublayer, within its stack."""


@dataclass(frozen=True)
class Layout:
    """The sublayers of an architecture, in the order in which the stream meets them; encoder first.

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
    """The sublayers of an architecture: attention and feed-forward per layer, cross-attention between in a decoder
    that reads an encoder."""
    n = architecture.n_layers
    n_decoder = architecture.n_decoder_layers or 0
    decoder_only = architecture.kind == "decoder"
    kinds = np.concatenate([np.tile(np.array([0, 2], np.int8), n), np.tile(np.array([0, 1, 2], np.int8), n_decoder)])
    stack = np.concatenate([np.full(2 * n, int(decoder_only), np.int8), np.ones(3 * n_decoder, np.int8)])
    layer = np.concatenate([np.repeat(np.arange(n), 2), np.repeat(np.arange(n_decoder), 3)]).astype(np.int32)
    codes = np.array([PLACEMENTS.index(p) for p in architecture.placements], np.int8)
    placement = np.concatenate([np.repeat(codes[:n], 2), np.repeat(codes[n:], 3)])
    parallel = (kinds == 2) & architecture.parallel
    return Layout(stack, layer, kinds, placement, parallel)


def layer_starts(rows: HasLayers) -> NDArray[np.intp]:
    """Index of every layer's first sublayer; of a Layout, or of a Parametrization, which has the same columns."""
    return np.flatnonzero(np.diff(rows.layer, prepend=-1) | np.diff(rows.stack, prepend=-1))


def fan(architecture: Architecture, role: str) -> tuple[int, int]:
    """(fan_in, fan_out) of a role's weight."""
    d, q = architecture.d_model, architecture.n_heads * architecture.d_head
    kv = architecture.n_kv_heads * architecture.d_head
    sizes = {
        "query": (d, q),
        "key": (d, kv),
        "value": (d, kv),
        "output": (q, d),
        "gate": (d, architecture.d_ff),
        "up": (d, architecture.d_ff),
        "down": (architecture.d_ff, d),
    }
    return sizes[role]


def role_mask(architecture: Architecture, role: str) -> NDArray[np.bool_]:
    """Which sublayers have a weight of this role."""
    return roles_of(architecture, layout(architecture).kind)[role]


def roles_of(architecture: Architecture, kind: IntColumn) -> dict[str, NDArray[np.bool_]]:
    """Per role, which of the sublayers of the given kinds have a weight of it."""
    feed_forward = kind == KINDS.index("feed_forward")
    masks: dict[str, NDArray[np.bool_]] = dict.fromkeys(ATTENTION_ROLES, ~feed_forward)
    masks |= dict.fromkeys(FEED_FORWARD_ROLES, feed_forward)
    if not architecture.gated:
        masks["gate"] = np.zeros(len(kind), bool)
    return masks

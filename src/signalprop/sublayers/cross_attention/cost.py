"""What a cross-attention sublayer costs beside its maps, of which keys and values read the encoder's tokens."""

from __future__ import annotations

from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.attention.cost import beside as beside
from signalprop.sublayers.attention.cost import map_flops, mixing_flops, score_flops


def flops(a: Architecture, p: Parametrization | None, i: int, queries: int) -> float:
    """A query of cross-attention has no value."""
    mixed = p is not None and p.value_skip[i] != 0
    memory = (a.seq_len - queries) * map_flops(a, "key", "value")
    return memory + score_flops(a, queries, a.seq_len) + mixing_flops(a, queries, mixed=mixed)

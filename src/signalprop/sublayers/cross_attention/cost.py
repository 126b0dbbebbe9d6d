"""What a cross-attention sublayer costs: keys and values are the encoder's tokens."""

from __future__ import annotations

from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.attention.cost import attention_flops, mixing_flops
from signalprop.sublayers.attention.cost import parameters as parameters


def flops(a: Architecture, p: Parametrization | None, i: int, queries: int, n_norms: int) -> float:
    """As `attention.cost.flops`; a query across has no value of its own."""
    mixed = p is not None and p.value_skip[i] != 0
    return attention_flops(a, queries, a.seq_len, n_norms) + mixing_flops(a, queries, mixed=mixed)

"""What global attention costs: as attention with its own heads, without the map of values where keys are values."""

from __future__ import annotations

from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.attention import cost
from signalprop.sublayers.global_attention.roles import alone, as_usual, settings_of


def _of_values(a: Architecture) -> int:
    own = alone(a)
    return a.d_model * own.n_kv_heads * own.d_head * settings_of(a).shared


def parameters(a: Architecture) -> int:
    """Trainable numbers of one sublayer, norms on the stream apart."""
    return cost.parameters(alone(a)) - _of_values(a)


def flops(a: Architecture, p: Parametrization | None, i: int, queries: int, n_norms: int) -> float:
    """Operations of one forward pass through sublayer i for one sequence of so many tokens."""
    table = None if p is None else as_usual(p)
    return cost.flops(alone(a), table, i, queries, n_norms) - 2.0 * queries * _of_values(a)

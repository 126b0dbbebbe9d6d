"""What global attention costs beside its maps: as attention with these heads."""

from __future__ import annotations

from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.attention import cost
from signalprop.sublayers.global_attention.roles import alone, as_usual


def beside(a: Architecture) -> int:
    """As of attention."""
    return cost.beside(alone(a))


def flops(a: Architecture, p: Parametrization | None, i: int, queries: int) -> float:
    return cost.flops(alone(a), None if p is None else as_usual(p), i, queries)

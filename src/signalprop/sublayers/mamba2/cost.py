"""What Mamba-2 costs beside its maps."""

from __future__ import annotations

from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.mamba2.roles import Settings


def beside(a: Architecture) -> int:
    """Decay rates, steps and skips of the heads, gains of the norm."""
    s = Settings.of(a)
    return 3 * s.n_heads + s.normed * s.inner


def flops(a: Architecture, p: Parametrization | None, i: int, queries: int) -> float:
    """As `signalprop.results.cost.Cost.flops`.

    The scan as a recurrence: 5 per number of a head's state and token. Elements of gate and norm: 4 and 4 per feature.
    """
    s = Settings.of(a)
    return float(queries * (5 * s.inner * s.d_state + (4 + 4 * s.normed) * s.inner))

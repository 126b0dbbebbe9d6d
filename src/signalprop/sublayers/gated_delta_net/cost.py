"""What a gated DeltaNet costs beside its maps."""

from __future__ import annotations

from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.gated_delta_net.roles import Settings


def beside(a: Architecture) -> int:
    """Decay rates and steps of the heads, gains of the norm."""
    s = Settings.of(a)
    return 2 * s.n_heads + s.d_value


def flops(a: Architecture, p: Parametrization | None, i: int, queries: int) -> float:
    """As `signalprop.results.cost.Cost.flops`.

    The rule as a recurrence: 7 per number of a head's state and token (decay, read, write, query). Elements of gate and
    norm: 8 per feature; norms of queries and keys: 3 per number.
    """
    s = Settings.of(a)
    return float(queries * (7 * s.inner * s.d_key + 8 * s.inner + 6 * s.shared))

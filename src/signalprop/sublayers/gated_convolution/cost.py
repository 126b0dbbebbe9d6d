"""Operations of a short causal convolution between two gates, beside its maps."""

from __future__ import annotations

from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import Parametrization


def flops(a: Architecture, p: Parametrization | None, i: int, queries: int) -> float:
    """Two gates."""
    return float(queries * 2 * a.d_model)

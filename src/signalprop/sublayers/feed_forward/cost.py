"""Operations of a feed-forward sublayer beside its maps."""

from __future__ import annotations

from signalprop.network.architecture import Architecture
from signalprop.network.operations import ACTIVATION
from signalprop.network.parametrization import Parametrization


def flops(a: Architecture, p: Parametrization | None, i: int, queries: int) -> float:
    return float(queries * (ACTIVATION + a.gated) * a.d_ff)

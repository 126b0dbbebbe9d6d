"""Operations of a mixture of experts beside the maps that a token passes."""

from __future__ import annotations

from signalprop.network.architecture import Architecture
from signalprop.network.operations import ACTIVATION, SOFTMAX
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.experts.roles import Settings, width


def flops(a: Architecture, p: Parametrization | None, i: int, queries: int) -> float:
    """Scores, the weighted sum, activations and gates."""
    s, d = Settings.of(a), a.d_model
    count = SOFTMAX * s.n_experts + s.top_k * 2 * d
    count += (ACTIVATION + a.gated) * (s.top_k * width(a) + s.shared_width)
    return float(queries * (count + d * s.shared_gated + d * (s.shared_width > 0)))

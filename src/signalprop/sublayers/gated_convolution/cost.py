"""What a short causal convolution between two gates costs."""

from __future__ import annotations

from signalprop.network.architecture import Architecture
from signalprop.network.operations import ADD, DROPOUT, NORM
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.gated_convolution.roles import settings


def parameters(a: Architecture) -> int:
    """Trainable numbers of one sublayer, norms on the stream apart."""
    s, d = settings(a), a.d_model
    return 4 * d * d + s.width * d + 5 * d * s.bias


def flops(a: Architecture, p: Parametrization | None, i: int, queries: int, n_norms: int) -> float:
    """Operations of one forward pass through sublayer i for one sequence of so many tokens."""
    s, d = settings(a), a.d_model
    per_token = 8 * d * d + 5 * d * s.bias + 2 * s.width * d + 2 * d
    return float(queries * (per_token + (ADD + NORM * n_norms + DROPOUT * (a.dropout > 0)) * d))

"""What Mamba-2 costs."""

from __future__ import annotations

from signalprop.network.architecture import Architecture
from signalprop.network.operations import ADD, DROPOUT, NORM
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.mamba2.roles import settings


def parameters(a: Architecture) -> int:
    """Trainable numbers of one sublayer, norms on the stream apart."""
    s, d = settings(a), a.d_model
    maps, channels = 2 * s.inner + 2 * s.shared + s.n_heads, s.inner + 2 * s.shared
    vectors = 3 * s.n_heads + s.normed * s.inner + s.conv_bias * channels + s.bias * (maps + d)
    return d * maps + s.width * channels + d * s.inner + vectors


def flops(a: Architecture, p: Parametrization | None, i: int, queries: int, n_norms: int) -> float:
    """Operations of one forward pass through sublayer i for one sequence of so many tokens.

    The scan as a recurrence: 5 per number of a head's state and token. Elements of gate and norm: 4 and 4 per feature.
    """
    s, d = settings(a), a.d_model
    maps, channels = 2 * s.inner + 2 * s.shared + s.n_heads, s.inner + 2 * s.shared
    per_token = 2 * d * (maps + s.inner) + s.bias * (maps + d) + (2 * s.width + s.conv_bias) * channels
    per_token += 5 * s.inner * s.d_state + (4 + 4 * s.normed) * s.inner
    return float(queries * (per_token + (ADD + NORM * n_norms + DROPOUT * (a.dropout > 0)) * d))

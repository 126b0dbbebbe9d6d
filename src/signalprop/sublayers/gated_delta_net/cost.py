"""What a gated DeltaNet costs."""

from __future__ import annotations

from signalprop.network.architecture import Architecture
from signalprop.network.operations import ADD, DROPOUT, NORM
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.gated_delta_net.roles import settings


def parameters(a: Architecture) -> int:
    """Trainable numbers of one sublayer, norms on the stream apart."""
    s, d = settings(a), a.d_model
    maps, channels = 2 * s.inner + 2 * s.shared + 2 * s.n_heads, s.inner + 2 * s.shared
    return d * maps + s.width * channels + d * s.inner + 2 * s.n_heads + s.d_value


def flops(a: Architecture, p: Parametrization | None, i: int, queries: int, n_norms: int) -> float:
    """Operations of one forward pass through sublayer i for one sequence of so many tokens.

    The rule as a recurrence: 7 per number of a head's state and token (decay, read, write, query). Elements of gate and
    norm: 8 per feature; norms of queries and keys: 3 per number.
    """
    s, d = settings(a), a.d_model
    maps, channels = 2 * s.inner + 2 * s.shared + 2 * s.n_heads, s.inner + 2 * s.shared
    per_token = 2 * d * (maps + s.inner) + 2 * s.width * channels
    per_token += 7 * s.inner * s.d_key + 8 * s.inner + 6 * s.shared
    return float(queries * (per_token + (ADD + NORM * n_norms + DROPOUT * (a.dropout > 0)) * d))

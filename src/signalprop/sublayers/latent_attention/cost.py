"""What latent attention costs."""

from __future__ import annotations

from signalprop.network.architecture import Architecture
from signalprop.network.operations import ADD, DROPOUT, NORM, SOFTMAX
from signalprop.network.parametrization import Parametrization, fan
from signalprop.sublayers.latent_attention.roles import ROLES, settings_of


def _weights(a: Architecture) -> int:
    return sum(fan(a, role.name)[0] * fan(a, role.name)[1] for role in ROLES if role.exists(a))


def parameters(a: Architecture) -> int:
    """Trainable numbers of one sublayer, norms on the stream apart."""
    s = settings_of(a)
    return _weights(a) + s.rank + s.query_rank


def flops(a: Architecture, p: Parametrization | None, i: int, queries: int, n_norms: int) -> float:
    """Operations of one forward pass through sublayer i for one sequence of so many tokens."""
    s, d = settings_of(a), a.d_model
    per_token = 2 * _weights(a) + NORM * (s.rank + s.query_rank + n_norms) + (ADD + DROPOUT * (a.dropout > 0)) * d
    per_token += 3 * s.d_rotary * (a.n_heads + 1) * (a.positions == "rotary")
    dropped = DROPOUT * ((a.attention_dropout or 0) > 0)
    per_score = a.n_heads * (2 * a.d_head + 2 * s.d_value + 1 + SOFTMAX + dropped)
    return float(queries * per_token + queries * queries * per_score)

"""What attention with shared keys and values costs. An indexer, which has no place in the stream, is not counted."""

from __future__ import annotations

from signalprop.network.architecture import Architecture
from signalprop.network.kinds import kind_named
from signalprop.network.operations import ADD, DROPOUT, NORM, SOFTMAX
from signalprop.network.parametrization import Parametrization, fan
from signalprop.sublayers.shared_kv_attention.roles import NAME, SPARSE, compressed, settings_of


def _weights(a: Architecture, name: str) -> int:
    return sum(fan(a, role)[0] * fan(a, role)[1] for role in kind_named(name).role_names(a))


def parameters(a: Architecture, name: str = NAME) -> int:
    """Trainable numbers of one sublayer, norms on the stream apart."""
    s, more = settings_of(a, name), compressed(a, name)
    count = _weights(a, name) + s.query_rank + a.d_head + a.n_heads * (s.sink is not None)
    if more is not None:
        count += a.d_head * (1 + more.rate * (1 + (name == SPARSE)))
    return count


def flops(a: Architecture, p: Parametrization | None, i: int, queries: int, n_norms: int, name: str = NAME) -> float:
    """Operations of one forward pass through sublayer i for one sequence of so many tokens.

    Scores outside of the window are counted as the others.
    """
    s, more = settings_of(a, name), compressed(a, name)
    inner = a.n_heads * a.d_head
    per_token: float = 2 * _weights(a, name) + (ADD + DROPOUT * (a.dropout > 0)) * a.d_model
    per_token += NORM * (s.query_rank + inner + a.d_head + n_norms)
    per_token += 3 * s.d_rotary * (2 * a.n_heads + 1) * (a.positions == "rotary")
    keys = queries
    if more is not None:
        keys += queries // more.rate
        per_token += (1 + (name == SPARSE)) * a.d_head * (SOFTMAX + 2) + NORM * a.d_head / more.rate
    per_score = a.n_heads * (4 * a.d_head + 1 + SOFTMAX + DROPOUT * ((a.attention_dropout or 0) > 0))
    return float(queries * per_token + queries * keys * per_score)

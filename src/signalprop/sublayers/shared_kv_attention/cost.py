"""What attention with shared keys and values costs beside its maps; an indexer is not counted."""

from __future__ import annotations

from signalprop.network.architecture import Architecture
from signalprop.network.operations import DROPOUT, NORM, SOFTMAX
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.shared_kv_attention.roles import NAME, SPARSE, compressed, settings_of


def beside(a: Architecture, name: str = NAME) -> int:
    """Gains of the norms on queries, keys and averages, sinks, places of tokens in a run."""
    s, more = settings_of(a, name), compressed(a, name)
    count = s.query_rank + a.d_head + a.n_heads * (s.sink is not None)
    return count if more is None else count + a.d_head * (1 + more.rate * (1 + (name == SPARSE)))


def flops(a: Architecture, p: Parametrization | None, i: int, queries: int, name: str = NAME) -> float:
    """Scores outside of the window are counted as the others."""
    s, more = settings_of(a, name), compressed(a, name)
    per_token: float = NORM * (s.query_rank + a.n_heads * a.d_head + a.d_head)
    per_token += 3 * s.d_rotary * (2 * a.n_heads + 1) * (a.positions == "rotary")
    keys = queries
    if more is not None:
        keys += queries // more.rate
        per_token += (1 + (name == SPARSE)) * a.d_head * (SOFTMAX + 2) + NORM * a.d_head / more.rate
    per_score = a.n_heads * (4 * a.d_head + 1 + SOFTMAX + DROPOUT * ((a.attention_dropout or 0) > 0))
    return float(queries * per_token + queries * keys * per_score)

"""What an attention sublayer costs beside its maps."""

from __future__ import annotations

from signalprop.families import find
from signalprop.network.architecture import Architecture
from signalprop.network.kinds import ROLE
from signalprop.network.operations import ACTIVATION, DROPOUT, NORM, SOFTMAX
from signalprop.network.parametrization import Parametrization, fan
from signalprop.sublayers.attention.roles import Settings, has_gate


def beside(a: Architecture) -> int:
    """Sinks and gains of norms on queries and keys, less the biases of keys that the family does not have."""
    q, kv = a.n_heads * a.d_head, a.n_kv_heads * a.d_head
    count = a.n_heads * (Settings.of(a).sink is not None)
    if a.qk_norm:
        count += q + kv if a.qk_norm == "whole" else 2 * a.d_head
    family = find(a.family)
    return count - (kv * bool(a.qkv_bias) if family is not None and not family.key_bias else 0)


def flops(a: Architecture, p: Parametrization | None, i: int, queries: int) -> float:
    around = 0.0 if Settings.of(a) == Settings() else queries * _flops_around(a, queries)
    return score_flops(a, queries, queries) + around + (0.0 if p is None else _mixed_flops(a, p, i, queries))


def _flops_around(a: Architecture, keys: int) -> float:
    """Of caps, norms on values and gates, per token.

    Scores outside of a window are counted as the others.
    """
    given, gates = Settings.of(a), fan(a, "attention_gate")[1]
    count = (2 + ACTIVATION) * a.n_heads * keys * (given.score_cap is not None)
    count += NORM * a.n_kv_heads * a.d_head * given.value_norm
    if has_gate(a):
        count += ACTIVATION * gates + a.n_heads * a.d_head
    return float(count)


def _mixed_flops(a: Architecture, p: Parametrization, i: int, tokens: int) -> float:
    """What value_skip V + attention_gain A V costs beyond A V; less than nothing where A is not needed."""
    if p.attention_gain[i] == 0 and not p.attention_trainable:
        return -score_flops(a, tokens, tokens) - tokens * map_flops(a, "query", "key")
    return mixing_flops(a, tokens, mixed=p.value_skip[i] != 0 or p.attention_trainable)


def mixing_flops(a: Architecture, queries: int, *, mixed: bool) -> float:
    """Two products and a sum per feature of the heads, where values are added."""
    return float(3 * queries * a.n_heads * a.d_head * mixed)


def map_flops(a: Architecture, *roles: str) -> float:
    """Operations of some of its maps, per token."""
    return float(sum(2 * ROLE[name].entries(a) + fan(a, name)[1] * ROLE[name].biased(a) for name in roles))


def score_flops(a: Architecture, queries: int, keys: int) -> float:
    """Scores and averages, rotations and norms of so many queries and keys."""
    q, kv, heads = a.n_heads * a.d_head, a.n_kv_heads * a.d_head, a.n_heads
    per_query, per_key = 0.0, 0.0
    per_score = 2 * q + 2 * q + heads * (1 + SOFTMAX + DROPOUT * ((a.attention_dropout or 0) > 0))
    per_score += heads * (a.positions == "relative")
    if a.positions == "rotary":
        per_query += 3 * q * a.rotary_fraction
        per_key += 3 * kv * a.rotary_fraction
    if a.qk_norm:
        per_query += NORM * q
        per_key += NORM * kv
    return float(queries * per_query + keys * per_key + queries * keys * per_score)

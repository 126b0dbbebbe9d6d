"""What an attention sublayer costs: parameters, and operations by ELECTRA's accounting (`signalprop.results.cost`)."""

from __future__ import annotations

from signalprop.families import find
from signalprop.network.architecture import Architecture
from signalprop.network.operations import ACTIVATION, ADD, DROPOUT, NORM, SOFTMAX
from signalprop.network.parametrization import Parametrization, fan
from signalprop.sublayers.attention.roles import KIND, Settings, adds_first_values, first_values, has_gate, settings_of


def parameters(a: Architecture) -> int:
    """Trainable numbers of one sublayer, norms on the stream apart."""
    d, q, kv = a.d_model, a.n_heads * a.d_head, a.n_kv_heads * a.d_head
    count = d * (q + 2 * kv) + (q + 2 * kv) * bool(a.qkv_bias) + q * d + d * a.bias
    given = settings_of(a)
    if has_gate(a):
        gates = fan(a, "attention_gate")[1]
        count += d * gates + gates * bool(a.qkv_bias)
    count += a.n_heads * (given.sink is not None)
    if a.qk_norm:
        count += q + kv if a.qk_norm == "whole" else 2 * a.d_head
    family = find(a.family)
    if family is not None and not family.key_bias:
        count -= kv * bool(a.qkv_bias)
    return count


def flops(a: Architecture, p: Parametrization | None, i: int, queries: int, n_norms: int) -> float:
    """Operations of one forward pass through sublayer i for one sequence.

    Args:
        p: the table, where multipliers count; None: an architecture alone. queries: tokens of its stream.
        n_norms: norms on the stream that it has.
    """
    around = 0.0 if settings_of(a) == Settings() else queries * _flops_around(a, queries)
    return (
        attention_flops(a, queries, queries, n_norms) + around + (0.0 if p is None else _mixed_flops(a, p, i, queries))
    )


def multipliers(p: Parametrization) -> int:
    """Trainable numbers by which the sublayers of a table weigh values, beyond value_skip and attention_gain."""
    added = first_values(p)
    return 0 if added is None or not p.attention_trainable else 2 * int(KIND.of(p).sum() - 1)


def _flops_around(a: Architecture, keys: int) -> float:
    """Of caps, norms on values, values of the first attention and gates, per token.

    Scores outside of a window are counted as the others.
    """
    given, gates = settings_of(a), fan(a, "attention_gate")[1]
    count = (2 + ACTIVATION) * a.n_heads * keys * (given.score_cap is not None)
    count += NORM * a.n_kv_heads * a.d_head * given.value_norm
    count += 3 * a.n_kv_heads * a.d_head * adds_first_values(a)
    if has_gate(a):
        count += (2 * a.d_model + bool(a.qkv_bias) + ACTIVATION) * gates + a.n_heads * a.d_head
    return float(count)


def _mixed_flops(a: Architecture, p: Parametrization, i: int, tokens: int) -> float:
    """What value_skip V + attention_gain A V costs beyond A V; less than nothing where A is not needed."""
    if p.attention_gain[i] == 0 and not p.attention_trainable:
        value, bias = 2 * a.d_model * a.n_kv_heads * a.d_head, a.n_kv_heads * a.d_head * bool(a.qkv_bias)
        return -_attending_flops(a, tokens, tokens) + tokens * float(value + bias)
    return mixing_flops(a, tokens, mixed=p.value_skip[i] != 0 or p.attention_trainable)


def mixing_flops(a: Architecture, queries: int, *, mixed: bool) -> float:
    """Two products and a sum per feature of the heads, where values are added."""
    return float(3 * queries * a.n_heads * a.d_head * mixed)


def attention_flops(a: Architecture, queries: int, keys: int, n_norms: int) -> float:
    """Operations of attention of so many queries to so many keys."""
    d, q = a.d_model, a.n_heads * a.d_head
    per_query: float = 2 * q * d + d * a.bias + ADD * d + NORM * n_norms  # output, residual addition, norm
    per_query += DROPOUT * d * (a.dropout > 0)
    return queries * per_query + _attending_flops(a, queries, keys)


def _attending_flops(a: Architecture, queries: int, keys: int) -> float:
    """Queries, keys, values, scores and averages."""
    d, q, kv, heads = a.d_model, a.n_heads * a.d_head, a.n_kv_heads * a.d_head, a.n_heads
    per_query: float = 2 * d * q + q * bool(a.qkv_bias)
    per_key: float = 2 * (2 * d * kv + kv * bool(a.qkv_bias))
    per_score = 2 * q + 2 * q + heads * (1 + SOFTMAX + DROPOUT * ((a.attention_dropout or 0) > 0))
    per_score += heads * (a.positions == "relative")
    if a.positions == "rotary":
        per_query += 3 * q * a.rotary_fraction
        per_key += 3 * kv * a.rotary_fraction
    if a.qk_norm:
        per_query += NORM * q
        per_key += NORM * kv
    return float(queries * per_query + keys * per_key + queries * keys * per_score)

"""The numbers of attention heads: products of widths and weight variances, score variances, sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from signalprop.network.architecture import Architecture
from signalprop.network.moments import Array, FloatArray, ratio
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.attention.roles import score_variances
from signalprop.theory.attention_rows import Mask
from signalprop.theory.log_arithmetic import correlation, rows_of
from signalprop.theory.signals import Rows, Sublayers

LARGEST_SCORE = 1e60  # a score variance whose square is a double; softmax has been hard long before


class Row(NamedTuple):
    """Products of widths and weight variances: of one sublayer, or of several."""

    qk: Array  # d_model^2 sigma_q^2 sigma_k^2 d_head score_scale^2: s0 on an input of second moment 1
    query_bias: Array  # variance of a query bias, in units of d_model sigma_q^2; a key bias drops out of softmax
    value: Array  # d_model sigma_v^2
    value_bias: Array
    output: Array  # d_inner sigma_o^2
    output_bias: Array
    back: Array  # d_model sigma_o^2 d_inner sigma_v^2
    value_skip: Array  # the heads give value_skip V + attention_gain A V
    attention_gain: Array
    query: Array  # d_model sigma_q^2
    key: Array  # d_model sigma_k^2


def table_of(p: Parametrization) -> FloatArray:
    """The fields of Row for every sublayer, (11, ..., sublayers)."""
    a = p.architecture
    d, inner = a.d_model, a.n_heads * a.d_head
    qk = score_variances(p)
    w = {role: p.weights[role] ** 2 for role in ("query", "key", "value", "output")}
    b = {role: p.biases[role] ** 2 for role in ("query", "value", "output")}
    columns = [
        qk,
        np.divide(b["query"], d * w["query"], out=np.zeros_like(qk), where=w["query"] > 0),
        d * w["value"],
        b["value"],
        inner * w["output"],
        b["output"],
        d * w["output"] * (inner * w["value"]),
        p.value_skip,
        p.attention_gain,
        d * w["query"],
        d * w["key"],
    ]
    return np.stack(columns)


@dataclass(frozen=True)
class Heads(Sublayers):
    """The attention sublayers of one stack: what self- and cross-attention share.

    Attributes:
        table: the fields of Row, (11, ..., sublayers). mixes: whether any of them does more than average.
        n_queries, n_keys: tokens. nodes: as of `Sublayers`.
        attentions: of sublayers that went forward, for the way back.
    """

    table: FloatArray
    mixes: bool
    n_queries: int
    n_keys: int
    d_model: int
    d_head: int
    attention_dropout: float
    qk_norm: bool
    norm_eps: float
    causal: Mask = False
    nodes: Any = None
    attentions: dict[int, Any] = field(default_factory=dict)

    @cached_property
    def _rows(self) -> list[Row]:
        return rows_of(self.table, Row)

    def at(self, i: Rows) -> Row:
        """The products of sublayer i, or of several."""
        return Row(*self.table[..., i]) if isinstance(i, np.ndarray) else self._rows[i]

    def scores(self, row: Row, second_query: Array, second_key: Array) -> tuple[Array, Array]:
        """(s0, share of a query bias in it): variance of one raw score, and how much is the same for every query."""
        total = second_query + row.query_bias
        if self.qk_norm:  # size 1, but for what the norms add to what they divide by
            query, key = row.query * total, row.key * second_key
            normed = ratio(query, query + self.norm_eps) * ratio(key, key + self.norm_eps)
            return _held_score(row.qk * normed), 0.0
        return _held_score(row.qk * total * second_key), correlation(row.query_bias, total)


def settings(a: Architecture, stack: int) -> dict[str, Any]:
    """The fields of Heads that an architecture says, for one stack (index into STACKS)."""
    after_encoder = a.kind == "encoder-decoder" and stack == 1
    n_queries = (a.target_len or a.seq_len) if after_encoder else a.seq_len
    return {
        "n_queries": n_queries,
        "n_keys": n_queries,
        "d_model": a.d_model,
        "d_head": a.d_head,
        "attention_dropout": a.attention_dropout or 0.0,
        "qk_norm": bool(a.qk_norm),
        "norm_eps": a.norm_eps,
        "causal": stack == 1,
    }


def mixes(p: Parametrization) -> bool:
    """Whether any attention does more than average values."""
    return bool((p.value_skip != 0).any() or (p.attention_gain != 1).any())


def _held_score(s0: Array) -> Array:
    return min(s0, LARGEST_SCORE) if isinstance(s0, float) else np.minimum(s0, LARGEST_SCORE)

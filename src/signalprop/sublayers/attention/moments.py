"""Moments through self-attention: one head's formulas are `theory.attention`; here they meet weights, biases, dropout.

Of every placement of mask and rotation, forward, and back along all three paths (`docs/theory/network.md`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from signalprop.errors import InputError
from signalprop.network.architecture import Architecture
from signalprop.network.moments import Array, FloatArray, ratio
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.attention.roles import Settings, Sight, Sights, has_gate, settings_of, sights
from signalprop.theory import attention, attention_scores
from signalprop.theory.attention_rows import Band, Mask, over_rows
from signalprop.theory.attention_variants import capped, kept
from signalprop.theory.elements import (
    Branch,
    BranchBackward,
    Pair,
    Rowset,
    Sent,
    activated,
    activated_back,
    dropped,
    linear,
)
from signalprop.theory.logs import correlation, plain

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


class GateRow(NamedTuple):
    """Products of widths and variances of an output gate."""

    weight: Array  # d_model sigma_g^2
    bias: Array
    back: Array  # d_model sigma_o^2 d_inner sigma_g^2; a gate of a head sums over its features


def score_variances(p: Parametrization) -> FloatArray:
    """Variance of the scores of every sublayer on an input of second moment 1, (..., sublayers)."""
    a, scale = p.architecture, p.score_scale**2
    if a.qk_norm:  # unit vectors times gains, which are part of score_scale
        return a.d_head * scale
    return a.d_model**2 * p.weights["query"] ** 2 * p.weights["key"] ** 2 * a.d_head * scale


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
class Heads:
    """The attention sublayers of one stack: what self- and cross-attention share.

    Attributes:
        table: the fields of Row, (11, ..., sublayers). mixes: whether any of them does more than average.
        n_queries, n_keys: tokens. rotary, rotary_rows: what rotations leave of the coherence of queries and keys.
    """

    table: FloatArray
    mixes: bool
    n_queries: int
    n_keys: int
    d_model: int
    d_head: int
    dropout: float
    attention_dropout: float
    qk_norm: bool
    norm_eps: float
    causal: Mask = False
    rotary: float = 1.0
    rotary_rows: float = 1.0

    def at(self, i: Any) -> Row:
        """The products of sublayer i, or of several."""
        values = self.table[..., i]
        return Row(*(values.tolist() if values.ndim == 1 else values))

    def scores(self, row: Row, second_query: Array, second_key: Array) -> tuple[Array, Array]:
        """(s0, share of a query bias in it): variance of one raw score, and how much is the same for every query."""
        total = second_query + row.query_bias
        if self.qk_norm:  # size 1, but for what the norms add to what they divide by
            query, key = row.query * total, row.key * second_key
            kept = ratio(query, query + self.norm_eps) * ratio(key, key + self.norm_eps)
            return _held_score(row.qk * kept), 0.0
        return _held_score(row.qk * total * second_key), correlation(row.query_bias, total)

    def through_output(self, row: Row, second: Array, averaged: Pair) -> Branch:
        """Of values averaged by attention (in units of values of input 1) the branch: output map, biases, dropout."""
        bias = row.value_bias
        if self.mixes:  # rows of attention weights sum to 1, so a value bias passes
            bias = bias * (row.value_skip + row.attention_gain) ** 2
        values = linear(averaged, row.value * second, bias)
        return Branch(*dropped(linear(values, row.output, row.output_bias), self.dropout))

    def from_ends(self, row: Row, at_zero: Pair, at_one: Pair) -> BranchBackward:
        """Attention's backward moments are linear in the gradient's covariance, so two evaluations give the map.

        After the output dropout the gradient has variance G / (1 - p) and covariance Gamma.
        """
        (v0, c0), (v1, c1) = at_zero, at_one
        slope = (np.asarray(v1) - v0, np.asarray(c1) - c0)
        by_variance, by_covariance = dropped((1.0, 1.0), self.dropout)
        vv, cv = linear((np.asarray(v0) * by_variance, np.asarray(c0) * by_variance), row.back)
        vc, cc = linear((slope[0] * by_covariance, slope[1] * by_covariance), row.back)
        return BranchBackward(np.asarray(vv), np.asarray(vc), np.asarray(cv), np.asarray(cc))


class SelfAttention(Heads):
    """Q, K, V -> scaled dot-product attention -> W_O -> dropout, of a stream that attends to itself."""

    def forward(self, i: int | Rowset, read: Pair, memory: Pair | None = None) -> Branch:
        """As `BranchMoments.forward`."""
        second, r = read
        row = self.at(i)
        s0, bias = self.scores(row, second, second)
        averaged = attention.forward(
            r, s0, self.n_queries, self.d_model, self.d_head, self.attention_dropout,
            causal=self.causal, omega=self.rotary, omega_rows=self.rotary_rows, query_bias=bias,
        )  # fmt: skip
        if self.mixes:
            averaged = attention.mixture(
                *averaged, r, row.value_skip, row.attention_gain, self.n_queries, causal=self.causal
            )
        return self.through_output(row, second, averaged)

    def backward(self, i: Rowset, read: Pair, memory: Pair | None = None) -> Sent:
        """As `BranchMoments.backward`, over all three paths."""
        second, r = read
        row = self.at(i)
        s0, bias = self.scores(row, second, second)
        low, high = attention.backward_ends(
            r, s0, self.n_queries, self.d_model, self.d_head, self.attention_dropout,
            causal=self.causal, omega=self.rotary, omega_rows=self.rotary_rows, query_bias=bias,
        )  # fmt: skip
        if self.mixes:
            low, high = (
                attention.mixture(*end, r_g, row.value_skip, row.attention_gain, self.n_queries, causal=self.causal)
                for r_g, end in ((0.0, low), (1.0, high))
            )
        return Sent(self.from_ends(row, low, high))


def settings(a: Architecture, stack: int) -> dict[str, Any]:
    """The fields of Heads that an architecture says, for one stack (index into STACKS)."""
    after_encoder = a.kind == "encoder-decoder" and stack == 1
    n_queries = (a.target_len or a.seq_len) if after_encoder else a.seq_len
    return {
        "n_queries": n_queries,
        "n_keys": n_queries,
        "d_model": a.d_model,
        "d_head": a.d_head,
        "dropout": a.dropout,
        "attention_dropout": a.attention_dropout or 0.0,
        "qk_norm": bool(a.qk_norm),
        "norm_eps": a.norm_eps,
        "causal": stack == 1,
    }


def mixes(p: Parametrization) -> bool:
    """Whether any attention does more than average values."""
    return bool((p.value_skip != 0).any() or (p.attention_gain != 1).any())


@dataclass(frozen=True)
class Layers:
    """Self-attention whose layers see different things: a SelfAttention for every Sight."""

    seeing: dict[Sight, SelfAttention]
    sights: Sights

    def forward(self, i: int | Rowset, read: Pair, memory: Pair | None = None) -> Branch:
        """As `BranchMoments.forward`, of one row, or of rows that see the same."""
        return self.seeing[self.sights.at(int(i if isinstance(i, int) else i[0]))].forward(i, read)

    def backward(self, i: Rowset, read: Pair, memory: Pair | None = None) -> Sent:
        """As `BranchMoments.backward`."""
        out: FloatArray | None = None
        second, r = (np.asarray(x) for x in read)
        for seen, made in self.seeing.items():
            where = [k for k, row in enumerate(i.tolist()) if self.sights.at(row) == seen]
            if where:
                part = np.stack(made.backward(i[where], (second[..., where], r[..., where])).stream)
                out = np.empty((*part.shape[:-1], len(i))) if out is None else out
                out[..., where] = part
        assert out is not None
        return Sent(BranchBackward(*out))


@dataclass(frozen=True)
class Varied(SelfAttention):
    """Self-attention with what `Settings` put around scores and values.

    Attributes:
        given: score_cap, sink, value_norm. gates: the fields of GateRow, (3, ..., sublayers); None: no gates.
    """

    given: Settings = field(default_factory=Settings)
    gates: FloatArray | None = None

    def scores(self, row: Row, second_query: Array, second_key: Array) -> tuple[Array, Array]:
        """As `Heads.scores`, capped."""
        s0, bias = super().scores(row, second_query, second_key)
        return capped(s0, self.given.score_cap), bias

    def forward(self, i: int | Rowset, read: Pair, memory: Pair | None = None) -> Branch:
        """As `BranchMoments.forward`."""
        row, values = self.at(i), self._values(i, read)
        if self.gates is not None:
            opened = activated(self._before_gate(i, read), "sigmoid")
            values = (values[0] * opened[0], values[1] * opened[1])
        return Branch(*dropped(linear(values, row.output, row.output_bias), self.dropout))

    def backward(self, i: Rowset, read: Pair, memory: Pair | None = None) -> Sent:
        """As `BranchMoments.backward`; what a sink's share changes with the scores is left out."""
        row = self.at(i)
        one, both = self._kept(row, read)
        vv, vc, cv, cc = (x / self.value_size(row, read[0]) for x in super().backward(i, read).stream)
        out = BranchBackward(vv * one, vc * both, cv * one, cc * both)
        if self.gates is None:
            return Sent(out)
        gate = self._before_gate(i, read)
        opened, values = activated(gate, "sigmoid"), self._values(i, read)
        unit = np.ones_like(np.asarray(read[0], float))
        slope = activated_back((unit * values[0], unit * values[1]), gate, "sigmoid")
        back = self.gate(i).back
        return Sent(
            BranchBackward(
                out.vv * opened[0] + slope[0] * back / (1 - self.dropout), out.vc * opened[1],
                out.cv * opened[0], out.cc * opened[1] + slope[1] * back,
            )
        )  # fmt: skip

    def gate(self, i: Any) -> GateRow:
        """The products of the gate of sublayer i, or of several."""
        assert self.gates is not None
        return GateRow(*self.gates[..., i])

    def value_size(self, row: Row, second: Array) -> Array:
        """What a norm divides the variance of values by, of an input of that second moment; 1 without."""
        return second * row.value + row.value_bias + self.norm_eps if self.given.value_norm else 1.0

    def _before_gate(self, i: Any, read: Pair) -> Pair:
        gate = self.gate(i)
        return linear((read[0], read[0] * read[1]), gate.weight, gate.bias)

    def _values(self, i: Any, read: Pair) -> Pair:
        """What the heads give, before a gate."""
        row, without = self.at(i), super().forward(i, read)
        out = (1 - self.dropout) * without.variance - row.output_bias, without.covariance - row.output_bias
        size, (one, both) = self.value_size(row, read[0]) * row.output, self._kept(row, read)
        return ratio(out[0] * one, size), ratio(out[1] * both, size)

    def _kept(self, row: Row, read: Pair) -> Pair:
        """Mean square of the share of weight that a sink leaves, and of two rows; over the lengths of rows, of which a
        short one weighs as much more in the former as its output is larger under uniform weights."""
        if self.given.sink is None:
            return 1.0, 1.0
        s0, _ = self.scores(row, read[0], read[0])
        own = np.asarray(np.maximum(1 - read[1] * self.rotary_rows, 0.0) * s0)
        lengths = over_rows(self.n_keys, self.causal)
        shares = [(weight, kept(np.asarray(float(n)), own, s0 - own, self.given.sink)) for n, weight in lengths]
        sizes = [weight * (read[1] + (1 - read[1]) / n) for n, weight in lengths]
        one = sum((size * share**2 for size, (_, share) in zip(sizes, shares, strict=True)), np.zeros_like(own))
        one = one / sum(sizes)
        mean = sum((weight * share for weight, share in shares), np.zeros_like(own))
        return plain(one), plain(mean**2)


def around(p: Parametrization) -> dict[str, Any]:
    """The fields of Varied beyond those of Heads; none where everything is usual.

    Raises:
        InputError: shaped attention, or value skips beside a sink.
    """
    a = p.architecture
    given = settings_of(a)
    usual = given.score_cap is None and given.sink is None and not given.value_norm and given.gate == "none"
    if usual:
        return {}
    if p.shaping.kind != "none" or a.positions == "alibi":
        raise InputError(
            "shaped attention has no cap, sink, norm on values or gate; leave these attention settings out"
        )
    if given.sink is not None and mixes(p):
        raise InputError("attention.sink with value_skip or attention_gain: expected one of them")
    if not has_gate(a):
        return {"given": given}
    inner, w = a.n_heads * a.d_head, p.weights["attention_gate"] ** 2
    back = a.d_model * p.weights["output"] ** 2 * (inner * w)
    return {"given": given, "gates": np.stack([a.d_model * w, p.biases["attention_gate"] ** 2, back])}


def seeing(p: Parametrization, stack: int, seen: Sight) -> SelfAttention:
    """The self-attention sublayers of a table in one stack, as if all of them saw the same."""
    a = p.architecture
    fields = settings(a, stack)
    causal, n = fields["causal"], fields["n_queries"]
    if seen.window:
        fields["causal"] = band = Band(seen.window, causal)
        n, causal = min(n, band.widest), False  # what rotations leave is that of a row away from the ends
    if seen.base:
        turned = (n, a.d_head, seen.base, a.rotary_fraction)
        fields["rotary"] = attention_scores.rotary_coherence(*turned, causal="pairs" if causal else None)
        fields["rotary_rows"] = (
            attention_scores.rotary_coherence(*turned, causal="rows") if causal else fields["rotary"]
        )
    more = around(p)
    return (Varied if more else SelfAttention)(table_of(p), mixes(p), **fields, **more)


def of(p: Parametrization, stack: int) -> SelfAttention | Layers:
    """The self-attention sublayers of a table in one stack (index into STACKS)."""
    found = sights_of(p, stack)
    made = {seen: seeing(p, stack, seen) for seen in dict.fromkeys(found.run)}
    return next(iter(made.values())) if len(made) == 1 else Layers(made, found)


def sights_of(p: Parametrization, stack: int) -> Sights:
    """What the layers of a stack see.

    Raises:
        InputError: a window on attention that is shaped.
    """
    a = p.architecture
    found = sights(a, p.layer, settings(a, stack)["n_queries"])
    if any(seen.window for seen in found.run) and (p.shaping.kind != "none" or a.positions == "alibi"):
        shape = "ALiBi" if p.shaping.kind == "none" else p.shaping.kind
        raise InputError(f"attention.window with {shape}: shaped attention has no window; leave one of them out")
    return found


def _held_score(s0: Array) -> Array:
    return min(s0, LARGEST_SCORE) if isinstance(s0, float) else np.minimum(s0, LARGEST_SCORE)

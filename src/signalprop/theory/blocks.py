"""Sublayer functions (branches): forward moments, and the linear map that takes the gradient back through them.

Sources: TGS Table 2 and v1 appendix C for the bidirectional ReLU case; everything else (all paths of attention, causal,
cross, gated, any activation, biases) is derived in `docs/theory/network.md`. A branch ends in a random projection, so
its mean is 0 and features of one token are uncorrelated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from signalprop.errors import InputError
from signalprop.network.activations import dual
from signalprop.network.architecture import Architecture
from signalprop.network.moments import Array, FloatArray
from signalprop.network.parametrization import KINDS, Parametrization
from signalprop.theory import attention
from signalprop.theory.logs import correlation, row

Rowset = NDArray[np.intp]  # indices of sublayers


class Branch(NamedTuple):
    """What a branch adds to the stream before its multiplier: variance and token covariance."""

    variance: Array
    covariance: Array


class BranchBackward(NamedTuple):
    """The gradient that a branch sends to its input: variance = vv G + vc Gamma, covariance = cv G + cc Gamma.

    G and Gamma are the gradient's variance and token covariance at the branch's output.
    """

    vv: FloatArray
    vc: FloatArray
    cv: FloatArray
    cc: FloatArray


@dataclass(frozen=True)
class Shape:
    """What attention needs to know besides weights: lengths, head width, mask, rotation, dropouts."""

    n_queries: int
    n_keys: int
    d_model: int
    d_head: int
    d_inner: int
    d_ff: int
    dropout: float
    attention_dropout: float
    causal: bool = False
    rotary: float = 1.0
    rotary_rows: float = 1.0
    gated: bool = False
    activation: str = "relu"
    qk_norm: bool = False


def shape_of(architecture: Architecture, stack: int, *, cross: bool = False) -> Shape:
    """The Shape of the sublayers of one stack (0 encoder, 1 decoder)."""
    a = architecture
    decoder_of_two = a.kind == "encoder-decoder" and stack == 1
    n_queries = (a.target_len or a.seq_len) if decoder_of_two else a.seq_len
    rotary = rotary_rows = 1.0
    if a.positions == "rotary" and not cross:
        turned = (n_queries, a.d_head, a.rotary_base, a.rotary_fraction)
        causal = stack == 1
        rotary = attention.rotary_coherence(*turned, causal="pairs" if causal else None)
        rotary_rows = attention.rotary_coherence(*turned, causal="rows") if causal else rotary
    return Shape(
        n_queries=n_queries,
        n_keys=a.seq_len if cross else n_queries,
        d_model=a.d_model,
        d_head=a.d_head,
        d_inner=a.n_heads * a.d_head,
        d_ff=a.d_ff,
        dropout=a.dropout,
        attention_dropout=a.attention_dropout or 0.0,
        causal=stack == 1 and not cross,
        rotary=rotary,
        rotary_rows=rotary_rows,
        gated=a.gated,
        activation=a.activation,
        qk_norm=bool(a.qk_norm),
    )


@dataclass(frozen=True)
class Rows:
    """The weight variances that branches need, as arrays over (..., sublayers): products precomputed once."""

    qk: FloatArray  # d_model^2 sigma_q^2 sigma_k^2 d_head score_scale^2: s0 on an input of second moment 1
    qk_norm: bool
    query_bias: FloatArray  # variance of a query bias, in units of d_model sigma_q^2; a key bias drops out of softmax
    value: FloatArray  # d_model sigma_v^2
    value_bias: FloatArray
    output: FloatArray  # d_inner sigma_o^2
    output_back: FloatArray  # d_model sigma_o^2
    value_back: FloatArray  # d_inner sigma_v^2
    output_bias: FloatArray
    value_skip: FloatArray  # the heads give out value_skip V + attention_gain A V
    attention_gain: FloatArray
    mixes: bool  # whether any of them does more than average
    up: FloatArray  # d_model sigma_up^2
    up_bias: FloatArray
    gate: FloatArray
    gate_bias: FloatArray
    down: FloatArray  # d_ff sigma_down^2
    down_bias: FloatArray
    down_back: FloatArray  # d_model sigma_down^2
    wide: float = field(default=1.0)  # d_ff / d_model

    @staticmethod
    def of(p: Parametrization) -> Rows:
        """Products of widths and weight variances of every sublayer.

        Raises:
            InputError: a cross-attention has a value skip.
        """
        if (p.value_skip[..., p.kind == KINDS.index("cross_attention")] != 0).any():
            raise InputError(
                "value_skip of a cross-attention is not 0; expected 0 there, where a query has no value of its own"
            )
        a = p.architecture
        d, inner = a.d_model, a.n_heads * a.d_head
        w = {role: column**2 for role, column in p.weights.items()}
        b = {role: column**2 for role, column in p.biases.items()}
        scale = p.score_scale**2
        # under QK-norm unit vectors times gains, which are part of score_scale; else what the weights give
        qk = a.d_head * scale if a.qk_norm else d**2 * w["query"] * w["key"] * a.d_head * scale
        return Rows(
            qk=qk,
            qk_norm=bool(a.qk_norm),
            query_bias=np.divide(b["query"], d * w["query"], out=np.zeros_like(qk), where=w["query"] > 0),
            value=d * w["value"],
            value_bias=b["value"],
            output=inner * w["output"],
            output_back=d * w["output"],
            value_back=inner * w["value"],
            output_bias=b["output"],
            value_skip=p.value_skip,
            attention_gain=p.attention_gain,
            mixes=bool((p.value_skip != 0).any() or (p.attention_gain != 1).any()),
            up=d * w["up"],
            up_bias=b["up"],
            gate=d * w["gate"],
            gate_bias=b["gate"],
            down=a.d_ff * w["down"],
            down_bias=b["down"],
            down_back=d * w["down"],
            wide=a.d_ff / d,
        )


def feed_forward(rows: Rows, i: int | Rowset, shape: Shape, second: Array, r: Array) -> Branch:
    """W_1 -> f -> W_2 -> dropout, or gated (f(x W_g) * (x W_u)) W_d, on Gaussian pre-activations.

    Args:
        second, r: second moment of the input and token correlation of its second moments.
    """
    keep = 1 - shape.dropout
    gate_or_up = (rows.gate, rows.gate_bias) if shape.gated else (rows.up, rows.up_bias)
    s = row(gate_or_up[0], i) * second + row(gate_or_up[1], i)
    shared = row(gate_or_up[0], i) * second * r + row(gate_or_up[1], i)
    q = dual(shape.activation, s, correlation(shared, s))
    one, cross = q.second_moment, q.covariance_moment
    if shape.gated:
        one = one * (row(rows.up, i) * second + row(rows.up_bias, i))
        cross = cross * (row(rows.up, i) * second * r + row(rows.up_bias, i))
    down, bias = row(rows.down, i), row(rows.down_bias, i)
    return Branch((down * one + bias) / keep, down * cross + bias)


def feed_forward_backward(rows: Rows, i: Rowset, shape: Shape, second: FloatArray, r: FloatArray) -> BranchBackward:
    """The backward map of `feed_forward`, for many sublayers `i` at once; arrays (..., len(i))."""
    keep = 1 - shape.dropout
    gate_or_up = (rows.gate, rows.gate_bias) if shape.gated else (rows.up, rows.up_bias)
    s = gate_or_up[0][..., i] * second + gate_or_up[1][..., i]
    shared = gate_or_up[0][..., i] * second * r + gate_or_up[1][..., i]
    q = dual(shape.activation, s, correlation(shared, s))
    back = rows.down_back[..., i] * rows.wide  # d_ff sigma_down^2; the way back fans out over d_ff again
    if shape.gated:
        up = rows.up[..., i] * second + rows.up_bias[..., i]
        up_shared = rows.up[..., i] * second * r + rows.up_bias[..., i]
        one = rows.up[..., i] * q.second_moment + rows.gate[..., i] * up * q.slope_second_moment
        cross = rows.up[..., i] * q.covariance_moment + rows.gate[..., i] * up_shared * q.slope_moment
    else:
        one = rows.up[..., i] * q.slope_second_moment
        cross = rows.up[..., i] * q.slope_moment
    zero = np.zeros_like(np.asarray(one, float))
    return BranchBackward(back * one / keep, zero, zero, back * cross)


def scores(rows: Rows, i: int | Rowset, second_query: Array, second_key: Array) -> tuple[Array, Array]:
    """(s0, share of a query bias in it): variance of one raw score, and how much of it is the same for every query."""
    qk, bias = _entry(rows.qk, i), _entry(rows.query_bias, i)
    if rows.qk_norm:
        return _held_score(qk), 0.0
    total = second_query + bias
    return _held_score(qk * total * second_key), correlation(bias, total)


def _held_score(s0: Array) -> Array:
    """A score variance whose square is a double; softmax has been hard long before."""
    return min(s0, 1e60) if isinstance(s0, float) else np.minimum(s0, 1e60)


def _entry(column: FloatArray, i: int | Rowset) -> Array:
    return column[..., i] if isinstance(i, np.ndarray) else row(column, i)


def self_attention(rows: Rows, i: int | Rowset, shape: Shape, second: Array, r: Array) -> Branch:
    """Q, K, V -> scaled dot-product attention -> W_O -> dropout, of a stream that attends to itself."""
    s0, bias = scores(rows, i, second, second)
    variance, covariance = attention.forward(
        r, s0, shape.n_queries, shape.d_model, shape.d_head, shape.attention_dropout,
        causal=shape.causal, omega=shape.rotary, omega_rows=shape.rotary_rows, query_bias=bias,
    )  # fmt: skip
    if rows.mixes:
        multipliers = row(rows.value_skip, i), row(rows.attention_gain, i)
        variance, covariance = attention.mixture(
            variance, covariance, r, *multipliers, shape.n_queries, causal=shape.causal
        )
    return _through_output(rows, i, shape, second, variance, covariance)


def cross_attention(
    rows: Rows, i: int | Rowset, shape: Shape, query: tuple[Array, Array], key: tuple[Array, Array]
) -> Branch:
    """Attention of a stream (second moment, correlation) to the encoder's output (second moment, correlation)."""
    s0, bias = scores(rows, i, query[0], key[0])
    variance, covariance = attention.cross_forward(
        query[1], key[1], s0, shape.n_keys, shape.d_model, shape.d_head, shape.attention_dropout, query_bias=bias
    )
    squared = row(rows.attention_gain, i) ** 2
    return _through_output(rows, i, shape, key[0], squared * variance, squared * covariance)


def _through_output(
    rows: Rows, i: int | Rowset, shape: Shape, second: Array, variance: Array, covariance: Array
) -> Branch:
    # rows of attention weights sum to 1, so a value bias passes; dropout on them is felt at O(1/L) only
    value, bias = row(rows.value, i) * second, row(rows.value_bias, i)
    if rows.mixes:
        bias = bias * (row(rows.value_skip, i) + row(rows.attention_gain, i)) ** 2
    output, output_bias = row(rows.output, i), row(rows.output_bias, i)
    v = output * (value * variance + bias) + output_bias
    c = output * (value * covariance + bias) + output_bias
    return Branch(v / (1 - shape.dropout), c)


def self_attention_backward(rows: Rows, i: Rowset, shape: Shape, second: FloatArray, r: FloatArray) -> BranchBackward:
    """The backward map of `self_attention` over all three paths, for many sublayers `i` at once."""
    s0, bias = scores(rows, i, second, second)
    ends = attention.backward_ends(
        r, s0, shape.n_queries, shape.d_model, shape.d_head, shape.attention_dropout,
        causal=shape.causal, omega=shape.rotary, omega_rows=shape.rotary_rows, query_bias=bias,
    )  # fmt: skip
    low, high = ends
    if rows.mixes:
        multipliers = rows.value_skip[..., i], rows.attention_gain[..., i]
        low, high = (
            attention.mixture(v, c, r_g, *multipliers, shape.n_queries, causal=shape.causal)
            for r_g, (v, c) in ((0.0, low), (1.0, high))
        )
    return _linear_in_correlation(rows, i, shape, low, high)


def cross_attention_backward(
    rows: Rows, i: Rowset, shape: Shape, query: tuple[FloatArray, FloatArray], key: tuple[FloatArray, FloatArray]
) -> tuple[BranchBackward, BranchBackward]:
    """Backward maps of `cross_attention`: to the query stream, and to the encoder's output."""
    s0, bias = scores(rows, i, query[0], key[0])
    args = (s0, shape.n_queries, shape.n_keys, shape.d_model, shape.d_head, shape.attention_dropout)
    ends = [attention.cross_backward(query[1], key[1], r_g, *args, query_bias=bias) for r_g in (0.0, 1.0)]
    # both paths are in units of d_v sigma_v^2 on inputs of second moment 1: dS/dx carries the other stream's scale
    to_query = _linear_in_correlation(rows, i, shape, ends[0][0], ends[1][0])
    to_key = _linear_in_correlation(rows, i, shape, ends[0][1], ends[1][1])
    scale = key[0] / np.maximum(query[0], 1e-200)  # the paths fall with the query's second moment: 0 stays 0
    squared = rows.attention_gain[..., i] ** 2
    return (
        BranchBackward(*(column * scale * squared for column in to_query)),
        BranchBackward(*(column * squared for column in to_key)),
    )


def _linear_in_correlation(
    rows: Rows, i: Rowset, shape: Shape, at_zero: tuple[Array, Array], at_one: tuple[Array, Array]
) -> BranchBackward:
    """Attention's backward moments are linear in the gradient's covariance, so two evaluations give the map.

    After the output dropout the gradient has variance G / (1 - p) and covariance Gamma.
    """
    factor = rows.output_back[..., i] * rows.value_back[..., i]
    keep = 1 - shape.dropout
    (v0, c0), (v1, c1) = at_zero, at_one
    return BranchBackward(
        vv=factor * np.asarray(v0) / keep,
        vc=factor * (np.asarray(v1) - v0),
        cv=factor * np.asarray(c0) / keep,
        cc=factor * (np.asarray(c1) - c0),
    )

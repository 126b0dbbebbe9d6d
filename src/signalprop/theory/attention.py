"""Scaled dot-product attention at initialisation: forward and backward moments of one set of heads, all three paths.

Every function works in units. The attention input has second moment 1 (divide by it beforehand). Forward results are in
units of d σ_v² times the input's second moment, where σ_v² is the variance of a value weight; backward results, the
gradient at the attention input, in units of d_v σ_v² σ_g², where d_v is the width of all value heads together (query
groups that share a value head count each) and σ_g² the gradient variance at the heads' output. Grouped key/value heads
change nothing else.

The formulas, their derivations and their measured errors: docs/theory/attention.md. TGS (Kedia et al., 2024), appendix
B.8, is the limit of uniform weights without the paths through queries and keys.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from signalprop.network.moments import Array
from signalprop.theory.attention_rows import (
    Band,
    Mask,
    by_length,
    namespace,
    pair_length,
    row_moments,
)
from signalprop.theory.log_arithmetic import plain
from signalprop.theory.row_overlaps import LEAST, jacobian_overlap, log_overlap
from signalprop.theory.signals import Pair


class Sizes:
    """Sizes of one set of heads, numbers or arrays: all that does not depend on what is read.

    Args:
        n_queries, n_keys: tokens, 1 to 1e6. d: width of the input. p: dropout on the attention weights, in [0, 1).
        causal: token i attends to tokens up to i; the result is an average over positions (pairs of positions). Early
            positions differ much: chain `kernels`, not these averages, through many layers. A Band is a window.
        omega, omega_rows: `rotary_coherence(...)`, 1 without rotary embeddings. With a causal mask the averages over
            positions differ: pass rotary_coherence(…, causal="pairs") and (…, causal="rows").
    """

    def __init__(
        self, n_queries: Array, n_keys: Array, d: Array, p: Array = 0.0, *, causal: Mask = False,
        omega: Array = 1.0, omega_rows: Array | None = None,
    ) -> None:  # fmt: skip
        given = n_queries, n_keys, d, p, omega, omega if omega_rows is None else omega_rows
        self.n_queries, self.n_keys, self.d, self.p, self.omega, self.omega_rows = map(plain, given)
        self.causal = causal
        xp = namespace(self.n_queries, self.n_keys, self.d, self.p, self.omega, self.omega_rows)
        self.numbers = xp is not np
        # n tokens that all have the same correlation cannot have one below -1/(n-1)
        self.least, self.least_key = (-1.0 / xp.maximum(n - 1.0, 1.0) for n in (self.n_queries, self.n_keys))

    def on_itself(self, r: Array, s0: Array, *, r_g: Array = 0.0, query_bias: Array = 0.0) -> Attention:
        """Attention of tokens of correlation r to themselves."""
        return self.across(r, r, s0, r_g=r_g, query_bias=query_bias)

    def across(
        self, r_query: Array, r_key: Array, s0: Array, *, r_g: Array = 0.0, query_bias: Array = 0.0
    ) -> Attention:
        """Attention of one stream to another."""
        values = r_query, r_key, r_g, s0, query_bias
        xp = namespace(*values)
        if xp is np or not self.numbers:
            values = tuple(plain(x) for x in values)  # type: ignore[assignment]
            xp = namespace(*values) if self.numbers else np
        r_query, r_key, r_g, s0, query_bias = values
        low, low_key = self.least, self.least_key
        r_query, r_g = xp.minimum(xp.maximum(r_query, low), 1.0), xp.minimum(xp.maximum(r_g, low), 1.0)
        r_keys = xp.minimum(xp.maximum(r_key, low_key), 1.0)
        return Attention(xp, self, r_query, r_keys, r_g, s0, query_bias)

    @cached_property
    def pairs(self) -> tuple[Array, Array]:
        """C_V and C_J: how often two different queries read one key, per key, under uniform weights."""
        n, xp = self.n_keys, namespace(self.n_keys)
        if isinstance(self.causal, Band):
            return self.causal.meetings(int(n))[:2]
        if not self.causal:
            meetings = self.n_queries * (self.n_queries - 1.0) / n**2
            return meetings, meetings
        h = _harmonic(n, xp)
        value = 2.0 - 2.0 * h / n
        return value, xp.maximum(value - (h * h - _harmonic_squares(n)) / n, 0.0)

    @cached_property
    def mean_overlap(self) -> Array:
        """How often two rows read one key in their averages: Σ_k A_ik A_jk of uniform weights."""
        if not self.causal:
            return 1.0 / self.n_keys
        found: Array = self.pairs[0] / namespace(self.n_keys).maximum(self.n_keys - 1.0, 1.0)
        return found


class Attention(NamedTuple):
    """One set of heads and what it reads: numbers, or arrays; of `Sizes.on_itself` or `Sizes.across`.

    Attributes:
        xp: the functions to compute with. r_query, r_key: token correlations of what queries, and keys and values, are
            made of, mean included: (covariance + mean²)/second moment. r_g: of the gradient at the heads' output.
        s0: raw score variance; 0 to 1e6.
        query_bias: the share of a query's mean square that its bias contributes.
    """

    xp: Any
    sizes: Sizes
    r_query: Array
    r_key: Array
    r_g: Array
    s0: Array
    query_bias: Array


class _Scores(NamedTuple):
    """What the score matrix contributes: the symbols of docs/theory/attention.md."""

    s: Array
    c: Array
    q0: Array
    value_overlap: Array  # Λ_V
    # averages over its rows, as `row_moments` gives them
    second: Array
    jacobian: Array
    response: Array
    remaining: Array
    squared_tilt: Array


def _within(covariance: Array, variance: Array, xp: Any) -> Array:
    found: Array = xp.maximum(xp.minimum(covariance, variance), -variance)
    return found


def _scores(x: Attention) -> _Scores:
    xp, sizes = x.xp, x.sizes
    r_query = x.r_query + x.query_bias * (1.0 - x.r_query)
    s = xp.maximum((1.0 - x.r_key * sizes.omega_rows) * x.s0, 0.0)
    per_token = sizes.omega * (1.0 - x.r_key) * x.s0  # the part of s that is linear in the key's deviation
    c = xp.minimum(xp.maximum(r_query * per_token, LEAST * s), s)
    value, *rows = by_length(_of_weights, s, c, sizes.n_keys, sizes.causal)
    q0 = (1.0 - x.r_key) * per_token / sizes.d
    return _Scores(s, c, q0, xp.exp(value), *rows)


def _of_weights(s: Array, c: Array, length: int, causal: Mask) -> tuple[Array, ...]:
    return log_overlap(s, c, pair_length(length, causal)), *row_moments(s, length, causal)


def _of_jacobians(s: Array, c: Array, length: int, causal: Mask) -> tuple[Array, ...]:
    return (jacobian_overlap(s, c, pair_length(length, causal)),)


def _harmonic(n: Array, xp: Any) -> Array:
    """1 + 1/2 + … + 1/n, to 1e-10: Euler-Maclaurin at n + 8, less the eight terms in between."""
    m = n + 8.0
    asymptotic = xp.log(m) + np.euler_gamma + 1 / (2 * m) - 1 / (12 * m**2) + 1 / (120 * m**4) - 1 / (252 * m**6)
    found: Array = asymptotic - sum(1.0 / (n + i) for i in range(1, 9))
    return found


def _harmonic_squares(n: Array) -> Array:
    """1 + 1/4 + … + 1/n²."""
    m = n + 8.0
    tail = 1 / m - 1 / (2 * m**2) + 1 / (6 * m**3) - 1 / (30 * m**5) + 1 / (42 * m**7)
    return math.pi**2 / 6 - tail - sum(1.0 / (n + i) ** 2 for i in range(1, 9))


# --- forward and backward ------------------------------------------------------------------------------------------


def forward(x: Attention) -> Pair:
    """The heads' output, of mean 0: in units of d σ_v² times the second moment of the input of values."""
    xp, sizes, scores = x.xp, x.sizes, _scores(x)
    rescaling = 1.0 / (1.0 - sizes.p)
    per_token = rescaling * scores.second
    variance = x.r_key * (1.0 + sizes.p * per_token) + (1.0 - x.r_key) * per_token
    variance = variance + scores.q0 * scores.response
    if sizes.causal:
        score_pairs = sizes.pairs[1]
        overlap = sizes.mean_overlap + (scores.value_overlap - 1.0) * score_pairs / xp.maximum(sizes.n_keys - 1.0, 1.0)
    else:
        overlap = scores.value_overlap / sizes.n_keys
    variance = xp.maximum(variance, 0.0)
    covariance = x.r_key + (1.0 - x.r_key) * overlap
    return variance, _within(covariance, variance, xp)


def _backward(x: Attention, scores: _Scores) -> tuple[Pair, Pair]:
    """Through the queries; through keys and values."""
    xp, sizes = x.xp, x.sizes
    rescaling = 1.0 / (1.0 - sizes.p)
    per_key = sizes.n_queries / sizes.n_keys
    other_queries = xp.maximum(sizes.n_queries - 1.0, 1.0)
    other_keys = xp.maximum(sizes.n_keys - 1.0, 1.0)
    score_pairs = sizes.pairs[1]
    (overlap,) = by_length(_of_jacobians, scores.s, scores.c, sizes.n_keys, sizes.causal)  # Λ_J
    # what the values' fluctuations contribute to one score's gradient; a key that gets A² is tilted twice as far along
    # w as the output is, which adds q₀, more under dropout
    h = sizes.p * rescaling
    tilt = scores.squared_tilt * scores.q0
    noise = rescaling - x.r_key + (4.0 * h + 1.0) * tilt

    through_value = _through_value(x, scores)
    popular = x.r_g * score_pairs * scores.c * overlap
    through_key = popular + per_key * scores.jacobian * x.s0 * noise

    weights_only = 1.0 - x.query_bias
    query = xp.maximum((scores.q0 * scores.remaining + scores.jacobian * scores.s * noise) * weights_only, 0.0)
    # two queries read the same keys and values: the common gradient's part of J s noise, without the masks
    common = 1.0 + 1.0 / sizes.d
    same_keys = score_pairs * overlap / (per_key * other_queries) * scores.s * (1.0 - x.r_key) * common
    query_covariance = x.r_g * (scores.q0 * (1.0 - scores.second) ** 2 + same_keys) * weights_only

    # Rows of A sum to one (to their kept share, with dropout) and rows of the score gradient to zero: the sum over all
    # keys is known, and with it the covariance. A rotation in between leaves only the share omega of the latter sum.
    total = _total(x, scores)
    key = xp.maximum(through_value + through_key, 0.0)
    key_covariance = (total - through_value - sizes.omega * through_key) / other_keys
    return (query, _within(query_covariance, query, xp)), (key, _within(key_covariance, key, xp))


def _through_value(x: Attention, scores: _Scores) -> Array:
    """Variance of the gradient at the values."""
    sizes, (value_pairs, score_pairs) = x.sizes, x.sizes.pairs
    per_token = sizes.n_queries / sizes.n_keys / (1.0 - sizes.p) * scores.second
    found: Array = per_token + x.r_g * (value_pairs + (scores.value_overlap - 1.0) * score_pairs)
    return found


def _total(x: Attention, scores: _Scores) -> Array:
    """The sum over all keys of the products of one key's gradient, through its value, with theirs."""
    sizes, rescaling = x.sizes, 1.0 / (1.0 - x.sizes.p)
    return (
        sizes.n_queries / sizes.n_keys * (1.0 + sizes.p * rescaling * scores.second + x.r_g * (sizes.n_queries - 1.0))
    )


def backward_apart(x: Attention) -> tuple[Pair, Pair]:
    """Gradients at the queries' stream, and at the keys' and values', in units of d_v σ_v² σ_g².

    The first must also be multiplied by (second moment of the key/value stream) / (second moment of the query stream)
    where the two differ.
    """
    return _backward(x, _scores(x))


def backward(x: Attention) -> Pair:
    """Gradient at a self-attention input through queries, keys and values."""
    return _both(backward_apart(x))


def _both(paths: tuple[Pair, Pair]) -> Pair:
    (query, query_covariance), (key, key_covariance) = paths
    return query + key, query_covariance + key_covariance


def mixture(
    variance: Array, covariance: Array, r: Array, skip: Array, gain: Array, length: Array, *, causal: Mask = False
) -> tuple[Array, Array]:
    """Moments of skip V + gain A V, or of what such heads send back, from those of A V alone: (variance, covariance).

    A token's value is in its average of values with the share 1/L of the weights that a token gives itself (its
    average over rows, with a causal mask), whatever the scores: the weights' own part of the overlap is odd in W_Q W_Kᵀ
    and vanishes on average, and with it every product of skip with the paths through queries and keys. Derivation and
    measured error: docs/theory/attention.md.

    Args:
        variance, covariance: of `forward`, or of `backward` (then the result is in its units).
        r: token correlation of the input; of the gradient at the heads' output, for what they send back.
        skip, gain: the multipliers `value_skip` and `attention_gain`.
    """
    n = float(length) if np.ndim(length) == 0 else np.asarray(length, dtype=np.float64)
    if isinstance(causal, Band):
        per_token: Array = causal.meetings(int(n))[2]
    else:
        per_token = (_harmonic(n, namespace(n)) if causal else 1.0) / n
    meet = per_token + (1.0 - per_token) * r
    meet_another = r + (1.0 - r) * (1.0 - per_token) / namespace(n).maximum(n - 1.0, 1.0)
    return (
        gain * gain * variance + skip * skip + 2.0 * skip * gain * meet,
        gain * gain * covariance + skip * skip * r + 2.0 * skip * gain * meet_another,
    )

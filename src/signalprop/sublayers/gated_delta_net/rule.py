"""The gated delta rule on a token kernel: a simulation, heads drawn with the stream's kernel and run forward and back.

Given queries, keys, decays and writes of a head the rule is a matrix of tokens, M = B (1 + A)^-1, that every feature of
its values passes: `docs/theory/components.md`. The heads that are drawn are always the same for a shape; each counts as
much as makes their sums meet what is known of them (`weights`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from signalprop.kernels.duals import activated
from signalprop.network.moments import FloatArray
from signalprop.sublayers.gated_delta_net.roles import Settings
from signalprop.sublayers.mamba2.scan import (
    adjoint,
    convolved,
    drawn_taps,
    mean_over_rows,
    silu,
    symmetric_root,
    taken,
)

_NUMBERS = 2**18  # values of all drawn heads and tokens, about
_LEAST, _MOST = 16, 1024  # heads
_STEPS = 8  # to the weights


class Gains(NamedTuple):
    """Of every map fan_in sigma^2 (`filter`: sigma^2); or variances of the biases; or, of `back`, fan_out sigma^2."""

    gate: float
    value: float
    key: float
    query: float
    decay: float
    write: float
    filter: float
    out: float


class Noise(NamedTuple):
    """Standard normal numbers, of many rows orthogonal: (groups, heads or 1, features, T), taps (..., width + 1).

    Whatever a group has, another has with the other sign; which, differs from role to role.

    Attributes:
        rate: exp(A_log) of every drawn head, (groups, heads, 1).
    """

    rate: FloatArray
    value: FloatArray
    key: FloatArray
    query: FloatArray
    decay: FloatArray
    write: FloatArray
    gradient: FloatArray
    value_taps: FloatArray
    key_taps: FloatArray
    query_taps: FloatArray


@lru_cache(maxsize=8)
def noise(s: Settings, length: int, uniform: bool, layer: int) -> Noise:
    """Always the same for these settings, so many tokens and this layer. uniform: taps are, else normal."""
    rng = np.random.default_rng(layer)
    of_group = s.n_heads // s.n_groups
    wanted = min(_MOST, max(_LEAST, _NUMBERS // (length * max(s.d_value, s.d_key))))
    half = max(2, wanted // of_group // 2)

    def once(*shape: int) -> FloatArray:
        drawn = rng.standard_normal((int(np.prod(shape)), length))
        if len(drawn) >= 2 * length:
            values, vectors = np.linalg.eigh(drawn.T @ drawn / len(drawn))
            drawn = drawn @ (vectors / np.sqrt(values)) @ vectors.T
        return np.asarray(drawn.reshape(*shape, length))

    def twice(*shape: int) -> tuple[FloatArray, FloatArray]:
        x, taps, order = once(*shape), drawn_taps(rng, s.width, uniform, *shape), rng.permutation(2 * half)
        return np.concatenate([x, -x])[order], np.concatenate([taps, taps])[order]

    values, keys = (half, of_group, s.d_value), (half, 1, s.d_key)
    (value, value_taps), (key, key_taps), (query, query_taps) = twice(*values), twice(*keys), twice(*keys)
    return Noise(
        rate=rng.permutation(s.rate(2 * half * of_group)).reshape(2 * half, of_group, 1),
        value=value, key=key, query=query, decay=twice(half, of_group)[0], write=twice(half, of_group)[0],
        gradient=once(2 * half, *values[1:]), value_taps=value_taps, key_taps=key_taps, query_taps=query_taps,
    )  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """One sublayer at one token kernel; the shapes are Noise's, and (groups, heads, T, T) of `read` and `mixed`.

    Attributes:
        value, key, query: after silu, with its slope; key and query not yet of length 1.
        gate: kernels of silu(z) and of its slope, (T, T).
        unit_key, unit_query: of length 1, the query's with its factor. key_length, query_length: what divided them.
        slope: d log decay of the step's input. write: beta. solved: (1 + A)^-1. read: A, mixed: B. kept: U, what is
        written less what was known. normed: the heads' outputs after their norm, root: what that divides by.
        counts: the square root of each head's weight, (groups, heads, 1, 1).
    """

    s: Settings
    noise: Noise
    value: tuple[FloatArray, FloatArray]
    key: tuple[FloatArray, FloatArray]
    query: tuple[FloatArray, FloatArray]
    gate: tuple[FloatArray, FloatArray]
    unit_key: FloatArray
    unit_query: FloatArray
    key_length: FloatArray
    query_length: FloatArray
    slope: FloatArray
    write: FloatArray
    factor: FloatArray
    solved: FloatArray
    read: FloatArray
    mixed: FloatArray
    kept: FloatArray
    normed: FloatArray
    root: FloatArray
    counts: FloatArray

    @property
    def out(self) -> FloatArray:
        """The kernel of what is given to the output map, (T, T): gates are independent of the rest."""
        return mean_over_rows(self.normed * self.counts) * self.gate[0]

    def back(self, g: FloatArray, gains: Gains) -> FloatArray:
        """Gradient kernel at the stream, from that at what the output map reads; `gains` with fan_out."""
        z, s = self.noise, self.s
        at_gate = g * mean_over_rows(self.normed * self.counts) * self.gate[1]
        sent = z.gradient @ symmetric_root(g * self.gate[0]) * self.counts  # at the norm's output
        through = self.normed * (sent * self.normed).mean(-2, keepdims=True)
        at_output = (sent - through) / self.root
        at_kept = at_output @ self.mixed @ self.solved  # features are rows: x M
        at_value = at_kept
        at_mixed = np.tril(at_output.mT @ self.kept)
        at_read = -np.tril(at_kept.mT @ self.kept, -1)
        terms = at_mixed * self.mixed + at_read * self.read
        at_write = terms.sum(-2) * (1 - self.write)  # d beta = beta (1 - beta), and terms / beta
        before = np.cumsum(terms, -1) - terms  # over s < r
        at_decay = np.tril(before).sum(-2) * self.slope  # over t >= r
        scores, keys = at_mixed * self.factor, at_read * self.factor
        at_query = _given_back(self.unit_key @ scores.mT)
        at_key = (_asked(self.unit_query, scores.shape[1]) @ scores).sum(1, keepdims=True)
        at_key = at_key + self.unit_key @ (keys + keys.mT).sum(1, keepdims=True)
        filtered = gains.value * mean_over_rows(adjoint(at_value * self.value[1], z.value_taps))
        scale = s.d_key**-0.5
        for at, unit, size, x, taps, gain in (
            (at_key, self.unit_key, self.key_length, self.key, z.key_taps, gains.key),
            (at_query * scale, self.unit_query / scale, self.query_length, self.query, z.query_taps, gains.query),
        ):
            raw = (at - unit * (at * unit).sum(-2, keepdims=True)) / size
            filtered = filtered + gain * mean_over_rows(adjoint(raw * x[1], taps))
        found = gains.gate * at_gate + gains.filter * filtered
        for at, gain in ((at_decay, gains.decay), (at_write, gains.write)):
            found = found + gain * mean_over_rows(at)
        return np.asarray(found)


def rule(s: Settings, kernel: FloatArray, gains: Gains, biases: Gains, *, uniform: bool, layer: int = 0) -> Rule:
    """The sublayer where what it reads has this kernel, (T, T).

    Args:
        uniform: the taps of the filters are, else normal.
    """
    z = noise(s, len(kernel), uniform, layer)

    @lru_cache
    def root_of(gain: float, bias: float) -> FloatArray:
        return symmetric_root(gain * kernel + bias)

    def drawn(x: FloatArray, role: str) -> FloatArray:
        return np.asarray(x @ root_of(getattr(gains, role), getattr(biases, role)))

    def filtered(x: FloatArray, taps: FloatArray, role: str) -> tuple[FloatArray, FloatArray]:
        through = convolved(drawn(x, role), taps[..., :-1] * gains.filter**0.5)
        mapped = getattr(gains, role) * kernel + getattr(biases, role)
        expected = gains.filter * np.trace(taken(mapped, s.width, ahead=True)) / len(kernel)
        found = (through * through).mean()
        through = through * (expected / found) ** 0.5 if found > 0 else through
        return silu(through + taps[..., -1:] * biases.filter**0.5)

    def unit(x: FloatArray) -> tuple[FloatArray, FloatArray]:
        length = np.sqrt((x * x).sum(-2, keepdims=True) + s.eps)
        return x / length, length

    value = filtered(z.value, z.value_taps, "value")
    key, query = filtered(z.key, z.key_taps, "key"), filtered(z.query, z.query_taps, "query")
    (unit_key, key_length), (unit_query, query_length) = unit(key[0]), unit(query[0])
    unit_query = unit_query * s.d_key**-0.5
    before = drawn(z.decay, "decay") + s.step_bias
    write = 1 / (1 + np.exp(-drawn(z.write, "write")))
    total = z.rate * np.cumsum(np.logaddexp(0, before), -1)
    kept = np.exp(np.minimum(total[..., None, :] - total[..., :, None], 0.0))
    factor = np.tril(kept) * write[..., None, :]
    read = np.tril(factor * (unit_key.mT @ unit_key), -1)
    mixed = factor * (_asked(unit_query, factor.shape[1]).mT @ unit_key)
    solved = np.linalg.inv(np.eye(len(kernel)) + read)
    written = value[0] @ solved.mT
    output = written @ mixed.mT
    rms = np.sqrt((output * output).mean(-2, keepdims=True) + s.eps)
    return Rule(
        s, z, value, key, query, activated("silu", gains.gate * kernel + biases.gate), unit_key, unit_query, key_length,
        query_length, -z.rate / (1 + np.exp(-before)), write, factor, solved, read, mixed, written, output / rms, rms,
        weights(unit_query, unit_key, factor, mixed, value[0])[..., None, None] ** 0.5,
    )  # fmt: skip


def weights(query: FloatArray, key: FloatArray, factor: FloatArray, mixed: FloatArray, value: FloatArray) -> FloatArray:
    """How much every drawn head counts, (groups, heads), 1 on average.

    So that two sums meet their expectation: sum_ts B_ts^2 v_s^2 and sum_tt' B_tt B_t't' v_t v_t', means over a head's
    values. Numbers of queries, of keys, writes and decays, and values are independent, and numbers of a query alike:
    so the expectation is a product of means over all heads, which scatter far less than a mean of products.
    """
    n = key.shape[-2]

    def means(x: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Of x_i x_i' over numbers, times n; and of x_i x_j', times n sqrt(n - 1)."""
        one = n * mean_over_rows(x)
        return one, (mean_over_rows(x.sum(-2)) - one) / max(n - 1, 1) ** 0.5

    (query_one, query_two), (key_one, key_two), values = means(query), means(key), mean_over_rows(value)
    own = np.diagonal(mixed, 0, -2, -1)
    found = np.stack([
        ((mixed * mixed).sum(-2) * (value * value).mean(-2)).sum(-1),
        ((own[..., None, :] @ value.mT) ** 2).mean((-2, -1)),
    ])  # fmt: skip
    alone = sum(np.outer(np.diag(q), np.diag(k)) for q, k in ((query_one, key_one), (query_two, key_two)))
    scores = query_one * key_one + query_two * key_two
    written = mean_over_rows(np.diagonal(factor, 0, -2, -1))
    expected = np.array([
        ((factor * factor).mean((0, 1)) * alone * np.diag(values)).sum(), (written * scores * values).sum()
    ]) / n  # fmt: skip
    off = (found - expected[:, None, None]).reshape(2, -1)
    weight = np.ones(off.shape[1])
    for _ in range(_STEPS):
        step = np.linalg.pinv(weight * off @ off.T, 1e-9, hermitian=True) @ (off @ weight)
        weight = weight * np.exp(np.clip(-step @ off, -1, 1))
        weight = weight / weight.mean()
    return np.asarray(weight.reshape(found.shape[1:]))


def _asked(query: FloatArray, heads: int) -> FloatArray:
    """Every head of a group reads by queries of another group: more pairs of keys and queries are drawn so."""
    return np.concatenate([np.roll(query, -h, 0) for h in range(heads)], 1)


def _given_back(x: FloatArray) -> FloatArray:
    """What `_asked` sends back: sums over the heads that a query was asked by."""
    return np.asarray(sum(np.roll(x[:, [h]], h, 0) for h in range(x.shape[1])))

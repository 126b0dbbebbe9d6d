"""The gated delta rule on a token kernel: a simulation, heads drawn with the stream's kernel and run forward and back.

Given queries, keys, decays and writes of a head the rule is a matrix of tokens, M = B (1 + A)^-1, that every feature of
its values passes: `docs/theory/components.md`. The heads that are drawn are always the same for a shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from signalprop.network.moments import FloatArray
from signalprop.sublayers.gated_delta_net.roles import Settings
from signalprop.sublayers.mamba2.scan import (
    adjoint,
    convolved,
    drawn_taps,
    mean_over_rows,
    silu,
    symmetric_root,
)

_NUMBERS = 2**18  # values of all drawn heads and tokens, about
_LEAST, _MOST = 16, 1024  # heads


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

    Attributes:
        rate: exp(A_log) of every drawn head, (groups, heads, 1).
    """

    rate: FloatArray
    value: FloatArray
    key: FloatArray
    query: FloatArray
    gate: FloatArray
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
    n = max(4, wanted // of_group)

    def normal(*shape: int) -> FloatArray:
        drawn = rng.standard_normal((int(np.prod(shape)), length))
        if len(drawn) >= 2 * length:
            values, vectors = np.linalg.eigh(drawn.T @ drawn / len(drawn))
            drawn = drawn @ (vectors / np.sqrt(values)) @ vectors.T
        return np.asarray(drawn.reshape(*shape, length))

    taps = partial(drawn_taps, rng, s.width, uniform)
    values, keys = (n, of_group, s.d_value), (n, 1, s.d_key)
    return Noise(
        rate=rng.permutation(s.rate(n * of_group)).reshape(n, of_group, 1),
        value=normal(*values), key=normal(*keys), query=normal(*keys), gate=normal(*values),
        decay=normal(n, of_group), write=normal(n, of_group), gradient=normal(*values),
        value_taps=taps(*values), key_taps=taps(*keys), query_taps=taps(*keys),
    )  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """One sublayer at one token kernel; the shapes are Noise's, and (groups, heads, T, T) of `read` and `mixed`.

    Attributes:
        value, key, query, gate: after silu, with its slope; key and query not yet of length 1.
        unit_key, unit_query: of length 1, the query's with its factor. key_length, query_length: what divided them.
        slope: d log decay of the step's input. write: beta. solved: (1 + A)^-1. read: A, mixed: B. kept: U, what is
        written less what was known. normed: the heads' outputs after their norm, root: what that divides by.
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

    @property
    def out(self) -> FloatArray:
        """The kernel of what is given to the output map, (T, T): gates are independent of the rest."""
        return mean_over_rows(self.normed) * mean_over_rows(self.gate[0])

    def back(self, g: FloatArray, gains: Gains) -> FloatArray:
        """Gradient kernel at the stream, from that at what the output map reads; `gains` with fan_out."""
        z, s = self.noise, self.s
        at_gate = g * mean_over_rows(self.normed) * mean_over_rows(self.gate[1])
        sent = z.gradient @ symmetric_root(g * mean_over_rows(self.gate[0]))  # at the norm's output
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
        at_query = self.unit_key @ scores.sum(1, keepdims=True).mT
        at_key = self.unit_query @ scores.sum(1, keepdims=True)
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
    read, mixed = np.tril(factor * (unit_key.mT @ unit_key), -1), factor * (unit_query.mT @ unit_key)
    solved = np.linalg.inv(np.eye(len(kernel)) + read)
    written = value[0] @ solved.mT
    output = written @ mixed.mT
    rms = np.sqrt((output * output).mean(-2, keepdims=True) + s.eps)
    return Rule(
        s, z, value, key, query, silu(drawn(z.gate, "gate")), unit_key, unit_query, key_length,
        query_length, -z.rate / (1 + np.exp(-before)), write, factor, solved, read, mixed, written, output / rms, rms,
    )  # fmt: skip

"""The scan of Mamba-2 on a token kernel: expectations over drawn heads, the features of each in closed form.

Steps, keys and queries of a head are few numbers that make a matrix of tokens; given these, its features are many and
independent. So heads are drawn, always the same for a shape, and features are averaged: `docs/theory/components.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from signalprop.network.moments import FloatArray
from signalprop.sublayers.mamba2.roles import Settings

_HEADS, _AT = 64, 64  # heads that are drawn of so many tokens; of fewer tokens more, so that the work is the same
_FEATURES, _MOST = 1536, 64  # _MOST: features of a drawn head


class Gains(NamedTuple):
    """Of every map fan_in sigma^2 (`filter`: sigma^2); or variances of the biases; or, of `back`, fan_out sigma^2."""

    gate: float
    value: float
    key: float
    query: float
    step: float
    filter: float
    out: float


class Noise(NamedTuple):
    """Standard normal numbers that heads are made from.

    Attributes:
        heads: numbers of the heads of every drawn group, (groups, heads). step: (groups, heads, T). turn: (groups,).
        value, gate: (features, T), their columns orthogonal. key, query: (groups, d_state, T).
        value_taps, key_taps, query_taps: likewise (..., width + 1), the last for the filter's bias.
        gradient: (groups, heads, features, T), at the norm's output.
        feature: (groups, heads, features) which of the values a head has.
    """

    heads: NDArray[np.int64]
    turn: FloatArray
    step: FloatArray
    value: FloatArray
    key: FloatArray
    query: FloatArray
    value_taps: FloatArray
    gate: FloatArray
    key_taps: FloatArray
    query_taps: FloatArray
    gradient: FloatArray
    feature: NDArray[np.int64]


@lru_cache(maxsize=8)
def noise(s: Settings, length: int, uniform: bool, layer: int) -> Noise:
    """Always the same for these settings, so many tokens and this layer: what chance does in one, another makes good.
    uniform: taps are, else normal."""
    rng = np.random.default_rng(layer)
    of_group = s.n_heads // s.n_groups
    wanted = int(min(512, max(32, _HEADS * (_AT / length) ** 2)))
    some = np.unique(np.linspace(0, of_group - 1, min(of_group, 16)).round().astype(int))
    n = max(4, wanted // len(some))
    groups = np.arange(n) * s.n_groups // n if s.n_groups > 1 else np.zeros(n, int)

    taps = partial(drawn_taps, rng, s.width, uniform)
    half = int(max(length, min(12288, _FEATURES * _AT / length)))
    value, gate = np.linalg.qr(rng.standard_normal((2, half, length)))[0] * half**0.5
    value_taps = taps(half)
    feature = rng.integers(0, 2 * half, (n, len(some), min(s.d_head, _MOST)))
    return Noise(
        heads=groups[:, None] * of_group + some,
        turn=np.asarray(np.arange(n) * 2**0.5, np.float64),
        step=rng.standard_normal((n, len(some), length)),
        value=np.concatenate([value, -value]),
        key=rng.standard_normal((n, s.d_state, length)),
        query=rng.standard_normal((n, s.d_state, length)),
        gate=np.concatenate([gate, -gate]),
        value_taps=np.concatenate([value_taps, value_taps]),
        key_taps=taps(n, s.d_state),
        query_taps=taps(n, s.d_state),
        gradient=rng.standard_normal((*feature.shape, length)),
        feature=feature,
    )


@dataclass(frozen=True)
class Scan:
    """One sublayer at one token kernel; features are (groups, heads, features, T).

    Attributes:
        rate, step: of every drawn head. step_slope: of the softplus.
        key, query: after silu, with its slope, (groups, d_state, T).
        decayed: (groups, heads, T, T), what a state keeps times the step. mixing: times query and key: from x to y.
        read: x of the drawn features. read_slope: of its silu. output: y. opened, opened_slope: silu(z), and its slope.
        root: what the norm divides by, (groups, 1, 1, T); 1 without one.
    """

    s: Settings
    noise: Noise
    rate: FloatArray
    step: FloatArray
    step_slope: FloatArray
    key: tuple[FloatArray, FloatArray]
    query: tuple[FloatArray, FloatArray]
    decayed: FloatArray
    mixing: FloatArray
    read: FloatArray
    read_slope: FloatArray
    output: FloatArray
    opened: FloatArray
    opened_slope: FloatArray
    root: FloatArray

    @property
    def features(self) -> FloatArray:
        """What the gated norm gives."""
        return self.output * self.opened / self.root

    @property
    def out(self) -> FloatArray:
        """Its kernel, (T, T)."""
        return mean_over_rows(self.features)

    def back(self, g: FloatArray, gains: Gains) -> FloatArray:
        """Gradient kernel at the stream, from that at what the norm gives; `gains` with fan_out."""
        s, z, features = self.s, self.noise, self.features
        at_gate = (g * self._through_norm(self.output * self.opened_slope / self.root)).mean((0, 1))
        sent = z.gradient @ symmetric_root(g)
        if s.normed:
            sent = sent - features * (sent * features).mean((1, 2), keepdims=True)
        at_output = sent * self.opened / self.root
        at_value = (at_output @ self.mixing + s.skip * at_output) * self.read_slope
        at_scores = at_output.mT @ self.read  # sums over features: of a head, these stand for all
        scores = (at_scores * self.decayed).sum(1)
        more = s.inner / s.n_groups / z.feature[0].size
        filtered = gains.value * mean_over_rows(adjoint(at_value, z.value_taps[z.feature]))
        for at, (_, slope), taps, gain in (
            (self.key[0] @ scores.mT, self.query, z.query_taps, gains.query),
            (self.query[0] @ scores, self.key, z.key_taps, gains.key),
        ):
            filtered = filtered + more * gain * mean_over_rows(adjoint(at * slope, taps))
        found = gains.gate * at_gate + gains.filter * filtered
        return np.asarray(
            found + s.d_head / z.feature.shape[2] * gains.step * mean_over_rows(self._at_steps(at_scores))
        )

    def _through_norm(self, x: FloatArray) -> FloatArray:
        """E x_i x_j P_i P_j over a head's features, P the norm's projection: features that are large get less back."""
        if not self.s.normed:
            return second_moment(x)
        n = self.features
        once = (x * n**2).mT @ x / x.shape[-2]
        both = second_moment(x * n) * second_moment(n).mean(1, keepdims=True)
        return np.asarray(second_moment(x) + (both - once - once.mT) * self.s.n_groups / self.s.inner)

    def _at_steps(self, at_scores: FloatArray) -> FloatArray:
        """The gradient at a head's steps before their softplus, (groups, heads, T), from that at its scores."""
        terms = at_scores * self.mixing
        of_token = terms.sum(-2)
        before = np.cumsum(terms, -1) - terms  # over s < r
        return np.asarray((of_token / self.step - self.rate[..., None] * np.tril(before).sum(-2)) * self.step_slope)


def scan(s: Settings, kernel: FloatArray, gains: Gains, biases: Gains, *, uniform: bool, layer: int = 0) -> Scan:
    """The scan of what a sublayer reads, whose kernel is this, (T, T).

    Args:
        uniform: the taps of the filters are, else normal.
    """
    z = noise(s, len(kernel), uniform, layer)

    @lru_cache
    def root_of(bias: float) -> FloatArray:
        return symmetric_root(kernel + bias).T

    def drawn(x: FloatArray, role: str) -> FloatArray:
        gain = getattr(gains, role)
        return np.asarray(gain**0.5 * (x @ root_of(getattr(biases, role) / gain)))

    def filtered(x: FloatArray, taps: FloatArray, role: str) -> tuple[FloatArray, FloatArray]:
        through = convolved(drawn(x, role), taps[..., :-1] * gains.filter**0.5)
        return silu(through + taps[..., -1:] * biases.filter**0.5)

    value, value_slope = filtered(z.value, z.value_taps, "value")
    key, key_slope = filtered(z.key, z.key_taps, "key")
    query, query_slope = filtered(z.query, z.query_taps, "query")
    biased = np.stack([s.step_bias(turn)[heads] for turn, heads in zip(z.turn, z.heads, strict=True)])
    before = drawn(z.step, "step") + biased[..., None]
    step = np.logaddexp(0, before)
    rate = s.rate()[z.heads]
    total = rate[..., None] * np.cumsum(step, -1)
    decayed = np.tril(np.exp(np.minimum(total[..., None, :] - total[..., :, None], 0.0)) * step[..., None, :])
    mixing = decayed * (query.mT @ key)[:, None]
    gate, gate_slope = silu(drawn(z.gate, "gate"))
    read, opened = value[z.feature], gate[np.roll(z.feature, 1, -1)]
    output = read @ (mixing + s.skip * np.eye(len(kernel))).mT
    size, some = s.inner // s.n_groups, z.feature[0].size
    seen = (output * opened) ** 2
    ideal = np.einsum("ghft,t->gt", output**2, (gate**2).mean(0)) / some
    divisor = ideal + (seen.mean((1, 2)) - ideal) * min(some / size, 1.0) ** 0.5
    root = np.sqrt(divisor + s.eps)[:, None, None]
    root = root * np.sqrt((seen / root**2).mean((0, 1, 2)) * (1 + s.eps / ideal.mean(0)))  # of mean square 1
    root = root if s.normed else np.ones_like(root)
    return Scan(
        s, z, rate, step, 1 / (1 + np.exp(-before)), (key, key_slope), (query, query_slope),
        decayed, mixing, read, value_slope[z.feature], output, opened, gate_slope[np.roll(z.feature, 1, -1)], root,
    )  # fmt: skip


def drawn_taps(rng: np.random.Generator, width: int, uniform: bool, *shape: int) -> FloatArray:
    """Taps of filters of variance 1, (*shape, width + 1), the last for the filter's bias."""
    size = (*shape, width)
    drawn = rng.uniform(-(3**0.5), 3**0.5, size) if uniform else rng.standard_normal(size)
    return np.concatenate([drawn, rng.standard_normal((*shape, 1))], -1)


def taken(kernel: FloatArray, width: int, *, ahead: bool) -> FloatArray:
    """Sum over taps of the kernel, moved by so many tokens each: ahead, or back as gradients go."""
    out, t = np.zeros_like(kernel), len(kernel)
    for k in range(min(width, t)):
        if ahead:
            out[k:, k:] += kernel[: t - k, : t - k]
        else:
            out[: t - k, : t - k] += kernel[k:, k:]
    return out


def second_moment(x: FloatArray) -> FloatArray:
    """Mean of x x^T over features, (..., features, T) -> (..., T, T)."""
    return np.asarray(x.mT @ x / x.shape[-2])


def silu(x: FloatArray) -> tuple[FloatArray, FloatArray]:
    """silu and its slope."""
    gate = 1 / (1 + np.exp(-x))
    return x * gate, gate * (1 + x * (1 - gate))


def convolved(x: FloatArray, taps: FloatArray) -> FloatArray:
    out = np.zeros_like(x)
    for k in range(min(taps.shape[-1], x.shape[-1])):
        out[..., k:] += taps[..., k, None] * x[..., : x.shape[-1] - k]
    return out


def adjoint(x: FloatArray, taps: FloatArray) -> FloatArray:
    """What `convolved` sends back; taps (..., width + 1), the last, for the bias, is not read."""
    out = np.zeros_like(x)
    for k in range(min(taps.shape[-1] - 1, x.shape[-1])):
        out[..., : x.shape[-1] - k] += taps[..., k, None] * x[..., k:]
    return out


def symmetric_root(kernel: FloatArray) -> FloatArray:
    """The symmetric square root of matrices, (..., T, T): near kernels have near ones."""
    values, vectors = np.linalg.eigh(kernel)
    return np.asarray((vectors * np.sqrt(np.maximum(values, 0.0))[..., None, :]) @ vectors.mT)


def mean_over_rows(x: FloatArray) -> FloatArray:
    """Mean of x x^T over all rows, (..., T) -> (T, T)."""
    return second_moment(x.reshape(-1, x.shape[-1]))

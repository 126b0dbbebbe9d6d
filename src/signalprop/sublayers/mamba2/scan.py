"""The scan of Mamba-2 on a token kernel: expectations over drawn heads, the features of each in closed form.

Steps, keys and queries of a head are few numbers that make a matrix of tokens; given these, its features are many and
independent. So heads are drawn, always the same for a shape, and features are averaged: `docs/theory/components.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from signalprop.network.moments import FloatArray
from signalprop.sublayers.mamba2.roles import Settings

_HEADS, _AT = 64, 64  # heads that are drawn of so many tokens; of fewer tokens more, so that the work is the same
_FEATURES, _DRAWS, _MOST = 1536, 4, 64  # _MOST: features of a drawn head


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
        gradient: (groups, heads, T, draws), for steps alone.
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
        gradient=rng.standard_normal((n, len(some), length, _DRAWS)),
        feature=rng.integers(0, 2 * half, (n, len(some), min(s.d_head, _MOST))),
    )


@dataclass(frozen=True)
class Scan:
    """One sublayer at one token kernel; features are (groups, heads, features, T).

    Attributes:
        rate, step: of every drawn head. step_slope: of the softplus.
        value, key, query: mean of x x^T over features, and of the slopes of silu.
        decayed: (groups, heads, T, T), what a state keeps times the step. mixing: times query and key: from x to y.
        read: x of the drawn features. read_slope: of its silu. output: y. opened, opened_slope: silu(z), and its slope.
        root: what the norm divides by, (groups, 1, 1, T); 1 without one.
    """

    s: Settings
    noise: Noise
    rate: FloatArray
    step: FloatArray
    step_slope: FloatArray
    value: tuple[FloatArray, FloatArray]
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
        return np.asarray(second_moment(self.features).mean((0, 1)))

    def back(self, g: FloatArray, gains: Gains) -> FloatArray:
        """Gradient kernel at the stream, from that at what the norm gives; `gains` with fan_out."""
        s = self.s
        shared = s.inner // s.n_groups
        y = g * self._through_norm(self.opened / self.root)  # (groups, heads, T, T)
        at_gate = (g * self._through_norm(self.output * self.opened_slope / self.root)).mean((0, 1))
        turned = self.mixing + s.skip * np.eye(len(g))
        # what passes D alone is large in the norm where its slope is
        past = s.skip**2 * g * self._through_norm(self.opened * self.read_slope / self.root)
        at_value = (turned.mT @ y @ turned - s.skip**2 * y).mean((0, 1)) * self.value[1] + past.mean((0, 1))
        # keys, queries and steps turn many features at once: the norm takes out what is along its output
        along = (self.features * self.opened).mT @ self.read / self.read.shape[2]
        lost = s.normed * g * self._alike[:, 0] / (self.root[:, 0].mT * self.root[:, 0])  # (groups, T, T)
        turn = (self.decayed * along).mean(1)
        both = self.value[0] * self.key[0]  # (groups, T, T)
        at_query = (y * (self.decayed @ both[:, None] @ self.decayed.mT)).mean(1)
        at_query = at_query - lost * (turn @ self.key[0] @ turn.mT)
        at_key = (self.decayed.mT @ (y * self.query[0][:, None]) @ self.decayed).mean(1) * self.value[0]
        at_key = at_key - turn.mT @ (lost * self.query[0]) @ turn
        filtered = gains.value * at_value
        filtered = filtered + shared * gains.query * (at_query * self.query[1]).mean(0)
        filtered = filtered + shared * gains.key * (at_key * self.key[1]).mean(0)
        out = gains.gate * at_gate + gains.filter * taken(filtered, s.width, ahead=False)
        sent = (symmetric_root(y.mean(1, keepdims=True)) @ self.noise.gradient).mT  # (groups, heads, draws, T)
        read = self.read[:, :, np.arange(_DRAWS) % self.read.shape[2]]
        at_steps = self._at_steps((sent @ self.mixing) * read, sent * (read @ self.mixing.mT))
        taken_out = (symmetric_root(lost[:, None]) @ self.noise.gradient).mT
        less = self._at_steps(taken_out @ (along * self.mixing), taken_out * (along * self.mixing).sum(-1)[:, :, None])
        return np.asarray(out + gains.step * s.d_head * (at_steps - s.d_head / shared * less))

    @cached_property
    def _alike(self) -> FloatArray:
        """Correlation of tokens over the features of a group after the norm, (groups, 1, T, T)."""
        return np.asarray(second_moment(self.features).mean(1, keepdims=True))

    def _through_norm(self, x: FloatArray) -> FloatArray:
        """E x_i x_j P_i P_j over a head's features, P the norm's projection: features that are large get less back."""
        if not self.s.normed:
            return second_moment(x)
        n = self.features
        once = (x * n**2).mT @ x / x.shape[-2]
        both = second_moment(x * n) * self._alike
        return np.asarray(second_moment(x) + (both - once - once.mT) * self.s.n_groups / self.s.inner)

    def _at_steps(self, columns: FloatArray, rows: FloatArray) -> FloatArray:
        """Gradient kernel at a head's steps before their softplus, (T, T), from draws of that at the scores.

        Args:
            columns, rows: the gradient at the score of token t for token s times that score, summed over t, and over s,
                (groups, heads, draws, T) each.
        """
        change = columns - rows
        later = np.cumsum(change, -1) - change  # over s < r and t >= r, at r
        found = (columns / self.step[:, :, None] - self.rate[:, :, None, None] * later) * self.step_slope[:, :, None]
        found = found.reshape(-1, found.shape[-1])
        return np.asarray(found.T @ found / len(found))


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
        s, z, rate, step, 1 / (1 + np.exp(-before)), (second_moment(value), second_moment(value_slope)),
        (second_moment(key), second_moment(key_slope)), (second_moment(query), second_moment(query_slope)),
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


def symmetric_root(kernel: FloatArray) -> FloatArray:
    """The symmetric square root of matrices, (..., T, T): near kernels have near ones."""
    values, vectors = np.linalg.eigh(kernel)
    return np.asarray((vectors * np.sqrt(np.maximum(values, 0.0))[..., None, :]) @ vectors.mT)

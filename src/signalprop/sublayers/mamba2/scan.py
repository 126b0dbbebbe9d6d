"""The scan of Mamba-2 on a token kernel: expectations over drawn heads, the features of each in closed form.

Steps, keys and queries of a head are few numbers that make a matrix of tokens; given these, its features are many and
independent. So heads are drawn, always the same for a shape, and features are averaged: `docs/theory/components.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from signalprop.kernels.duals import dual_of_kernel, slope_of_kernel
from signalprop.network.moments import FloatArray
from signalprop.sublayers.mamba2.roles import Settings

_HEADS, _AT = 64, 64  # heads that are drawn of so many tokens; of fewer tokens more, so that the work is the same
_FEATURES, _DRAWS = 384, 4


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
        value: (features, T), its columns orthogonal. key, query: (groups, d_state, T).
        value_taps, key_taps, query_taps: likewise (..., width + 1), the last for the filter's bias. gradient: (T, _DRAWS); for steps alone.
        feature: (_DRAWS,) which features of the values go with it.
    """

    heads: FloatArray
    turn: FloatArray
    step: FloatArray
    value: FloatArray
    key: FloatArray
    query: FloatArray
    value_taps: FloatArray
    key_taps: FloatArray
    query_taps: FloatArray
    gradient: FloatArray
    feature: FloatArray


@lru_cache(maxsize=8)
def noise(s: Settings, length: int, uniform: bool) -> Noise:
    """Always the same for these settings and so many tokens. uniform: taps are, else normal."""
    rng = np.random.default_rng(0)
    of_group = s.n_heads // s.n_groups
    wanted = int(min(2048, max(8, _HEADS * (_AT / length) ** 2)))
    some = np.unique(np.linspace(0, of_group - 1, min(of_group, wanted // 4)).round().astype(int))
    n = max(4, wanted // len(some))
    groups = np.arange(n) * s.n_groups // n if s.n_groups > 1 else np.zeros(n, int)

    def taps(*shape: int) -> FloatArray:
        drawn = rng.uniform(-(3**0.5), 3**0.5, (*shape, s.width)) if uniform else rng.standard_normal((*shape, s.width))
        return np.concatenate([drawn, rng.standard_normal((*shape, 1))], -1)

    half = int(max(length, min(4096, _FEATURES * _AT / length)))
    value = np.linalg.qr(rng.standard_normal((half, length)))[0] * half**0.5
    value_taps = taps(half)
    return Noise(
        heads=groups[:, None] * of_group + some,
        turn=np.arange(n) * 2**0.5,
        step=rng.standard_normal((n, len(some), length)),
        value=np.concatenate([value, -value]),
        key=rng.standard_normal((n, s.d_state, length)),
        query=rng.standard_normal((n, s.d_state, length)),
        value_taps=np.concatenate([value_taps, value_taps]),
        key_taps=taps(n, s.d_state),
        query_taps=taps(n, s.d_state),
        gradient=rng.standard_normal((n, len(some), length, _DRAWS)),
        feature=rng.integers(0, 2 * half, (n, len(some), _DRAWS)),
    )


@dataclass(frozen=True)
class Scan:
    """One sublayer at one token kernel.

    Attributes:
        gate: E silu(z_i) silu(z_j), and of the slopes. value: likewise of x. mixing: (groups, heads, T, T) from x to y.
        decayed: the same without the product of key and query. outputs: mean over a group's heads of y y^T, (groups,
        T, T). divisor: what the norm divides by, squared, (groups, T).
    """

    s: Settings
    noise: Noise
    rate: FloatArray
    gate: tuple[FloatArray, FloatArray]
    value: tuple[FloatArray, FloatArray]
    features: FloatArray
    key: tuple[FloatArray, FloatArray]
    query: tuple[FloatArray, FloatArray]
    step: FloatArray
    step_slope: FloatArray
    decayed: FloatArray
    mixing: FloatArray
    outputs: FloatArray
    divisor: FloatArray

    @property
    def normed(self) -> FloatArray:
        """What the gated norm gives, (T, T)."""
        root = np.sqrt(self.divisor)
        return np.asarray((self.outputs * self.gate[0] / (root[:, :, None] * root[:, None, :])).mean(0))

    def back(self, g: FloatArray, gains: Gains) -> FloatArray:
        """Gradient kernel at the stream, from that at what the norm gives; `gains` with fan_out."""
        s, z = self.s, self.noise
        of_group = s.n_heads // s.n_groups
        before = g / np.sqrt(self.divisor[:, :, None] * self.divisor[:, None, :])
        out = gains.gate * (before * self.outputs).mean(0) * self.gate[1]
        y = (before * self.gate[0])[:, None]
        turned = self.mixing + s.skip * np.eye(len(g))
        at_value = (turned.mT @ y @ turned).mean((0, 1)) * self.value[1]
        both = self.value[0] * self.key[0]  # (groups, T, T)
        at_query = (y * (self.decayed @ both[:, None] @ self.decayed.mT)).mean(1)
        at_key = (self.decayed.mT @ (y * self.query[0][:, None]) @ self.decayed).mean(1) * self.value[0]
        shared = of_group * s.d_head
        filtered = gains.value * at_value
        filtered = filtered + shared * gains.query * (at_query * self.query[1]).mean(0)
        filtered = filtered + shared * gains.key * (at_key * self.key[1]).mean(0)
        out = out + gains.filter * taken(filtered, s.width, ahead=False)
        return np.asarray(out + gains.step * s.d_head * self._at_steps(y[:, 0]))

    def _at_steps(self, y: FloatArray) -> FloatArray:
        """Gradient kernel at a head's steps before their softplus, of one feature; drawn."""
        z, length = self.noise, y.shape[-1]
        sent = _root(y)[:, None] @ z.gradient  # (groups, heads, T, draws)
        read = self.features[z.feature]  # (groups, heads, draws, T)
        each = np.einsum("ghtd,ghds->ghdts", sent, read) * self.mixing[:, :, None]
        before = np.cumsum(each, -1) - each  # over s < r
        later = np.tril(before).sum(-2)  # over t >= r, at column r
        direct = each.sum(-2) / self.step[:, :, None]
        found = ((direct - self.rate[:, :, None, None] * later) * self.step_slope[:, :, None]).reshape(-1, length)
        return np.asarray(found.T @ found / len(found))


def scan(s: Settings, kernel: FloatArray, gains: Gains, biases: Gains, *, uniform: bool) -> Scan:
    """The scan of what a sublayer reads, whose kernel is this, (T, T).

    Args:
        uniform: the taps of the filters are, else normal.
    """
    z = noise(s, len(kernel), uniform)
    at_gate = gains.gate * kernel + biases.gate
    variance = np.diagonal(at_gate)
    alike = at_gate / np.maximum(np.sqrt(np.outer(variance, variance)), 1e-300)
    gate = dual_of_kernel("silu", variance, alike), slope_of_kernel("silu", variance, alike)

    def drawn(x: FloatArray, role: str) -> FloatArray:
        return np.asarray(x @ _root(getattr(gains, role) * kernel + getattr(biases, role)).T)

    def filtered(x: FloatArray, taps: FloatArray, role: str) -> tuple[FloatArray, FloatArray]:
        through = _convolved(drawn(x, role), taps[..., :-1] * gains.filter**0.5)
        return _silu(through + taps[..., -1:] * biases.filter**0.5)

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
    values = _second(value)
    turned = mixing + s.skip * np.eye(len(kernel))
    outputs = (turned @ values @ turned.mT).mean(1)
    divisor = np.einsum("gtt,tt->gt", outputs, gate[0]) + s.eps
    return Scan(
        s, z, rate, gate, (values, _second(value_slope)), value, (_second(key), _second(key_slope)),
        (_second(query), _second(query_slope)), step, 1 / (1 + np.exp(-before)), decayed, mixing, outputs, divisor,
    )  # fmt: skip


def taken(kernel: FloatArray, width: int, *, ahead: bool) -> FloatArray:
    """Sum over taps of the kernel, moved by so many tokens each: ahead, or back as gradients go."""
    out, t = np.zeros_like(kernel), len(kernel)
    for k in range(min(width, t)):
        if ahead:
            out[k:, k:] += kernel[: t - k, : t - k]
        else:
            out[: t - k, : t - k] += kernel[k:, k:]
    return out


def _second(x: FloatArray) -> FloatArray:
    """Mean of x x^T over features, (..., features, T) -> (..., T, T)."""
    return np.asarray(x.mT @ x / x.shape[-2])


def _silu(x: FloatArray) -> tuple[FloatArray, FloatArray]:
    """silu and its slope."""
    gate = 1 / (1 + np.exp(-x))
    return x * gate, gate * (1 + x * (1 - gate))


def _convolved(x: FloatArray, taps: FloatArray) -> FloatArray:
    out = np.zeros_like(x)
    for k in range(min(taps.shape[-1], x.shape[-1])):
        out[..., k:] += taps[..., k, None] * x[..., : x.shape[-1] - k]
    return out


def _root(kernel: FloatArray) -> FloatArray:
    """A square root of symmetric matrices, (..., T, T)."""
    values, vectors = np.linalg.eigh(kernel)
    return np.asarray(vectors * np.sqrt(np.maximum(values, 0.0))[..., None, :])

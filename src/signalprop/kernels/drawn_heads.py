"""Attention of hard scores on token kernels, by heads that are drawn: docs/theory/attention.md, "Hard attention".

Where scores have a variance of 16 and more, a row of weights is nearly one key, and which one two rows choose has no
closed form that holds for tokens that are alike: it is averaged over draws of queries, keys and values, which given the
kernel of what they read are Gaussian. As many heads as a layer has make one draw, because what two tokens share then
varies from layer to layer, which the gates after it see; a prediction is the mean of several such networks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from signalprop.network.moments import FloatArray

Single = NDArray[np.float32]  # which is fine enough for draws

HARD = 16.0  # score variance from which heads are drawn
LONGEST = 256  # tokens up to which they are
_HEADS = 128  # that a sublayer's mean is taken over, at least: by several networks


class Shape(NamedTuple):
    """Heads of a sublayer.

    Attributes:
        heads, groups: of queries; of keys. width: features of each. window: keys that a token sees at most, 0: all.
        base, fraction: of rotations; base 0: none. value_norm: on values. shared: keys are the values.
    """

    heads: int
    groups: int
    width: int
    window: int = 0
    base: float = 0.0
    fraction: float = 1.0
    value_norm: bool = False
    shared: bool = False

    @property
    def networks(self) -> int:
        """How many have to be drawn."""
        return -(-_HEADS // self.heads)


class _Normed(NamedTuple):
    """Vectors of root mean square 1, and what they were divided by, (..., T, width) and (..., T, 1)."""

    unit: Single
    size: Single

    def back(self, gradient: Single) -> Single:
        """Before the norm."""
        along = (gradient * self.unit).mean(-1, keepdims=True)
        return np.asarray((gradient - along * self.unit) / self.size, np.float32)


@dataclass(frozen=True)
class DrawnHeads:
    """Drawn heads with QK-norm, in the units of `TokenAttention`.

    Attributes:
        kernel: S of the input, of second moment 1, (T, T). qk: variance of a score. seed: of the draw.
    """

    kernel: FloatArray
    qk: float
    shape: Shape
    causal: bool
    seed: tuple[int, int]

    def same(self, other: DrawnHeads) -> bool:
        """Whether they are the same draw."""
        one, two = ((x.qk, x.shape, x.causal, x.seed) for x in (self, other))
        return one == two and np.array_equal(self.kernel, other.kernel)

    def forward(self) -> FloatArray:
        """Kernel of the heads' output."""
        return self._averaged.copy()

    def backward(self, gradient: FloatArray) -> FloatArray:
        """Gradient kernel at the input, all three paths, from the one at the heads' output: its gradient is drawn."""
        weights, v, scale = self._weights, self._v.unit, self._scale
        drawn = np.random.default_rng((*self.seed, 1)).standard_normal(
            (*weights.shape[:-1], self.shape.width), np.float32
        )
        g = _root(gradient) @ drawn
        to_scores = weights * (g @ _t(v) - (g * (weights @ v)).sum(-1, keepdims=True)) * scale
        to_query = self._q.back(self._turned(to_scores @ self._turned(self._k.unit), -1))
        to_key = self._k.back(self._turned((_t(to_scores) @ self._turned(self._q.unit)).sum(1, keepdims=True), -1))
        to_value = (_t(weights) @ g).sum(1, keepdims=True)
        to_value = self._v.back(to_value) if self.shape.value_norm else to_value
        shared = _gram(to_key + to_value) if self.shape.shared else _gram(to_key) + _gram(to_value)
        return np.asarray((_gram(to_query) + shared) / (self.shape.heads * self.shape.width))

    @cached_property
    def _averaged(self) -> FloatArray:
        return _gram(self._weights @ self._v.unit) / (self.shape.heads * self.shape.width)

    @cached_property
    def _drawn(self) -> tuple[Single, Single, Single]:
        """Queries, keys and values before their norms, (groups, heads of a group, T, width)."""
        s, root = self.shape, _root(self.kernel)
        draw, t = np.random.default_rng(self.seed), len(self.kernel)
        query = root @ draw.standard_normal((s.groups, s.heads // s.groups, t, s.width), np.float32)
        key = root @ draw.standard_normal((s.groups, 1, t, s.width), np.float32)
        return query, key, key if s.shared else root @ draw.standard_normal((s.groups, 1, t, s.width), np.float32)

    @cached_property
    def _q(self) -> _Normed:
        return _normed(self._drawn[0])

    @cached_property
    def _k(self) -> _Normed:
        return _normed(self._drawn[1])

    @cached_property
    def _v(self) -> _Normed:
        value = self._drawn[2]
        return _normed(value) if self.shape.value_norm else _Normed(value, np.ones(1, np.float32))

    @property
    def _scale(self) -> float:
        return float((self.qk / self.shape.width) ** 0.5)

    @cached_property
    def _weights(self) -> Single:
        """A, (groups, heads of a group, T, T)."""
        scores: Single = self._turned(self._q.unit) @ _t(self._turned(self._k.unit)) * self._scale
        at = np.arange(len(self.kernel))
        ahead, window = at[:, None] - at, self.shape.window
        reach = (window - 1 if self.causal else window // 2) if window else len(at)
        scores[..., (ahead > reach) | (ahead < (0 if self.causal else -reach))] = -np.inf
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(-1, keepdims=True)
        return scores

    def _turned(self, x: Single, way: int = 1) -> Single:
        """Rotated by position; way -1: back."""
        n = round(self.shape.fraction * x.shape[-1] / 2) if self.shape.base else 0
        if n == 0:
            return x
        angle = np.arange(x.shape[-2])[:, None] * self.shape.base ** (-np.arange(n) / n)
        cos, sin = np.cos(angle).astype(np.float32), (way * np.sin(angle)).astype(np.float32)
        one, two = x[..., :n], x[..., n : 2 * n]
        return np.concatenate([one * cos - two * sin, two * cos + one * sin, x[..., 2 * n :]], -1)


def _normed(x: Single) -> _Normed:
    size = np.sqrt(np.maximum((x * x).mean(-1, keepdims=True), 1e-300))
    return _Normed(x / size, size)


def _t(x: Single) -> Single:
    return np.swapaxes(x, -1, -2)


def _gram(x: Single) -> FloatArray:
    """Sum over heads and features of the products of two tokens, (T, T)."""
    flat = np.moveaxis(x, 2, 0).reshape(x.shape[2], -1)
    return np.asarray(flat @ flat.T, np.float64)


def _root(kernel: FloatArray) -> Single:
    """R with R Rᵀ = kernel, where it has no negative direction."""
    try:
        found = np.linalg.cholesky(kernel + np.diag(1e-9 * np.diagonal(kernel)))
    except np.linalg.LinAlgError:
        size, axes = np.linalg.eigh(kernel)
        found = axes * np.sqrt(np.maximum(size, 0.0))
    return found.astype(np.float32)

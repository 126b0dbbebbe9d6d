"""Shaped attention beyond the two causal families: without a mask, and for comparison.

As `signalprop.kernels.causal_shaping`; derivations and numerics: `docs/papers/without-shortcuts.md`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from signalprop.errors import InputError
from signalprop.kernels.causal_shaping import ESPA, USPA, AttentionShape, check_uniform, exponential_kernel, lags
from signalprop.network.kinds import kind_of
from signalprop.network.layout import STACKS
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization

# Entries of a matrix that is not negative in exact arithmetic may be below 0 by this much.
_ROUNDING = 1e-10

_REMEMBERED = 1024  # tokens up to which matrices that take O(n^3) to make are kept: 400 MB of 48


def _not_negative(matrix: FloatArray, which: str) -> FloatArray:
    lowest = float(matrix.min())
    if lowest < -_ROUNDING:
        raise InputError(
            f"E-SPA {which}: attention weights down to {lowest:.3g}; a softmax gives none below 0. Take the plain "
            "E-SPA, or a DKS-transformed activation"
        )
    out = np.maximum(matrix, 0.0)
    out.setflags(write=False)
    return out


@dataclass(frozen=True)
class BidirectionalESPA(AttentionShape):
    """E-SPA without a mask: A = Sigma'^1/2 Sigma^-1/2, symmetric roots; it depends on n. O(n^3).

    That no entry is negative is known for infinite n only; here it is checked (docs/papers/without-shortcuts.md).
    """

    zero: float
    pole: float
    causal: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        ESPA(self.zero, self.pole)

    def matrix(self, n: int) -> FloatArray:
        return (_roots if n <= _REMEMBERED else _roots.__wrapped__)(self.zero, self.pole, n)


@lru_cache(maxsize=48)
def _roots(zero: float, pole: float, n: int) -> FloatArray:
    def power(decay: float, exponent: float) -> FloatArray:
        values, vectors = np.linalg.eigh(exponential_kernel(decay, n))
        return np.asarray((vectors * values**exponent) @ vectors.T)

    return _not_negative(power(pole, 0.5) @ power(zero, -0.5), "without a mask")


@dataclass(frozen=True)
class BidirectionalUSPA(AttentionShape):
    """U-SPA without a mask: symmetric roots, one number on the diagonal and one off it; it depends on n."""

    rho: float
    rho_out: float
    causal: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        check_uniform(self.rho, self.rho_out)

    def numbers(self, n: int) -> tuple[float, float]:
        """(diagonal, other entries) of A."""
        single = math.sqrt((1 - self.rho_out) / (1 - self.rho))
        common = math.sqrt((1 + (n - 1) * self.rho_out) / (1 + (n - 1) * self.rho))
        return single + (common - single) / n, max(common - single, 0.0) / n

    def matrix(self, n: int) -> FloatArray:
        diagonal, off = self.numbers(n)
        return np.full((n, n), off) + (diagonal - off) * np.eye(n)

    def rescale(self, n: int) -> FloatArray:
        diagonal, off = self.numbers(n)
        return np.full(n, diagonal + (n - 1) * off)

    def apply(self, x: FloatArray) -> FloatArray:
        diagonal, off = self.numbers(len(x))
        return np.asarray((diagonal - off) * x + off * x.sum(0))

    apply_transposed = apply  # A is symmetric


@dataclass(frozen=True)
class ALiBi(AttentionShape):
    """Causal softmax of the bias -slope (i - j) of one head (Press et al. 2022): not signal-preserving, for comparison.

    A running mean with weights that fall by `decay` = e^-slope per token.
    """

    decay: float
    causal: bool = field(default=True, init=False)

    @staticmethod
    def heads(n_heads: int) -> tuple[ALiBi, ...]:
        """All heads, with the slopes of `alibi_slopes`."""
        return tuple(ALiBi(math.exp(-slope)) for slope in alibi_slopes(n_heads))

    def matrix(self, n: int) -> FloatArray:
        return np.exp(self.log_weights(n))

    def log_weights(self, n: int) -> FloatArray:
        lag = lags(n)
        return np.asarray(np.where(lag >= 0, lag * math.log(self.decay), -math.inf) - np.log(self._sums(n))[:, None])

    def _sums(self, n: int) -> FloatArray:
        return np.asarray(-np.expm1(np.arange(1, n + 1) * math.log(self.decay)) / (1 - self.decay))

    def rescale(self, n: int) -> FloatArray:
        return np.ones(n)

    def _filter(self) -> ESPA:
        return ESPA(0.0, self.decay, gain=1.0)

    def apply(self, x: FloatArray) -> FloatArray:
        return np.asarray(self._filter().apply(x) / self._sums(len(x))[:, None])

    def apply_transposed(self, x: FloatArray) -> FloatArray:
        return self._filter().apply_transposed(x / self._sums(len(x))[:, None])


def alibi_slopes(n_heads: int) -> tuple[float, ...]:
    """Slopes of ALiBi: 2^(-8 h / H) for a power of two H; else those of the next smaller one, then every other of the
    next larger one (Press et al. 2022, section 3 and their released code)."""
    power = 2 ** math.floor(math.log2(n_heads))
    slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2.0 ** (-4 * (2 * h + 1) / power) for h in range(n_heads - power)]
    return tuple(slopes)


def row_shape(p: Parametrization, i: int) -> AttentionShape | None:
    """The matrix that a sublayer's attention is shaped to; None where it is not shaped.

    What U-SPA does about repeated tokens is in its numbers: Shaping's repeats say only how they were chosen.

    Raises:
        InputError: numbers that need negative attention weights, or what a family cannot do.
    """
    if p.shaping.kind == "none" or not kind_of(p, i).attends_itself:
        return None
    causal = STACKS[p.stack[i]] == "decoder"
    before, after, gain = float(p.shape_in[i]), float(p.shape_out[i]), float(p.shape_gain[i])
    if p.shaping.kind == "u-spa":
        if gain:
            raise InputError(f"U-SPA: shape_gain of sublayer {i} is {gain!r}; only E-SPA has one, expected 0")
        return USPA(before, after) if causal else BidirectionalUSPA(before, after)
    if not causal:
        if gain or p.shaping.repeats:
            raise InputError("E-SPA without a mask: shape_gain and repeats are for causal attention; leave them out")
        return BidirectionalESPA(before, after)
    return ESPA(before, after, gain or None, p.shaping.repeats)

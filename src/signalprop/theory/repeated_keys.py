"""A softmax over keys in groups of similar ones, of any sizes, whose logits have a part in common.

The logits of a group of g keys are √(s ρ) y + √(s (1 - ρ)) z_k, so with φ, ψ of `signalprop.theory.softmax` at
variance s (1 - ρ) and means over y, at u + √(s ρ) y

    Φ_g(u) = E_y φ^g     E A_k = ∫ E_y[ψ₁ φ^(g-1)] Φ/Φ_g du     E A_k² = ∫ E_y[ψ₂ φ^(g-1)] Φ/Φ_g du     Φ = Π_b Φ_b

and so on for the rest; ρ = 1 are equal keys. Every key k counts as 1/g_k of a group, so sizes need not be whole
numbers. docs/theory/kernels.md, "Equal keys".
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from signalprop.network.inputs import IntArray
from signalprop.network.moments import FloatArray
from signalprop.theory.softmax import STEP, laplace_on

_AT = np.arange(4)
_REST = [np.delete(_AT, i) for i in _AT]
_LOWEST = -16.0  # of ln φ: what is divided by less has no weight, and is rounding
_FEW = 24  # different sizes up to which each is computed, without interpolation


class Groups(NamedTuple):
    """Of every key k, (n,); Â is its group's weight.

    Attributes:
        mean: E A_k. second: E A_k². pair: E A_k A_k' of two keys of one group.
        jacobian: E A_k² (e_k - A) V (e_k - A) with values that correlate as logits, E (A_k/Â)² (Â (e - Â))² if they are
            equal.
    """

    mean: FloatArray
    second: FloatArray
    pair: FloatArray
    jacobian: FloatArray

    def counted_as_one(self, sizes: FloatArray) -> float:
        """How far two keys of one group count as one in a row with itself: between 0 (as keys of two) and 1 (equal)."""
        others = sizes - 1
        unlike = (1 - float((self.second + others * self.pair).sum())) / (1 - float(sizes @ self.mean**2))
        apart = unlike * self.mean**2
        return float(np.clip(others @ (self.pair - apart) / (others @ (self.second - apart)), 1e-9, 1 - 1e-9))


def softmax_of_groups(variance: float, sizes: FloatArray, rho: float = 1.0) -> Groups:
    """Of keys that each are in a group of so many, at least 1.

    Within .0004 of the softmax of single keys where those of a group are equal and groups of one size (score variances
    up to 16), and of sampling's error, .2 to .4 %, else.

    Args:
        variance: 0 to 1e4. sizes: (n,). rho: ρ, correlation of two logits of a group.
    """
    size, at, weight = _computed_at(sizes)
    keys = np.bincount(at.ravel(), weight.ravel()).astype(np.float64)
    columns = _integrals(math.sqrt(max(variance, 1e-12)), rho, keys, size)
    columns[1:] *= size  # times g these change least with it
    mean, *others = (weight * columns[:, at]).sum(2)
    return Groups(mean, *(column / sizes for column in others))


def _computed_at(sizes: FloatArray) -> tuple[FloatArray, IntArray, FloatArray]:
    """Sizes of groups at which integrals are computed; which of them every key takes, and their weights.

    Few sizes are taken as they are: what a group that has nearly all weight leaves to others is a small difference,
    which interpolation would bury.
    """
    different, which = np.unique(np.round(sizes, 6), return_inverse=True)
    if len(different) <= _FEW:
        return different, which[:, None], np.ones((len(sizes), 1))
    at, weight = _shifts(np.log(sizes))
    return np.exp(STEP * np.arange(at.max() + 1)), at, weight


def _shifts(logs: FloatArray) -> tuple[IntArray, FloatArray]:
    """The four sizes, ln g in steps of the grid, around every ln g, and the weights of the cubic through them."""
    place = logs / STEP
    first = np.maximum(np.floor(place).astype(np.int64) - 1, 0)
    apart = (place - first)[:, None] - _AT
    weight = np.stack([np.prod(apart[:, rest] / (i - rest), axis=1) for i, rest in enumerate(_REST)], axis=1)
    return first[:, None] + _AT, weight


def _integrals(std: float, rho: float, keys: FloatArray, sizes: FloatArray) -> FloatArray:
    """`mean`, `second`, `pair` and `jacobian` at these sizes, (4, sizes), where so many keys have each."""
    log_phi, *psi = laplace_on(std * math.sqrt(1 - rho), std)
    one, two, three, four = np.array(psi) * np.exp(-np.maximum(log_phi, _LOWEST))  # of one key, over φ
    size = sizes[:, None]
    groups, others, both = keys / size[:, 0], size - 1, one**2
    power = np.exp(size * log_phi)
    third = three + rho * others * two * one  # of A_k² (V A)_k; A_k² A V A; A V A
    fourth = four + others * (two**2 + rho * (2 * three * one + (size - 2) * two * both))
    squares = size * (two + rho * others * both)
    of_key = [power * x for x in (one, two, both, third, fourth, squares)]
    found = _over_common(np.stack([np.diff(power, prepend=1.0), *of_key]), math.sqrt(rho) * std)
    log_whole = np.log1p(-np.clip(-np.cumsum(found[0], axis=1), 0.0, 1.0 - 1e-16))  # ln Φ_g
    one, two, both, third, fourth, squares = found[1:] * np.where(log_whole > _LOWEST, np.exp(-log_whole), 0.0)
    whole = STEP * np.exp(groups @ log_whole)
    jacobian = two - third + (fourth + two * (groups @ squares - squares)) / 6
    return np.asarray(np.stack([one, two, both, jacobian]) @ whole)


def _over_common(values: FloatArray, std: float) -> FloatArray:
    """E_y of values at u + std y, for values (..., u) that vanish at both ends."""
    n = values.shape[-1]
    waves = 2 * math.pi * std * np.fft.rfftfreq(2 * n, STEP)
    return np.asarray(np.fft.irfft(np.fft.rfft(values, 2 * n) * np.exp(-0.5 * waves**2), 2 * n)[..., :n])

"""A softmax over keys some of which are the same: groups of keys with one logit each, of any sizes.

A group of g keys of the logit √s z weighs g e^(√s z), so with φ, ψ of `signalprop.theory.softmax` at u + ln g

    E Â_a = ∫ ψ₁ Φ/φ du     E Â_a² = ∫ ψ₂ Φ/φ du     Φ(u) = Π_b φ(u + ln g_b)

and so on for the rest. Every key k counts as 1/g_k of a group, so sizes need not be whole numbers: how many keys are
like k, each by its degree. docs/theory/kernels.md, "Equal keys".
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from signalprop.network.inputs import IntArray
from signalprop.network.moments import FloatArray
from signalprop.theory.attention_rows import HERMITE_W, HERMITE_X
from signalprop.theory.softmax import STEP, laplaces_of

_AT = np.arange(4)
_REST = [np.delete(_AT, i) for i in _AT]
_LOWEST = -30.0  # of ln φ: what is divided by less has no weight


class Groups(NamedTuple):
    """Of the group that each key is in, (n,); Â is a group's weight.

    Attributes:
        mean: E Â. second: E Â². jacobian: E (Â (e - Â))², of the row of diag Â - Â Âᵀ. weighted: s_i/s times that.
    """

    mean: FloatArray
    second: FloatArray
    jacobian: FloatArray
    weighted: FloatArray


def softmax_of_groups(variance: float, spread: float, sizes: Iterable[FloatArray]) -> list[Groups]:
    """For every array of sizes, (n,) each: how many keys are in the group of key k, at least 1.

    Averaged over score variances of mean `variance` and relative variance `spread`, log-normal (five points). Within
    1e-3 of sampling (groups of 1 to 9 keys, score variances up to 16), 1 % for the Jacobian of a third of all keys.

    Args:
        variance: 0 to 1e4.
    """
    log_spread = math.log1p(spread)
    stds = np.sqrt(max(variance, 1e-12) * np.exp(math.sqrt(log_spread) * HERMITE_X - log_spread / 2))
    places = [_shifts(np.log(size)) for size in sizes]
    groups = np.zeros((len(places), 1 + max(int(at.max()) for at, _ in places)))
    for row, (at, weight), size in zip(groups, places, sizes, strict=True):
        np.add.at(row, at, weight / size[:, None])
    mean, second, jacobian = _integrals(laplaces_of(stds), groups)  # (stds, arrays of sizes, shifts) each
    weighted = jacobian * (stds**2 / max(variance, 1e-12))[:, None, None]
    columns = np.einsum("s,cs...->c...", HERMITE_W, np.stack([mean, second, jacobian, weighted]))
    return [
        Groups(*(weight * row[:, at]).sum(2)) for row, (at, weight) in zip(columns.swapaxes(0, 1), places, strict=True)
    ]


def _shifts(logs: FloatArray) -> tuple[IntArray, FloatArray]:
    """The four steps of the grid of u around every shift by ln g, and the weights of the cubic through them."""
    place = logs / STEP
    first = np.maximum(np.floor(place).astype(np.int64) - 1, 0)
    apart = (place - first)[:, None] - _AT
    weight = np.stack([np.prod(apart[:, rest] / (i - rest), axis=1) for i, rest in enumerate(_REST)], axis=1)
    return first[:, None] + _AT, weight


def _integrals(laplace: FloatArray, groups: FloatArray) -> FloatArray:
    """`mean`, `second` and `jacobian` of a group at every shift, (3, stds, rows, shifts), of so many groups at each.

    Args:
        laplace: ln φ and ψ₁ … ψ₄ on one grid of u, (5, stds, u). groups: (rows, shifts).
    """
    shifts = groups.shape[1]
    beyond = np.zeros((*laplace.shape[:2], shifts - 1))
    beyond[0] = laplace[0, :, -1:]
    at = np.arange(shifts)[:, None] + np.arange(laplace.shape[2])
    log_phi, *psi = np.concatenate([laplace, beyond], axis=2)[:, :, at]  # at u and every shift, (stds, shifts, u)
    whole = STEP * np.exp(groups @ log_phi).swapaxes(1, 2)
    one, two, three, four = np.array(psi) * np.exp(-np.maximum(log_phi, _LOWEST))
    second = two @ whole
    of_others = two @ (whole * (groups @ two).swapaxes(1, 2)) - two**2 @ whole  # of Â² times the other groups' ΣÂ²
    jacobian = second - three @ whole + (four @ whole + of_others) / 6
    return np.stack([one @ whole, second, jacobian]).swapaxes(2, 3)

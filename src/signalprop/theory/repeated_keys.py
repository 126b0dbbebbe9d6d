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
from signalprop.theory.softmax import STEP, Laplace, laplace_of

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
    every = [laplace_of(stds[[i]]) for i in range(len(stds))]
    out = []
    for size in sizes:
        at, weight = _shifts(np.log(size))
        groups = np.zeros(int(at.max()) + 1)
        np.add.at(groups, at, weight / size[:, None])
        columns = np.stack([_integrals(laplace, groups) for laplace in every])
        mean, second, jacobian = np.einsum("s,scg->cg", HERMITE_W, columns)
        weighted = (HERMITE_W * stds**2 / max(variance, 1e-12)) @ columns[:, 2]
        out.append(Groups(*((weight * y[at]).sum(1) for y in (mean, second, jacobian, weighted))))
    return out


def _shifts(logs: FloatArray) -> tuple[IntArray, FloatArray]:
    """The four steps of the grid of u around every shift by ln g, and the weights of the cubic through them."""
    place = logs / STEP
    first = np.maximum(np.floor(place).astype(np.int64) - 1, 0)
    apart = (place - first)[:, None] - _AT
    weight = np.stack([np.prod(apart[:, rest] / (i - rest), axis=1) for i, rest in enumerate(_REST)], axis=1)
    return first[:, None] + _AT, weight


def _integrals(laplace: Laplace, groups: FloatArray) -> FloatArray:
    """`mean`, `second` and `jacobian` of a group at every shift, (3, shifts), of so many groups at each."""
    shifts = len(groups)
    values = np.stack(laplace[1:6])  # ln φ and ψ₁ … ψ₄ at u; next, at u and every shift, (5, shifts, u)
    values = np.concatenate([values, np.repeat(np.array([[values[0, -1]], *[[0.0]] * 4]), shifts - 1, axis=1)], axis=1)
    log_phi, *psi = values[:, np.arange(shifts)[:, None] + np.arange(len(laplace.log_phi))]
    whole = STEP * np.exp(groups @ log_phi)
    one, two, three, four = np.array(psi) * np.exp(-np.maximum(log_phi, _LOWEST))
    of_others = two * (groups @ two - two)  # of Â² times the other groups' ΣÂ²
    second = two @ whole
    jacobian = second - three @ whole + (four + of_others) @ whole / 6
    return np.stack([one @ whole, second, jacobian])

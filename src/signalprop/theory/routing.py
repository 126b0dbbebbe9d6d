"""Routing over random experts: what the weights of the chosen ones are on average, of one token and of two.

Logits are Gaussian: variance s^2, correlation rho between two tokens, independent over experts.
`docs/theory/components.md` has the derivations, and the measured error of the tables that are made here.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.polynomial import chebyshev
from numpy.typing import NDArray

from signalprop.network.moments import Array, FloatArray
from signalprop.network.products import product
from signalprop.theory.remembered import remembered

_ANGLES = 32  # on a circle through two independent draws: correlations cos(2 pi j / 32)
_NUMBERS, _CIRCLES = 2**20, 2048  # logits of a table; circles that are enough for few experts
_AT_ONCE = 8192  # entries whose powers are held
_DEGREE = 10  # of the polynomial in the angle
_STEP = 0.125  # of the grid in log s^2
_SMALLEST, _LARGEST = -6.0, 6.0  # log s^2: beyond, weights are equal, or one expert has it all


class Router(NamedTuple):
    """How a token chooses its experts.

    Attributes:
        n_experts, top_k: how many there are, and how many a token has.
        scores: `softmax` over all experts, or a `sigmoid` or the root of a softplus (`sqrtsoftplus`) of every logit.
        normalised: the weights of the chosen are divided by their sum.
        n_groups, top_groups: experts stand in groups, and only those of the best groups can be chosen; a group is as
            good as its best expert (softmax) or its best two together (sigmoid), as in DeepSeek-V2 and V3.
    """

    n_experts: int
    top_k: int
    scores: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    normalised: bool = True
    n_groups: int = 1
    top_groups: int = 1


class Weights(NamedTuple):
    """Averages over routers, each summed over experts; of two tokens whose logits have some correlation.

    Attributes:
        product: w_e(x) w_e(y). slope: sum over j of dw_e/dl_j(x) dw_e/dl_j(y), what goes back through the router.
        shared: 1 where both tokens choose the expert.
    """

    product: Array
    slope: Array
    shared: Array


def weights(router: Router, variance: Array, correlation: Array) -> Weights:
    """The averages of two tokens; at correlation 1 those of one token.

    Args:
        variance: of the logits. correlation: of the logits of two tokens; arrays that broadcast.

    Interpolated linearly in the logarithm of the variance between tables that are drawn once; deterministic.
    """
    return _weights(router, np.asarray(variance, float), np.asarray(correlation, float))


@remembered(results=256, entries=256**2)  # 1.6 MB each at most: the way back reads the logits of the way forward
def _weights(router: Router, variance: FloatArray, correlation: FloatArray) -> Weights:
    with np.errstate(divide="ignore"):
        place = np.clip(np.log(variance), _SMALLEST, _LARGEST) / _STEP
    low, high = (math.floor(x) if math.isfinite(x) else 0 for x in (place.min(), place.max()))
    parts = [(np.clip(1 - np.abs(place - number), 0, None), number) for number in range(low, high + 2)]
    tables = [(part, _table(router, number)) for part, number in parts if part.any()]
    if place.size == 1:
        tables = [(np.ones(place.shape), sum(part.item() * table for part, table in tables))]
    at = np.asarray(2 / np.pi * np.arccos(np.clip(np.broadcast_arrays(correlation, variance)[0], -1.0, 1.0)) - 1)
    out = sum(part * _polynomials(table, at) for part, table in tables)
    return Weights(*(float(one) if one.ndim == 0 else one for one in out))


def _polynomials(table: FloatArray, x: FloatArray) -> FloatArray:
    """Polynomials in x, (degree + 1, 3) and (...) -> (3, ...), so many entries at a time that their powers are few."""
    out, flat = np.empty((3, x.size)), x.ravel()
    for start in range(0, x.size, _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        powers = np.empty((len(table), len(flat[part])))
        powers[0], powers[1:] = 1.0, flat[part]
        out[:, part] = product(table.T, np.multiply.accumulate(powers, axis=0, out=powers))
    return out.reshape(3, *x.shape)


def load_variation(router: Router, shared: Array, tokens: int) -> Array:
    """Standard deviation of the experts' loads over their mean, among so many tokens; root mean square over networks.

    Args:
        shared: experts that two tokens both choose, averaged over their pairs.
    """
    share = router.n_experts / router.top_k
    overlap = share * shared / router.top_k - 1
    return np.sqrt(np.maximum((share - 1) / tokens + (1 - 1 / tokens) * overlap, 0.0))


def chosen(router: Router, logits: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(weights, a, b) of every expert, (..., experts): 0 where it is not chosen.

    The router's Jacobian dw_e/dl_j is a_j (delta_ej - b_e) for scores of single logits, w_e (delta_ej - b_j) for a
    softmax; either way the products of two tokens' Jacobians, summed, are sum_e a a' (1 - b - b' + b.b').
    """
    softmax = router.scores == "softmax"
    if softmax:
        scores = np.exp(logits - logits.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
    else:
        slope = 1 / (1 + np.exp(-logits))
        scores = slope if router.scores == "sigmoid" else np.sqrt(np.logaddexp(0, logits))
    chosen = scores * _mask(router, scores)
    total = chosen.sum(-1, keepdims=True) if router.normalised else 1.0
    w = chosen / total
    if softmax:
        return w, w, w if router.normalised else scores
    steep = chosen * (1 - scores) if router.scores == "sigmoid" else slope * (chosen > 0) / (2 * scores)
    return w, steep / total, w if router.normalised else np.zeros_like(w)


def _mask(router: Router, scores: FloatArray) -> NDArray[np.bool_]:
    """Which experts a token chooses."""
    if router.n_groups > 1:
        grouped = scores.reshape(*scores.shape[:-1], router.n_groups, -1)
        best = np.sort(grouped, -1)[..., -1 if router.scores == "softmax" else -2 :].sum(-1)
        least = np.sort(best, -1)[..., -router.top_groups, None]
        scores = (grouped * (best >= least)[..., None]).reshape(scores.shape)
    if router.top_k == router.n_experts:
        return np.ones(scores.shape, np.bool_)
    least = np.partition(scores, -router.top_k, -1)[..., -router.top_k, None]
    return np.asarray(scores >= least)


@lru_cache(maxsize=512)
def _table(router: Router, index: int) -> FloatArray:
    """Coefficients of the three averages in the angle's place from -1 to 1, (degree + 1, 3), at log s^2 = index * step.

    Every circle through two independent draws holds `_ANGLES` tokens, and every two of them are a sample.
    """
    e = router.n_experts
    n = min(max(_NUMBERS // (_ANGLES * e), 16), _CIRCLES)
    rng = np.random.default_rng(0)
    axes = (rng.standard_normal((2, n, 1, e)) * np.exp(index * _STEP / 2)).astype(np.float32)
    turn = (2 * np.pi * np.arange(_ANGLES, dtype=np.float32)[:, None] / _ANGLES).astype(np.float32)
    w, a, b = chosen(router, np.cos(turn) * axes[0] + np.sin(turn) * axes[1])
    square = a @ a.swapaxes(-1, -2)
    both = square * (1 + (square if b is a else b @ b.swapaxes(-1, -2)))
    steep = _of_pairs(a * b, a)
    slope = both.mean(0, dtype=np.float64) - steep - steep.T
    hit = np.asarray(w > 0, np.float32)
    pairs = np.stack([_of_pairs(w, w), slope, _of_pairs(hit, hit)])
    at = np.arange(_ANGLES)
    found = np.stack([pairs[:, at, at - shift].mean(-1) for shift in range(_ANGLES // 2 + 1)])
    angles = np.linspace(-1, 1, len(found))
    weight = np.ones(len(found))
    weight[0] = 10.0  # one token: many more samples, which variances need
    fitted: Any = chebyshev.chebfit(angles, found, _DEGREE, w=weight)
    powers = [chebyshev.cheb2poly(column) for column in fitted.T]  # without zeros at the end
    return np.stack([np.pad(column, (0, _DEGREE + 1 - len(column))) for column in powers], axis=1)


def _of_pairs(x: NDArray[Any], y: NDArray[Any]) -> FloatArray:
    """Sums over experts for every two tokens of a circle, on average over circles, (angles, angles)."""
    return np.asarray(np.tensordot(x, y, ((0, 2), (0, 2))), np.float64) / len(x)

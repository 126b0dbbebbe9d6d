"""Rows of attention weights by their length: moments of their softmax, what rotary positions leave, bounds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from signalprop.network.moments import FloatArray
from signalprop.network.products import diagonal, pairs
from signalprop.theory.row_overlaps import (
    STRIDE,
    by_position,
    horner,
    lagrange,
    steady,
    steepness,
    within_table,
)
from signalprop.theory.softmax import (
    Spline,
    linear_response,
    node_moments,
    node_variances,
    response_to_key_variance,
)

_RATIO = 1.6  # of row lengths that are tabulated, the first ones apart
_PAIRED = 5  # columns that are of two rows


class Averages(NamedTuple):
    """A kernel K with M K and M K M^T, its diagonal, and per row the mean of that and how far its keys lie apart."""

    kernel: FloatArray
    mean: FloatArray
    double_mean: FloatArray
    per_token: FloatArray
    mean_square: FloatArray
    spread: FloatArray


class Rows(NamedTuple):
    """Rows of weights.

    Attributes:
        second: P, E sum_j A_ij^2. jacobian: J, E |diag A - A A^T|^2. Both (T,).
        with_others: coefficients of x ... x^5 of ln(overlap of weights)/s, of a row with another of as many keys and
            the same s; (5, T).
        favour: d ln E A_k and d ln E A_k^2, by d ln of the variance of key k's score about the row's mean, (2, T).
        response: D: how far a row's output follows the query, (T,).
    """

    second: FloatArray
    jacobian: FloatArray
    with_others: FloatArray
    favour: FloatArray
    response: FloatArray

    def log_overlap(self, x: FloatArray) -> FloatArray:
        """ln of the overlap over s, at places x of two rows, (..., T, T)."""
        found = of_rows(self.with_others, x)
        found *= x
        return found

    def slope(self, s: FloatArray, x: FloatArray) -> FloatArray:
        """Derivative of ln of the overlap by the covariance of scores: what the overlap of Jacobians is over it."""
        found = of_rows(np.stack(by_position(self.with_others)), x)
        found *= steepness(s[..., None], x)
        return found


@lru_cache(maxsize=32)
def knots(length: int) -> tuple[int, ...]:
    """Row lengths from 2 to `length`, by ratios of at most _RATIO."""
    n = max(2, math.ceil(math.log(max(length, 2) / 2) / math.log(_RATIO)) + 1)
    return tuple(sorted(set(np.round(np.geomspace(2, max(length, 2), n)).astype(int).tolist())))


@lru_cache(maxsize=32)
def _tabulated(lengths: tuple[int, ...]) -> FloatArray:
    """Cubics in the place of a score variance, of every row length; (lengths, intervals, 4, all coefficients)."""
    splines = [(steady(n), _alone(n)) for n in lengths]
    return np.stack([np.concatenate([x.coefficients for x in of_length], axis=2) for of_length in splines])


def _alone(length: int) -> Spline:
    """`favour` and `response` of `Rows` where two rows are tabulated; two keys are always as far from their mean."""
    favour = response_to_key_variance(length, STRIDE) if length > 2 else np.zeros((len(node_variances()), 2))
    return Spline(np.column_stack([favour, linear_response(node_moments(length, STRIDE))])[::STRIDE])


def rows_of(score_variance: FloatArray, row_length: FloatArray, longest: int | None = None) -> Rows:
    """Rows that see n_i keys with score variance s_i.

    Both may have leading axes, which all fields of the result then have too, in the place of their last.
    Exact at some 15 row lengths, by cubics in ln n in between (error below .1 %); where all are of one length at that,
    but for fractional lengths, which lie between those up to `longest`.
    """
    if score_variance.ndim > 1:
        flat = rows_of(score_variance.ravel(), row_length.ravel(), longest)
        return Rows(*(x.reshape(*x.shape[:-1], *score_variance.shape) for x in flat))
    one_length = np.ptp(row_length) == 0 and longest is None
    lengths = (max(int(row_length[0]), 2),) if one_length else knots(longest or int(row_length.max()))
    n, s = np.maximum(row_length, 2), np.maximum(score_variance, 1e-12)
    at, weight = lagrange(np.log(n), np.log(lengths))
    within, beyond = map(np.asarray, within_table(s))
    index, offset = steady(lengths[0]).place(within)
    cubic = np.einsum("tq,tqpc->pct", weight, _tabulated(lengths)[at, index[:, None]])
    columns = np.asarray(horner(cubic, offset))
    columns[:, row_length < 2] = 0.0
    found, alone = columns[:_PAIRED], np.maximum(columns[_PAIRED:], 0.0)
    # x = 1: a row with itself; beyond the table J and 1 - P fall as one over the root of s
    second, falls = np.minimum(np.exp(within * found.sum(0)) / row_length, 1.0), np.sqrt(beyond)
    jacobian = second * sum(by_position(found)) * steepness(within, 1.0) / falls
    return Rows(1 - (1 - second) / falls, jacobian, found, alone[:2], alone[2] / beyond)


def favoured(apart: FloatArray, mean: FloatArray, favour: FloatArray) -> FloatArray:
    """(apart / its mean over the row)^favour; rows that all see the same, one row here, have their mean exponent."""
    ratio = np.divide(apart, mean[..., None], out=np.ones_like(apart), where=mean[..., None] > 1e-9)
    exponent = favour if apart.shape[-2] == favour.shape[-1] else favour.mean(keepdims=True)
    power = np.log(np.maximum(ratio, 1e-9, out=ratio), out=ratio)
    power *= exponent[..., None]
    return np.asarray(np.exp(power, out=power))


def by_pairs(n: FloatArray) -> FloatArray:
    """Of rows of n keys, one over the ordered pairs of different ones; 0 for a single key."""
    return np.asarray((n > 1) / np.maximum(n * (n - 1), 1.0))


_BLOCK = 64  # lags whose cosines are products of two, of a block's start and of places within it
_AT_ONCE = 16384  # entries that are computed at a time: what is in between stays in the cache
_WIDE = 384  # columns from which NumPy's sums down the rows, column by column, lose more than a loop costs


def of_rows(coefficients: FloatArray, x: FloatArray) -> FloatArray:
    """Polynomials in x, (..., T, T), with different coefficients for every row: (coefficients, ..., T), ascending."""
    if x.ndim > 2:
        return of_rows(coefficients.reshape(len(coefficients), -1), x.reshape(-1, x.shape[-1])).reshape(x.shape)
    whole, rows = np.empty(x.shape), _AT_ONCE // max(x.shape[1], 1) + 1
    for start in range(0, len(x), rows):
        part = slice(start, start + rows)
        at, out, by = x[part], whole[part], coefficients[:, part, None]
        np.multiply(at, by[-1], out=out)
        for c in by[-2:0:-1]:
            out += c
            out *= at
        out += by[0]
    return whole


def running(values: FloatArray, axis: int) -> FloatArray:
    """Sums up to every entry along an axis of a matrix: `np.cumsum`, where memory runs the other way row by row."""
    lines = values if axis == 0 else values.T
    if lines.shape[1] < _WIDE or abs(lines.strides[0]) <= abs(lines.strides[1]):
        return np.asarray(np.cumsum(values, axis))
    out = np.empty(lines.shape)
    out[0] = lines[0]
    for before, line, here in zip(out, lines[1:], out[1:], strict=False):
        np.add(before, line, out=here)
    return out if axis == 0 else out.T


def mirrored(values: FloatArray) -> FloatArray:
    """The symmetric matrix with this upper triangle, block by block."""
    out, side = np.empty(values.shape), 128
    for start in range(0, len(out), side):
        part = slice(start, start + side)
        out[part, start:] = values[part, start:]
        for left in range(start + side, len(out), side):
            other = slice(left, left + side)
            out[other, part] = values[part, other].T
        square = values[part, part]
        np.copyto(out[part, part], square.T, where=np.tri(len(square), dtype=bool))
    return out


def turns(length: int, d_head: int, base: float, fraction: float) -> Iterator[NDArray[np.complex128]]:
    """e^(i lag theta) by lag, (length,), of one frequency of rotary positions after the other."""
    rotated = 2 * round(fraction * d_head / 2)
    blocks, within = 1j * np.arange(0, length, _BLOCK), 1j * np.arange(_BLOCK)
    for theta in base ** (-np.arange(0, rotated, 2) / max(rotated, 1)):
        yield np.outer(np.exp(theta * blocks), np.exp(theta * within)).ravel()[:length]


@lru_cache(maxsize=8)
def rotation(length: int, d_head: int, base: float, fraction: float, causal: bool) -> tuple[FloatArray, FloatArray]:
    """Rotary positions: (rho, omega), rho[D] = mean cosine of the angles between positions D apart, and
    omega[i] = the share of a common key vector's score that row i keeps (mean of rho over pairs of its keys)."""
    total, frequencies = np.zeros(length), 0
    for turn in turns(length, d_head, base, fraction):
        total += turn.real
        frequencies += 1
    share = 2 * frequencies / d_head
    rho = 1 - share + share * total / max(frequencies, 1)
    n = np.arange(1, length + 1, dtype=np.float64)
    # over the pairs of a row of n keys: (n rho_0 + 2 sum_D (n - D) rho_D) / n^2
    omega = (2 * (n * np.cumsum(rho) - np.cumsum(rho * (n - 1))) - n * rho[0]) / n**2
    return rho, omega if causal else np.full(length, omega[-1])


def held(kernel: FloatArray) -> FloatArray:
    """A kernel whose diagonal is not negative: scores beyond what the expansion holds for can make it so."""
    per_token = diagonal(kernel)
    if per_token.min() >= 0:
        return kernel
    root = np.sqrt(np.maximum(per_token, 0.0))
    most = pairs(root, root)
    return np.asarray(np.clip(kernel, -most, most))

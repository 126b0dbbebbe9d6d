"""Arithmetic on variances and their logarithms, for plain floats (fast) and for arrays (sweeps)."""

from __future__ import annotations

import math
from itertools import repeat
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from signalprop.network.moments import Array, FloatArray
from signalprop.results.series import NO_SIGNAL as NO_SIGNAL

LARGEST = 600.0  # of a logarithm whose exponential, and products of it with ordinary numbers, are doubles
HELD = 27.6  # of the log size at which a branch is computed that reads a stream without a norm; beyond it is scaled
_NUMBER = (float, int)


@overload
def log(value: float) -> float: ...
@overload
def log(value: FloatArray) -> FloatArray: ...
@overload
def log(value: Array) -> Array: ...
def log(value: Array) -> Array:
    """Natural logarithm; NO_SIGNAL for 0."""
    if isinstance(value, float):
        return math.log(value) if value > 0 else NO_SIGNAL
    if (value > 0).all():
        return np.asarray(np.log(value))
    with np.errstate(divide="ignore"):
        return np.asarray(np.maximum(np.log(value), NO_SIGNAL))


def log_add(x: Array, y: Array) -> Array:
    """log(exp(x) + exp(y)); for plain floats an order of magnitude faster than NumPy's."""
    if isinstance(x, float) and isinstance(y, float):
        return x + math.log1p(math.exp(y - x)) if x > y else y + math.log1p(math.exp(x - y))
    return np.asarray(np.logaddexp(x, y))


def exp(x: Array) -> Array:
    """Exponential of a number that is not large; 0 for what underflows."""
    return math.exp(x) if isinstance(x, float) else np.asarray(np.exp(x))


def safe_exp(x: Array) -> Array:
    """exp, held where the result is a normal double, so that extreme streams saturate instead of overflowing."""
    if isinstance(x, float):
        return math.exp(x if -LARGEST < x < LARGEST or x != x else math.copysign(LARGEST, x))
    return np.asarray(np.exp(np.minimum(np.maximum(x, -LARGEST), LARGEST)))


def within(x: Array, bound: float) -> Array:
    """x, held between -bound and bound."""
    if isinstance(x, float):
        return x if -bound < x < bound or x != x else math.copysign(bound, x)  # what is not a number stays so
    return np.asarray(np.clip(x, -bound, bound))


def rows_of(columns: FloatArray, row_type: type[tuple[Any, ...]] = tuple) -> list[Any]:
    """All rows of columns that are stacked, (columns, ..., rows): plain floats without another axis.

    `row_type` is what a row becomes: a NamedTuple, past its constructor, which takes three times as long.
    """
    rows = np.moveaxis(columns, -1, 0)
    return list(map(tuple.__new__, repeat(row_type), rows.tolist() if rows.ndim == 2 else rows))


def to_fill(n: int, lead: tuple[int, ...]) -> Any:
    """A column that is filled in row by row: a list of floats, into which Python writes three times as fast as into an
    array, or an array (n, *lead)."""
    return np.empty((n, *lead)) if lead else [0.0] * n


def row(column: FloatArray, i: int | NDArray[np.intp]) -> Array:
    """Entry i of the last axis: a plain float without another axis. Several entries: an array."""
    if column.ndim == 1 and isinstance(i, int):
        return column.item(i)
    value = column[..., i]
    return value if value.ndim else float(value)


def plain(value: Array) -> Array:
    """A float for anything without axes (NumPy's scalars slow plain arithmetic down), else the array."""
    return float(value) if isinstance(value, _NUMBER) or np.ndim(value) == 0 else np.asarray(value, dtype=np.float64)


def correlation(shared: Array, total: Array) -> Array:
    """shared / total within [-1, 1], and 0 where total is 0."""
    if isinstance(total, float) and isinstance(shared, float):
        r = shared / total if total > 0 else 0.0
        return r if -1.0 < r < 1.0 or r != r else math.copysign(1.0, r)
    bottom = np.asarray(total, float)
    if (bottom > 0).all():
        out = shared / bottom
    else:
        top, bottom = np.broadcast_arrays(np.asarray(shared, float), bottom)
        out = np.divide(top, bottom, out=np.zeros(top.shape), where=bottom > 0)
    return np.asarray(np.minimum(np.maximum(out, -1.0), 1.0))


def inverse_roots(diagonal: FloatArray) -> FloatArray:
    """1 / sqrt of every entry, by which a norm divides; 0 below 1e-300, where nothing is left that it could bring to
    size 1, and whose inverse a double may not hold."""
    if diagonal.min() > 1e-300:
        return np.asarray(1.0 / np.sqrt(diagonal))
    good = diagonal > 1e-300
    return np.divide(1.0, np.sqrt(np.where(good, diagonal, 1.0)), out=np.zeros(diagonal.shape), where=good)

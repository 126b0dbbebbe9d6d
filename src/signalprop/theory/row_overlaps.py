"""How much two rows of attention weights have in common, at any score variance: two softmaxes of correlated logits.

Of rows of n weights whose logits have variance s, those of like places covariance c, and otherwise none:

    Λ_V = n E Σ A B        Λ_J = n E tr J_A J_B = ∂Λ_V/∂c        J_A = diag A - A Aᵀ

Both are known at c = 0 and at c = s, where the two rows are one; in between ln Λ_V is a polynomial of degree 5 in
x, c = 0 … s being x = 0 … 1, of which four coefficients follow from the ends and two are tabulated
(`row_overlaps.json`, by quadrature: `python -m benchmarks.two_rows`). Derivation and measured error:
docs/theory/attention.md, "Overlap of two rows".
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from signalprop.files.storage import read_json
from signalprop.network.inputs import IntArray
from signalprop.network.moments import Array, FloatArray
from signalprop.theory.attention_rows import HERMITE_W, HERMITE_X
from signalprop.theory.log_arithmetic import exp
from signalprop.theory.remembered import remembered
from signalprop.theory.softmax import Spline, node_moments, node_variances, vanishing

FILE = Path(__file__).with_name("row_overlaps.json")
STRIDE = 3
NODES = node_variances()[::STRIDE]  # score variances at which two rows are tabulated
_MOST = float(NODES[-1])

# Where averages over fluctuating scores are known in x, and what makes polynomials of them. Below x = 0 rows avoid
# what the other likes: as far as the mean of c may go.
LEAST = -0.3
DEGREE = 7
_AT = LEAST + (1 - LEAST) * (1 - np.cos(np.pi * np.arange(DEGREE + 1) / DEGREE)) / 2
_POLYNOMIAL = np.linalg.inv(_AT[:, None] ** np.arange(DEGREE + 1))
# Gauss-Hermite rule of five points by three.
_THREE = np.array([-math.sqrt(3), 0.0, math.sqrt(3)])
_ANGLE, _SIZE = (x.ravel() for x in np.meshgrid(HERMITE_X, _THREE))
_WEIGHT = np.outer([1 / 6, 2 / 3, 1 / 6], HERMITE_W).ravel()


def within_table(s: Array) -> tuple[Array, Array]:
    """(s or the largest that is tabulated, how many times larger s is): beyond it rows are one key each, so that the
    overlap is that of c/s, and its slope in c falls as 1/s."""
    within = min(s, _MOST) if isinstance(s, float) else np.minimum(s, _MOST)
    return within, s / within


def position(s: Array, c: Array) -> Array:
    """x, from 0 at c = 0 to 1 at c = s: (√(s+4) - √(s+4-c)) / (√(s+4) - 2).

    Two sharp rows part like √(s - c), over a width of about 4; where scores are small, x is c/s.
    """
    root = (s + 4.0) ** 0.5
    return c / (root + (s + 4.0 - c) ** 0.5) * ((root + 2.0) / s)


def share(s: Array, x: Array) -> Array:
    """c/s, of x: the inverse of `position`."""
    root = (s + 4.0) ** 0.5
    return x * (2.0 * root - x * (root - 2.0)) / (root + 2.0)


def hermite_data(
    s: FloatArray, second: FloatArray, jacobian: FloatArray, n: int
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """(slope at 0, value at 1, slope at 1) of ln(Λ_V)/s in x, from P and J of one row; n at least 2."""
    root = np.sqrt(s + 4.0)
    least = np.where(s > 0, s, 1.0)
    whole = np.where(s > 0, np.log(n * second) / least, 1 - 1 / n)
    return (
        (1 - second) ** 2 * n / (n - 1) * 2 * root / (root + 2),
        whole,
        jacobian / second * 4 / (root + 2),
    )


def hermite(first: FloatArray, whole: FloatArray, last: FloatArray) -> FloatArray:
    """Coefficients of the cubic with these ends, ascending."""
    return np.stack([0 * first, first, 3 * whole - 2 * first - last, first + last - 2 * whole])


def bends(x: FloatArray) -> tuple[FloatArray, FloatArray]:
    """What is added to the cubic of ln Λ_V: nothing at the ends, and no slope there."""
    even = (x * (1 - x)) ** 2
    return even, even * x


_EVEN, _ODD = np.array([0, 0, 1, -2, 1, 0.0]), np.array([0, 0, 0, 1, -2, 1.0])  # coefficients of `bends`


@lru_cache(maxsize=1)
def _tabulated() -> tuple[FloatArray, FloatArray]:
    """ln of the lengths; what is added to the cubics, (2, nodes, lengths)."""
    found = read_json(FILE)
    return np.log(found["lengths"]), np.array([found["even"], found["odd"]])


@remembered(results=8, entries=4096)  # positions of a grid stay where they are
def lagrange(x: FloatArray, knots: FloatArray) -> tuple[IntArray, FloatArray]:
    """The (at most four) knots around every x, and the weights of the polynomial through them; (len(x), 4) both."""
    order = min(4, len(knots))
    start = np.clip(np.searchsorted(knots, x) - 2, 0, len(knots) - order)
    at = start[:, None] + np.arange(order)
    near = knots[at]
    other = ~np.eye(order, dtype=bool)
    factor = (x[:, None, None] - near[:, None, :]) / np.where(other, near[:, :, None] - near[:, None, :], 1.0)
    return at, np.prod(factor, axis=2, where=other)


@lru_cache(maxsize=256)
def steady(length: int) -> Spline:
    """Coefficients of x … x⁵ of ln(Λ_V)/s, by score variance, of rows of so many weights whose scores do not fluctuate.

    Measured against quadrature, 2 to 1e6 weights: Λ_V within 0.2 % for s up to 11, 0.6 % at 20, 1 % at 39, 3.5 % at
    729; Λ_J within 0.6, 1.3, 2.5 and 10 %. Down to c = -s/2 within .02 of Λ_V.
    """
    if length == 1:
        return Spline(np.zeros((len(NODES), 5)))
    m = node_moments(length)
    second, jacobian = m.second[::STRIDE], m.jacobian[::STRIDE]
    knots, rest = _tabulated()
    at, weight = lagrange(np.log([length]), knots)
    even, odd = rest[:, :, at[0]] @ weight[0] / np.maximum(NODES, 1e-12)
    cubic = hermite(*hermite_data(NODES, second, jacobian, length))
    coefficients = np.concatenate([cubic, np.zeros((2, len(NODES)))]) + np.outer(_EVEN, even) + np.outer(_ODD, odd)
    return Spline(coefficients[1:].T)


def horner(coefficients: Iterable[Array], x: Array) -> Array:
    """A polynomial in x; coefficients ascending."""
    *rest, found = coefficients
    for c in reversed(rest):
        found = found * x + c
    return found


def log_overlap(s: Array, c: Array, length: int) -> Array:
    """ln Λ_V of rows whose scores do not fluctuate; c from -s/2 to s. Error: `steady`."""
    s, beyond = within_table(s + 1e-12)
    x = position(s, c / beyond)
    return s * x * horner(steady(length)(s), x)


class Polynomials(NamedTuple):
    """Of two rows of one length whose scores fluctuate: coefficients in x, ascending, by score variance.

    Attributes:
        value: of ln(E Λ_V)/s. jacobian: of ln(E Λ_J / `vanishing`). weighted: of E c Λ_J/(s E Λ_J).
    """

    value: Spline
    jacobian: Spline
    weighted: Spline


ALONE = np.outer([0.0, -700.0, 0.0], np.arange(DEGREE + 1) == 0)  # coefficients of rows of one weight: its slope is 0


@lru_cache(maxsize=256)
def fluctuating(length: int, spread: float) -> Polynomials:
    """Averages over pairs of rows. Against random heads within their standard errors of 1 to 2 % where heads have 32
    features or more; with 8 features E Λ_V is 5 %, E c Λ_J 11 % low at s = 4.

    Args:
        spread: v, the relative variance of the score variance of a row. Two rows of covariance c between their scores
            have s_i s_j of logarithmic variance 2 v (1 + c²/s²) and a cosine c_ij/√(s_i s_j) = tanh(z), z normal with
            variance v/2, and both covary.
    """
    if length == 1:
        return Polynomials(*(Spline(np.tile(column, (len(NODES), 1))) for column in ALONE))
    s = np.maximum(NODES, 1e-6)[:, None, None]
    r = share(s, _AT[:, None])
    log_spread = math.log1p(spread)
    half = math.sqrt(log_spread / 2)
    cosine = np.tanh(np.arctanh(np.minimum(r, 1 - 1e-12)) + r * half**2 / 2 + half * _ANGLE)
    size = s * np.exp(half * (_SIZE + r * _ANGLE) - log_spread / 2)
    c = size * cosine
    c = np.minimum(c + s * r - (c @ _WEIGHT)[..., None], size)  # E c is what it is
    first, *rest = steady(length)(size)
    x = position(size, c)
    slope = horner([first, *((k + 2) * y for k, y in enumerate(rest))], x)
    value = size * x * horner([first, *rest], x)
    jacobian = np.exp(value) * slope * (np.sqrt(size + 4) + 2) / (2 * np.sqrt(size + 4 - c))
    mean = jacobian @ _WEIGHT
    columns = (
        np.log1p(np.expm1(value) @ _WEIGHT) / s[..., 0],
        np.log(mean / vanishing(s[..., 0])),
        (c * jacobian) @ _WEIGHT / (s[..., 0] * mean),
    )
    return Polynomials(*(Spline(y @ _POLYNOMIAL.T) for y in columns))


def log_value(s: Array, c: Array, length: int, spread: float) -> Array:
    """ln(E Λ_V) of two rows of one length, of numbers or arrays; c from LEAST s to s."""
    s, beyond = within_table(s + 1e-12)
    return s * horner(fluctuating(length, spread).value(s), position(s, c / beyond))


def slopes(s: Array, c: Array, length: int, spread: float) -> tuple[Array, Array]:
    """(E Λ_J, E c Λ_J), as `log_value`."""
    within, beyond = within_table(s + 1e-12)
    x, found = position(within, c / beyond), fluctuating(length, spread)
    jacobian = horner(found.jacobian(within), x)
    overlap = exp(jacobian) * vanishing(within) / beyond
    return overlap, s * horner(found.weighted(within), x) * overlap

"""How much two rows of attention weights have in common, at any score variance: two softmaxes of correlated logits.

Of rows of n weights whose logits have variance s, those of like places covariance c, and otherwise none:

    Λ_V = n E Σ A B        Λ_J = n E tr J_A J_B = ∂Λ_V/∂c        J_A = diag A - A Aᵀ

Both are known at c = 0 and at c = s, where the two rows are one; in between ln Λ_V is a polynomial of degree 5 in
x, c = 0 … s being x = 0 … 1, of which four coefficients follow from the ends and two are tabulated
(`row_overlaps.json`, by quadrature: `python -m benchmarks.two_rows`). Derivation and measured error:
docs/theory/attention.md, "Overlap of two rows".
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import numpy as np

from signalprop.files.storage import read_json
from signalprop.network.inputs import IntArray
from signalprop.network.moments import Array, FloatArray
from signalprop.theory.log_arithmetic import exp
from signalprop.theory.remembered import remembered
from signalprop.theory.softmax import Spline, node_moments, node_variances

FILE = Path(__file__).with_name("row_overlaps.json")
STRIDE = 3
NODES = node_variances()[::STRIDE]  # score variances at which two rows are tabulated
_MOST = float(NODES[-1])
LEAST = -0.3  # of c/s: rows avoid what the other likes, as far as the mean of c may go


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


def steepness(s: Array, x: Array) -> Array:
    """s dx/dc of `position`."""
    root = (s + 4.0) ** 0.5
    return (root + 2.0) / (2.0 * (root - x * (root - 2.0)))


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


# Coefficients of what is added to the cubic of ln Λ_V: x²(1-x)², and x times it; nothing at the ends, and no slope.
_EVEN, _ODD = np.array([0, 0, 1, -2, 1, 0.0]), np.array([0, 0, 0, 1, -2, 1.0])


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
    """Coefficients of x … x⁵ of ln(Λ_V)/s, by score variance, of rows of so many weights.

    Measured against quadrature, 2 to 1e6 weights: Λ_V within 0.2 % for s up to 11, 0.6 % at 20, 1 % at 39, 3.5 % at
    729; Λ_J within 0.6, 1.3, 2.5 and 10 %. Down to c = -s/2 within .02 of Λ_V.
    """
    if length == 1:
        return Spline(np.zeros((len(NODES), 5)))
    m = node_moments(length, STRIDE)
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
    """ln Λ_V, of numbers or arrays; c from LEAST s to s. Error: `steady`."""
    s, beyond = within_table(s + 1e-12)
    x = position(s, c / beyond)
    return s * x * horner(steady(length)(s), x)


def jacobian_overlap(s: Array, c: Array, length: int) -> Array:
    """Λ_J, the slope of Λ_V in c; as `log_overlap`."""
    s, beyond = within_table(s + 1e-12)
    x, coefficients = position(s, c / beyond), steady(length)(s)
    log_value = s * x * horner(coefficients, x)
    return exp(log_value) * horner(by_position(coefficients), x) * steepness(s, x) / beyond


def by_position(coefficients: Iterable[Array]) -> list[Array]:
    """Of the derivative of x times a polynomial, ascending."""
    return [k * c for k, c in enumerate(coefficients, 1)]

"""Dual activations: what an element-wise non-linearity does to a pair of correlated Gaussians.

For x, y zero-mean Gaussian with variance s and correlation r, and an activation f:

    m = E f(x),   Q(r) = E f(x) f(y),   Qdot(r) = E f'(x) f'(y).

ReLU, leaky ReLU, squared ReLU, GeLU, erf and the identity have closed forms (Transformers Get Stable, v1
Table 17, for ReLU and GeLU; docs/theory/components.md for the others). Every other activation is expanded
in Hermite polynomials (Mehler's formula): with b_n the coefficients of f', Qdot(r) = sum b_n^2 r^n and, by
Stein's identity, Q(r) = m^2 + s sum b_n^2 r^(n+1) / (n+1). The coefficients come from Gauss-Legendre panels
on z > 0 and z < 0 separately: unlike a Gauss-Hermite rule they keep their order when f has a kink at 0 and
when s is large. The mass that the truncated series misses is put into its last term, so r = 1 is exact and
Q never exceeds Q(1).

Measured error against two-dimensional quadrature, relative to Q(1) and Qdot(1). SiLU, tanh, GeLU-tanh,
quick GeLU, mish, softplus, sigmoid: below 2e-14 for s <= 10, |r| <= 0.999, and below 1e-9 for s <= 10000,
|r| <= 0.99. Between 0.99 and 1 with s > 10 the truncation shows, at r = 0.999: tanh, the worst, 4e-9 and
2e-6 at s = 100, 4e-5 and 8e-3 at s = 1000; SiLU below 1e-12 at s = 100, 3e-9 and 8e-6 at s = 1000. ELU,
whose slope has a kink: below 1e-13 for s <= 100, |r| <= 0.99; at r = 0.999, 2e-10 and 7e-7 at s = 10.
Transformed activations d (f(a x + b) + c) at s = 1, r = 0.7, the worst of tanh: 1e-13 for a = 10, 2e-9 for a = 20,
2e-5 for a = 50; without a shift they are as f at variance a^2 s.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from signalprop.errors import InputError
from signalprop.network.activations import Activation, activation
from signalprop.network.closed_forms import Five
from signalprop.network.moments import Array, FloatArray
from signalprop.network.products import product


class Dual(NamedTuple):
    """Dual activation at variance s and correlation r; floats, or arrays of the broadcast shape."""

    mean: Array
    second_moment: Array
    covariance_moment: Array
    slope_second_moment: Array
    slope_moment: Array


class CentralDual(NamedTuple):
    """As Dual, with Q(1) - m^2 and Q(r) - m^2, computed without cancellation, in place of Q(1) and Q(r)."""

    mean: Array
    variance: Array
    covariance: Array
    slope_second_moment: Array
    slope_moment: Array


_NODES_PER_PANEL = 24


# Number of Hermite terms and panel edges on [0, 12]. Panels must resolve the highest Hermite function (wave
# number sqrt(terms)) and the width 1/sqrt(s) of f around 0; the last rule therefore narrows towards 0, down
# to s of 1e6.
_RULES: tuple[tuple[int, tuple[float, ...]], ...] = (
    (128, tuple(2.0 * i for i in range(7))),
    (512, tuple(1.0 * i for i in range(13))),
    (2048, (0.0, *(2.0**-k for k in range(10, 1, -1)), *(0.5 * i for i in range(1, 25)))),
)


# Mass of f' outside the series, relative to Qdot(1), above which the next rule is tried.
_ENOUGH = 1e-12


@lru_cache(maxsize=len(_RULES) + 1)
def _table(rule: int, terms: int) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Nodes z > 0, weights times Gaussian density, and the even and odd rows of He_n(z) / sqrt(n!)."""
    edges = _RULES[rule][1]
    node, weight = np.polynomial.legendre.leggauss(_NODES_PER_PANEL)
    left, width = np.array(edges[:-1])[:, None], np.diff(edges)[:, None]
    z = (left + width * (node + 1) / 2).ravel()
    # The square root of the density stays inside the recurrence, so that no polynomial overflows.
    root_density = np.exp(-z * z / 4) / (2 * np.pi) ** 0.25
    rows = np.empty((terms, z.size))
    rows[0], rows[1] = root_density, z * root_density
    for n in range(1, terms - 1):
        rows[n + 1] = (z * rows[n] - math.sqrt(n) * rows[n - 1]) / math.sqrt(n + 1)
    return z, (width * weight / 2).ravel() * root_density, np.ascontiguousarray(rows[::2]), rows[1::2].copy()


class Hermite(NamedTuple):
    """Hermite expansions of one activation at several variances: E f, Var f and E f'^2, shape (k,), and the
    coefficients b_n of f', shape (terms, k)."""

    mean: FloatArray
    variance: FloatArray
    slope_second_moment: FloatArray
    slopes: FloatArray


def hermite(act: Activation, s: FloatArray, most: int = _RULES[-1][0]) -> Hermite:
    """The expansion of f' at variances s, (k,), in as few terms as leave 1e-12 of E f'^2, and 2,048 at most.

    Args:
        most: terms that are asked for, where the last rule gives more; at least as many as the others give.
    """
    for rule in range(len(_RULES)):
        terms = min(_RULES[rule][0], max(most, _RULES[-2][0]))
        z, weight, even, odd = _table(rule, terms)
        half = z[:, None] * np.sqrt(s)
        x, density = np.stack([half, -half]), weight * even[0]
        plus, minus = act.derivative(x)
        slopes = np.empty((terms, len(s)))
        slopes[::2] = product(even, weight[:, None] * (plus + minus))
        slopes[1::2] = product(odd, weight[:, None] * (plus - minus))
        slope_second_moment = density @ (plus**2 + minus**2)
        if (slope_second_moment - (slopes**2).sum(0) <= _ENOUGH * slope_second_moment).all():
            break
    f_plus, f_minus = act.function(x)
    mean = density @ (f_plus + f_minus)
    variance = density @ ((f_plus - mean) ** 2 + (f_minus - mean) ** 2)
    return Hermite(mean, variance, slope_second_moment, slopes)


class _Expansion(NamedTuple):
    mean: float
    variance: float
    slope_second_moment: float
    coefficients: FloatArray  # shape (2, terms): of Q(r) - m^2 and of Qdot(r), in powers of r


@lru_cache(maxsize=512)
def _expansion(act: Activation, s: float) -> _Expansion:
    """Hermite expansion of one activation at one variance."""
    h = hermite(act, np.array([s]))
    squared = h.slopes[:, 0] ** 2
    missing = max(float(h.slope_second_moment[0]) - float(squared.sum()), 0.0)
    order = np.arange(squared.size + 2)

    slope, central = np.zeros((2, len(order)))
    slope[:-2], slope[-2] = squared, missing
    central[1:-1] = s * squared / order[1:-1]
    # The true tail lies between 0 and s * missing / order: the bounds keep the rounding of `variance` out.
    central[-1] = min(max(float(h.variance[0]) - float(central.sum()), 0.0), s * missing / order[-1])
    mass = np.maximum(central, s * slope)[::-1].cumsum()[::-1]
    used = max(2, int(np.count_nonzero(mass > 1e-18 * mass[0])))
    coefficients = np.stack([central, slope])[:, :used]
    return _Expansion(float(h.mean[0]), float(central.sum()), float(h.slope_second_moment[0]), coefficients)


_FEW = 8  # correlations that are raised to all powers one by one


def _power_series(coefficients: FloatArray, r: FloatArray) -> FloatArray:
    """sum_n coefficients[i, n] r^n, shape (2, len(r)): matrix product with low powers, Horner over blocks."""
    rows, terms = coefficients.shape
    largest = float(np.abs(r).max(initial=0.0))
    if largest < 1:  # terms that no r can lift above rounding
        terms = min(terms, 2 + int(-44 / math.log(max(largest, 1e-30))))
    if r.size <= _FEW:
        return np.asarray(coefficients[:, :terms] @ r ** np.arange(terms)[:, None])
    block = max(2, math.isqrt(terms))
    blocks = -(-terms // block)
    padded = np.zeros((rows, blocks * block))
    padded[:, :terms] = coefficients[:, :terms]
    powers = np.empty((block, r.size))
    powers[0] = 1.0
    for i in range(1, block):
        np.multiply(powers[i - 1], r, out=powers[i])
    step = powers[-1] * r
    partial = product(padded.reshape(rows * blocks, block), powers).reshape(rows, blocks, r.size)
    total: FloatArray = partial[:, -1]
    for i in range(blocks - 2, -1, -1):
        total = total * step + partial[:, i]
    return total


def _by_expansion(act: Activation, s: FloatArray, r: FloatArray) -> Five:
    """The five central moments for flat arrays; the coefficients are computed once per distinct variance."""
    out = np.empty((5, r.size))
    if s.min() == s.max():
        groups: list[tuple[float, Any]] = [(float(s[0]), slice(None))]
    else:
        values, inverse, counts = np.unique(s, return_inverse=True, return_counts=True)
        members = np.split(np.argsort(inverse, kind="stable"), np.cumsum(counts)[:-1])
        groups = list(zip(values.tolist(), members, strict=True))
    for value, where in groups:
        e = _expansion(act, value)
        out[0, where], out[1, where], out[3, where] = e.mean, e.variance, e.slope_second_moment
        out[2::2, where] = _power_series(e.coefficients, r[where])
    return out[0], out[1], out[2], out[3], out[4]


def central_dual(name: str, variance: Array, correlation: Array) -> CentralDual:
    """Mean, variance and covariance of f(x), f(y), and the second moments of f', for a Gaussian pair.

    Args:
        name: a key of ACTIVATIONS.
        variance: s >= 0 of the zero-mean Gaussian pair; float or array.
        correlation: r in [-1, 1]; float or array that broadcasts against `variance`.

    Returns:
        CentralDual; floats for float input, else arrays of the broadcast shape.

    Raises:
        InputError: unknown name, negative or non-finite variance, correlation outside [-1, 1].
    """
    if isinstance(variance, float) and isinstance(correlation, float):
        return CentralDual(*_of_floats(name, variance, correlation))
    act = activation(name)
    s, r = np.broadcast_arrays(np.asarray(variance, float), np.asarray(correlation, float))
    shape = s.shape
    s, r = s.ravel(), r.ravel()
    _check_pair(name, bool(np.all(np.isfinite(s) & (s >= 0))), bool(np.all(np.abs(r) <= _MOST)))
    r = np.clip(r, -1.0, 1.0)
    if r.size == 0:
        empty = np.zeros(shape)
        return CentralDual(empty, empty, empty, empty, empty)
    mean, var, cov, slope2, slope = act.closed_form(s, r) if act.closed_form else _by_expansion(act, s, r)
    equal = r == 1
    cov = np.where(equal, var, np.clip(cov, -var, var))
    slope = np.where(equal, slope2, np.clip(slope, -slope2, slope2))
    found = [np.asarray(x) for x in (mean, var, cov, slope2, slope)]
    return CentralDual(*(x.reshape(shape) if shape else float(x[0]) for x in found))


_MOST = 1 + 1e-9  # of a correlation: rounding


def _of_floats(name: str, s: float, r: float) -> Five:
    """`central_dual` of two plain floats, a tenth of the time that arrays of one entry take."""
    act = activation(name)
    _check_pair(name, 0 <= s < math.inf, -_MOST <= r <= _MOST)
    held = min(max(r, -1.0), 1.0)
    if act.closed_form:
        mean, var, cov, slope2, slope = act.closed_form(s, held)
    else:
        mean, var, slope2, coefficients = _expansion(act, s)
        (cov,), (slope,) = _power_series(coefficients, np.array([held])).tolist()
    if r >= 1:
        return mean, var, var, slope2, slope2
    cov = cov if -var < cov < var else math.copysign(var, cov)
    return mean, var, cov, slope2, slope if -slope2 < slope < slope2 else math.copysign(slope2, slope)


def _check_pair(name: str, variances: bool, correlations: bool) -> None:
    if not variances:
        raise InputError(f"activation {name!r}: variance is negative or not finite; expected variances >= 0")
    if not correlations:
        raise InputError(f"activation {name!r}: correlation outside [-1, 1]; divide the covariance by the variance")


def dual(name: str, variance: Array, correlation: Array) -> Dual:
    """Moments E f, E f^2, E f(x) f(y), E f'^2, E f'(x) f'(y) of an activation over a zero-mean Gaussian pair.

    Same arguments, shapes and errors as `central_dual`. Exact at r = 1 and at s = 0, and free of overflow for
    s up to at least 1e6. Closed forms are accurate to rounding; for the expansion see the module docstring.
    """
    if isinstance(variance, float) and isinstance(correlation, float):
        mean, var, cov, slope2, slope = _of_floats(name, variance, correlation)
    else:
        mean, var, cov, slope2, slope = central_dual(name, variance, correlation)
    return Dual(mean, var + mean**2, cov + mean**2, slope2, slope)

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
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.network.moments import Array, FloatArray

__all__ = ["Activation", "register"]

Function = Callable[[FloatArray], FloatArray]


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


Five = tuple[Array, Array, Array, Array, Array]
ClosedForm = Callable[[Array, Array], Five]  # of two plain floats, or of two arrays of one shape


@dataclass(frozen=True, slots=True)
class Activation:
    """An element-wise activation.

    Attributes:
        name: the name it is registered under.
        function: f, vectorised over float arrays.
        derivative: f', vectorised over float arrays.
        closed_form: (s, r) -> the fields of CentralDual, or None for the Hermite expansion.
    """

    name: str
    function: Function
    derivative: Function
    closed_form: ClosedForm | None = None


# --- closed forms ---------------------------------------------------------------------------------

_OF_FLOATS = SimpleNamespace(sqrt=math.sqrt, arcsin=math.asin)


def _functions(x: Array) -> Any:
    """sqrt and arcsin for arrays, or for plain floats, for which NumPy's take many times as long."""
    return _OF_FLOATS if isinstance(x, float) else np


def _leaky_closed(slope: float) -> ClosedForm:
    """f = slope * x + (1 - slope) * relu(x), with E x relu(y) = r s / 2."""
    a, b = slope, 1 - slope

    def closed(s: Array, r: Array) -> Five:
        xp = _functions(s)
        mean = b * xp.sqrt(s / (2 * np.pi))
        linear = a * a + a * b
        half = np.pi / 2 + xp.arcsin(r)
        relu_covariance = s / (2 * np.pi) * (xp.sqrt((1 - r) * (1 + r)) - 1 + r * half)
        variance = s * linear + b * b * s / 2 * (1 - 1 / np.pi)
        covariance = s * linear * r + b * b * relu_covariance
        return mean, variance, covariance, linear + b * b / 2 + 0 * s, linear + b * b * half / (2 * np.pi)

    return closed


def _relu2_closed(s: Array, r: Array) -> Five:
    xp = _functions(s)
    root = xp.sqrt((1 - r) * (1 + r))
    half = np.pi / 2 + xp.arcsin(r)
    covariance = s * s / (2 * np.pi) * (3 * root * r + half * (1 + 2 * r * r) - np.pi / 2)
    return s / 2, 1.25 * s * s, covariance, 2 * s, 2 * s / np.pi * (root + r * half)


def _gelu_closed(s: Array, r: Array) -> Five:
    xp = _functions(s)
    one, two = 1 + s, 1 + 2 * s
    square = (1 + s * (1 - r)) * (1 + s * (1 + r))  # no cancellation for large s
    delta = xp.sqrt(square)
    mean = s / xp.sqrt(2 * np.pi * one)
    share = s / one
    covariance = (
        s
        / (4 * np.pi)
        * (np.pi * r + 2 * r * xp.arcsin(r * share) + 2 * share * ((s * (1 - r * r) + 1 + r * r) / delta - 1))
    )
    variance = s / (2 * np.pi) * (np.pi / 2 - share + xp.arcsin(share) + 2 * share / xp.sqrt(two))
    slope_second = 0.25 + (xp.arcsin(share) + share * (5 * s + 3) / (two * xp.sqrt(two))) / (2 * np.pi)
    slope = 0.25 + (xp.arcsin(r * share) + r * share * (2 * square + one) / (square * delta)) / (2 * np.pi)
    return mean, variance, covariance, slope_second, slope


def _erf_closed(s: Array, r: Array) -> Five:
    xp = _functions(s)
    one = 1 + 2 * s
    share = 2 * s / one
    variance = 2 / np.pi * xp.arcsin(share)
    covariance = 2 / np.pi * xp.arcsin(r * share)
    slope = 4 / np.pi / xp.sqrt((1 + 2 * s * (1 - r)) * (1 + 2 * s * (1 + r)))
    return 0 * s, variance, covariance, 4 / np.pi / xp.sqrt(1 + 4 * s), slope


def _identity_closed(s: Array, r: Array) -> Five:
    return 0 * s, s, r * s, 1 + 0 * s, 1 + 0 * s * r


# --- Hermite expansion ----------------------------------------------------------------------------

_EDGE = 12.0  # |z| beyond which the Gaussian weight is below 1e-31
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


@lru_cache(maxsize=len(_RULES))
def _table(rule: int) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    """Nodes z > 0, weights times Gaussian density, and the even and odd rows of He_n(z) / sqrt(n!)."""
    terms, edges = _RULES[rule]
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


def hermite(act: Activation, s: FloatArray) -> Hermite:
    """The expansion of f' at variances s, (k,), in as few terms as leave 1e-12 of E f'^2 (and 2,048 at most)."""
    for rule in range(len(_RULES)):
        z, weight, even, odd = _table(rule)
        x = z[:, None] * np.sqrt(s)
        density = weight * even[0]
        plus, minus = act.derivative(x), act.derivative(-x)
        slopes = np.empty((_RULES[rule][0], len(s)))
        slopes[::2] = even @ (weight[:, None] * (plus + minus))
        slopes[1::2] = odd @ (weight[:, None] * (plus - minus))
        slope_second_moment = density @ (plus**2 + minus**2)
        if (slope_second_moment - (slopes**2).sum(0) <= _ENOUGH * slope_second_moment).all():
            break
    f_plus, f_minus = act.function(x), act.function(-x)
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

    slope = np.append(squared, [missing, 0.0])
    central = np.zeros_like(slope)
    central[1:-1] = s * squared / order[1:-1]
    # The true tail lies between 0 and s * missing / order: the bounds keep the rounding of `variance` out.
    central[-1] = min(max(float(h.variance[0]) - float(central.sum()), 0.0), s * missing / order[-1])
    mass = np.maximum(central, s * slope)[::-1].cumsum()[::-1]
    used = max(2, int(np.count_nonzero(mass > 1e-18 * mass[0])))
    coefficients = np.stack([central, slope])[:, :used]
    return _Expansion(float(h.mean[0]), float(central.sum()), float(h.slope_second_moment[0]), coefficients)


def _power_series(coefficients: FloatArray, r: FloatArray) -> FloatArray:
    """sum_n coefficients[i, n] r^n, shape (2, len(r)): matrix product with low powers, Horner over blocks."""
    rows, terms = coefficients.shape
    largest = float(np.abs(r).max(initial=0.0))
    if largest < 1:  # terms that no r can lift above rounding
        terms = min(terms, 2 + int(-44 / math.log(max(largest, 1e-30))))
    block = max(2, math.isqrt(terms))
    blocks = -(-terms // block)
    padded = np.zeros((rows, blocks * block))
    padded[:, :terms] = coefficients[:, :terms]
    powers = np.empty((block, r.size))
    powers[0] = 1.0
    for i in range(1, block):
        np.multiply(powers[i - 1], r, out=powers[i])
    step = powers[-1] * r
    partial = (padded.reshape(rows * blocks, block) @ powers).reshape(rows, blocks, r.size)
    total: FloatArray = partial[:, -1]
    for i in range(blocks - 2, -1, -1):
        total = total * step + partial[:, i]
    return total


def _by_expansion(act: Activation, s: FloatArray, r: FloatArray) -> Five:
    """The five central moments for flat arrays; the coefficients are computed once per distinct variance."""
    out = np.empty((5, r.size))
    if s.min() == s.max():
        groups = [(float(s[0]), np.arange(s.size))]
    else:
        values, inverse, counts = np.unique(s, return_inverse=True, return_counts=True)
        members = np.split(np.argsort(inverse, kind="stable"), np.cumsum(counts)[:-1])
        groups = list(zip(values.tolist(), members, strict=True))
    for value, where in groups:
        e = _expansion(act, value)
        out[0, where], out[1, where], out[3, where] = e.mean, e.variance, e.slope_second_moment
        out[2::2, where] = _power_series(e.coefficients, r[where])
    return out[0], out[1], out[2], out[3], out[4]


# --- the public functions -------------------------------------------------------------------------


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
    act = activation(name)
    if act.closed_form and isinstance(variance, float) and isinstance(correlation, float):
        return _of_floats(name, act.closed_form, float(variance), float(correlation))
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


def _of_floats(name: str, closed_form: ClosedForm, s: float, r: float) -> CentralDual:
    """`central_dual` of two plain floats, a tenth of the time that arrays of one entry take."""
    _check_pair(name, 0 <= s < math.inf, abs(r) <= _MOST)
    r = min(max(r, -1.0), 1.0)
    mean, var, cov, slope2, slope = closed_form(s, r)
    if r == 1:
        return CentralDual(mean, var, var, slope2, slope2)
    return CentralDual(mean, var, min(max(cov, -var), var), slope2, min(max(slope, -slope2), slope2))


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
    mean, var, cov, slope2, slope = central_dual(name, variance, correlation)
    return Dual(mean, var + mean**2, cov + mean**2, slope2, slope)


def activation(name: str) -> Activation:
    """The activation of that name or Hugging Face alias; InputError listing the names if there is none.

    Two names take numbers: `leaky_relu(slope)`, and `transformed(name, a, b, c, d)`, which is d (f(a x + b) + c), as
    `signalprop.kernels.transforms` makes them. For an f with a kink b has to be 0.
    """
    try:
        return _with_numbers(name) if isinstance(name, str) and "(" in name else ACTIVATIONS[name]
    except (KeyError, TypeError):
        known = ", ".join(sorted(ACTIVATIONS))
        raise InputError(
            f"unknown activation {name!r:.80}; expected one of: {known}; add your own with "
            "signalprop.network.activations.register"
        ) from None


# Numbers after a name in brackets, and what they may be. Beyond these the expansion no longer resolves the function,
# or its moments leave the doubles.
_NUMBERS: dict[str, tuple[tuple[str, float, float], ...]] = {
    "leaky_relu": (("slope", 0.0, 1e6),),
    "transformed": (
        ("input scale", 1e-6, 100.0),
        ("input shift", 0.0, 100.0),
        ("output shift", 0.0, 1e6),
        ("output scale", 1e-6, 1e6),
    ),
}
_LONGEST = 400


def numbers_of(name: str) -> tuple[str, tuple[float, ...]]:
    """(activation inside, its numbers) of `transformed(...)`, (`leaky_relu`, slope) of `leaky_relu(...)`; else the name
    and nothing.

    Raises:
        InputError: the wrong number of numbers, what is none, or one beyond what moments are known for.
    """
    if "(" not in name:
        return name, ()
    kind, _, rest = name.strip().partition("(")
    kind = kind.strip()
    parts = [part.strip() for part in rest.removesuffix(")").split(",")]
    wanted = _NUMBERS.get(kind, ())
    n = len(wanted)
    # numbers hold no commas, so all that comes before them is the activation inside
    right = len(parts) == n if kind == "leaky_relu" else len(parts) > n
    if not wanted or not right or not rest.endswith(")") or len(name) > _LONGEST:
        raise InputError(
            f"unknown activation {name!r:.80}; expected leaky_relu(slope) or transformed(name, input scale, input "
            "shift, output shift, output scale)"
        )
    numbers = []
    for (what, least, most), part in zip(wanted, parts[-n:], strict=True):
        try:
            number = float(part)
        except ValueError:
            number = math.nan
        if not least <= abs(number) <= most:
            raise InputError(
                f"activation {name!r:.80}: {what} is {part!r:.40}; expected a number of size {least:g} to {most:g}"
            )
        numbers.append(number)
    return kind if kind == "leaky_relu" else ",".join(parts[:-n]), tuple(numbers)


def kinked(name: str) -> bool:
    """Whether an activation, or the one inside it, has a kink at 0: a derivative, first or second, that jumps there."""
    inside, numbers = numbers_of(name)
    return kinked(inside) if len(numbers) > 1 else inside in _KINKED or ACTIVATIONS[inside].name in _KINKED


@lru_cache(maxsize=256)
def _with_numbers(name: str) -> Activation:
    inside, numbers = numbers_of(name)
    if len(numbers) == 1:
        slope = numbers[0]
        return Activation(
            name,
            lambda x: np.where(x > 0, x, slope * x),
            lambda x: np.where(x > 0, 1.0, slope),
            _leaky_closed(slope),
        )
    act = activation(inside)
    scale, shift, lift, gain = numbers
    if shift != 0 and kinked(inside):
        raise InputError(f"activation {name!r:.80} moves a kink away from 0: no dual is known; give input shift 0")
    closed = None if act.closed_form is None or shift != 0 else _transformed_closed(act.closed_form, scale, lift, gain)
    return Activation(
        name,
        lambda x: gain * (act.function(scale * x + shift) + lift),
        lambda x: gain * scale * act.derivative(scale * x + shift),
        closed,
    )


def _transformed_closed(inside: ClosedForm, scale: float, lift: float, gain: float) -> ClosedForm:
    """Of d (f(a x) + c), from the closed form of f."""

    def closed(s: Array, r: Array) -> Five:
        mean, variance, covariance, slope2, slope = inside(scale**2 * s, r)
        back = (gain * scale) ** 2
        return gain * (mean + lift), gain**2 * variance, gain**2 * covariance, back * slope2, back * slope

    return closed


@typed
def register(name: str, function: Function, derivative: Function) -> Activation:
    """Add an activation under `name` (replacing one of that name) and return it.

    Args:
        name: how `dual` and every model description will call it.
        function: f, vectorised over float arrays, smooth except for a kink at 0, growing at most like a
            polynomial.
        derivative: f', vectorised likewise.

    Raises:
        InputError: `derivative` is not the derivative of `function`, or one of them is not finite.
    """
    points = np.array([-7.3, -2.9, -1.1, -0.31, 0.23, 0.87, 1.9, 5.7])
    h = 1e-5
    with np.errstate(all="ignore"):
        difference = (function(points + h) - function(points - h)) / (2 * h)
        slope = derivative(points)
        agree = np.abs(slope - difference) <= 1e-5 * (1 + np.abs(slope) + np.abs(function(points)))
    if not np.all(agree):  # also catches NaN
        at = float(points[int(np.argmin(agree))])
        raise InputError(
            f"activation {name!r}: derivative does not match function at x = {at}; "
            "expected finite values with derivative(x) = d function(x) / dx; correct one of the two"
        )
    ACTIVATIONS[name] = Activation(name, function, derivative)
    return ACTIVATIONS[name]


# --- the registry ---------------------------------------------------------------------------------


def _erf(x: FloatArray) -> FloatArray:
    return np.fromiter(map(math.erf, np.ravel(x).tolist()), float, np.size(x)).reshape(np.shape(x))


def _sigmoid(x: FloatArray) -> FloatArray:
    return np.asarray(0.5 * (1 + np.tanh(x / 2)))


def _normal_density(x: FloatArray) -> FloatArray:
    return np.asarray(np.exp(-x * x / 2) / math.sqrt(2 * math.pi))


def _softplus(x: FloatArray) -> FloatArray:
    return np.asarray(np.logaddexp(0.0, x))


def _gelu_tanh_inner(x: FloatArray) -> FloatArray:
    return np.asarray(np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _gelu_tanh_slope(x: FloatArray) -> FloatArray:
    t = _gelu_tanh_inner(x)
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)


def _swish_slope(x: FloatArray) -> FloatArray:
    y = _sigmoid(x)
    return y * (1 + x * (1 - y))


def _mish_slope(x: FloatArray) -> FloatArray:
    t = np.tanh(_softplus(x))
    return np.asarray(t + x * (1 - t * t) * _sigmoid(x))


def _elu(x: FloatArray) -> FloatArray:
    return np.asarray(np.where(x > 0, x, np.expm1(np.minimum(x, 0))))


_BUILT_IN = (
    Activation("relu", lambda x: np.maximum(x, 0), lambda x: np.heaviside(x, 0.5), _leaky_closed(0.0)),
    Activation(
        "leaky_relu",
        lambda x: np.where(x > 0, x, 0.01 * x),
        lambda x: np.where(x > 0, 1.0, 0.01),
        _leaky_closed(0.01),
    ),
    Activation("relu2", lambda x: np.maximum(x, 0) ** 2, lambda x: 2 * np.maximum(x, 0), _relu2_closed),
    Activation(
        "gelu",
        lambda x: x * 0.5 * (1 + _erf(x / math.sqrt(2))),
        lambda x: 0.5 * (1 + _erf(x / math.sqrt(2))) + x * _normal_density(x),
        _gelu_closed,
    ),
    Activation("erf", _erf, lambda x: 2 / math.sqrt(math.pi) * np.exp(-x * x), _erf_closed),
    Activation("identity", lambda x: x, np.ones_like, _identity_closed),
    Activation("gelu_tanh", lambda x: 0.5 * x * (1 + _gelu_tanh_inner(x)), _gelu_tanh_slope),
    Activation("quick_gelu", lambda x: x * _sigmoid(1.702 * x), lambda x: _swish_slope(1.702 * x)),
    Activation("silu", lambda x: x * _sigmoid(x), _swish_slope),
    Activation("tanh", np.tanh, lambda x: 1 - np.tanh(x) ** 2),
    Activation("sigmoid", _sigmoid, lambda x: 0.25 * (1 - np.tanh(x / 2) ** 2)),
    Activation("mish", lambda x: x * np.tanh(_softplus(x)), _mish_slope),
    Activation("softplus", _softplus, _sigmoid),
    Activation("elu", _elu, lambda x: np.exp(np.minimum(x, 0))),
)
_ALIASES = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "swish": "silu",
    "relu_squared": "relu2",
    "linear": "identity",
}
_KINKED = ("relu", "leaky_relu", "relu2", "elu")
ACTIVATIONS: dict[str, Activation] = {a.name: a for a in _BUILT_IN}
ACTIVATIONS.update({alias: ACTIVATIONS[name] for alias, name in _ALIASES.items()})

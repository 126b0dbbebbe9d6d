"""Moments of a softmax over Gaussian logits: finite-length integrals, tabulated once per length and interpolated.

With a_i = exp(√s z_i), z_i standard normal and A = a / Σa, every moment is a one-dimensional integral over
u = ln t, because (Σa)^-n = ∫ t^(n-1)/(n-1)! e^(-tΣa) dt splits the sum into independent factors:

    E ΣA²   = L ∫ ψ₂ φ^(L-1) du                  φ(u)  = E exp(-e^y)
    E ΣA³   = L/2 ∫ ψ₃ φ^(L-1) du                ψn(u) = E e^(ny) exp(-e^y),   y = u + √s z
    E (ΣA²)² = 1/6 ∫ [L ψ₄ φ^(L-1) + L(L-1) ψ₂² φ^(L-2)] du

(docs/theory/attention.md, "Softmax"). φ and ψ do not depend on L, so they are computed once for a grid of s, and one
length then costs a fraction of a millisecond.
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from signalprop.errors import InputError
from signalprop.network.moments import Array, FloatArray

_MAX_LENGTH = 1e6
STEP = 0.4  # of u and y: the trapezoidal sum of exp(ny - e^y) is exact to 3e-7 for n = 4, and better below
_KNEE = 3.0  # √s = _KNEE ξ/(1-ξ): the moments are smooth in s near 0 and in 1/√s near infinity, hence smooth in ξ
_INTERVALS = 80  # of ξ in [0, 1]
_NODES = np.arange(_INTERVALS - 1) / _INTERVALS  # the last is s = 13689; beyond it the last cubic is continued


class SoftmaxMoments(NamedTuple):
    """Moments of A = softmax over `length` logits, each field an array of the shape of the score variance.

    Attributes:
        second: E ΣA² (1/second is the effective number of attended entries).
        third: E ΣA³.
        second_squared: E (ΣA²)².
        jacobian: E ‖diag A - AAᵀ‖²_F, the squared size of the softmax Jacobian.
        mean_score_squared: E (ΣAz)², z being the logits over their standard deviation.
        squared_tilt: (E ΣA²z² - ΣA²)/(4 s ΣA²), 1 while weights are small and 0 for one-hot ones.
    """

    second: FloatArray
    third: FloatArray
    second_squared: FloatArray
    jacobian: FloatArray
    mean_score_squared: FloatArray
    squared_tilt: FloatArray


class Laplace(NamedTuple):
    """ln φ, ψ₁ … ψ₄, E z e^y exp(-e^y) and E z² e^2y exp(-e^y) on the u-grids of all s, one after the other."""

    start: NDArray[np.int64]
    u: FloatArray
    log_phi: FloatArray
    psi1: FloatArray
    psi2: FloatArray
    psi3: FloatArray
    psi4: FloatArray
    z_psi1: FloatArray
    zz_psi2: FloatArray


_Y = np.arange(-70, 11) * STEP  # exp(y - e^y) is below 1e-12 outside [-28, 4]
_EXP_Y = np.exp(_Y)
_GUMBEL = STEP * np.exp(_Y - _EXP_Y)  # density of y, so that φ = P(y > u + √s z)
_PSI = [_GUMBEL * _EXP_Y**n for n in range(4)]  # weights of ψ₁ … ψ₄
_WEIGHTS = [*_PSI, _Y * _PSI[0], _Y * _PSI[1], _Y * _Y * _PSI[1]]


def _laplace_narrow(std: Array, u: FloatArray) -> list[FloatArray]:
    """φ and ψ by a trapezoidal sum over z, (..., u), for logits with standard deviations (...) up to about 1."""
    z = np.arange(-12, 13) * 0.7
    weight = np.exp(-0.5 * z * z)
    weight /= weight.sum()
    ey = np.exp(u[:, None] + np.asarray(std)[..., None, None] * z)
    decay = np.exp(-ey)
    miss = -np.expm1(-ey) @ weight  # 1 - φ
    e1, e2 = decay * ey, decay * ey * ey
    e3, e4 = e2 * ey, e2 * ey * ey
    plain = (e @ weight for e in (e1, e2, e3, e4))
    return [np.log1p(-np.minimum(miss, 1.0 - 1e-16)), *plain, e1 @ (weight * z), e2 @ (weight * z * z)]


def _laplace_wide(std: float, u: FloatArray) -> list[FloatArray]:
    """φ and ψ as convolutions over y: exp(ny - e^y) is narrow where the Gaussian is wide."""
    # u and y share one grid, so y - u takes only len(u) + len(y) values.
    z = (np.arange(len(u) + len(_Y) - 1) * STEP + (_Y[0] - u[-1])) / std
    density = np.exp(-0.5 * z * z) / (std * math.sqrt(2 * math.pi))
    tail = 0.5 * np.array(list(map(math.erfc, (z * math.sqrt(0.5)).tolist())))

    def over_y(values: FloatArray, weights: FloatArray) -> FloatArray:
        return np.correlate(values, weights, "valid")[::-1]  # entry i: the sum over the grid of y at y - u_i

    miss = over_y(tail, _GUMBEL)  # 1 - φ, kept apart for its relative accuracy
    psi1, psi2, psi3, psi4, y_psi1, y_psi2, yy_psi2 = (over_y(density, weights) for weights in _WEIGHTS)
    return [
        np.log1p(-np.minimum(miss, 1.0 - 1e-16)),
        psi1,
        psi2,
        psi3,
        psi4,
        (y_psi1 - u * psi1) / std,  # z = (y - u)/√s
        (yy_psi2 - 2.0 * u * y_psi2 + u * u * psi2) / std**2,
    ]


def _grid(std: float) -> FloatArray:
    """Where the mass sits: one logit, or the sum of up to 1e6, is e^-u: |u| up to 8.5 deviations and ln L."""
    low = math.floor((-8.5 * std - math.log(_MAX_LENGTH) - 14.0) / STEP)
    high = math.ceil((8.5 * std + 5.0) / STEP)
    return np.asarray(np.arange(low, high + 1) * STEP)


def _on_grid(std: float, u: FloatArray) -> list[FloatArray]:
    return _laplace_narrow(std, u) if std <= 1.0 else _laplace_wide(std, u)


def laplace_of(stds: FloatArray) -> Laplace:
    """Of logits with these standard deviations, each on its grid."""
    grids = [_grid(std) for std in stds.tolist()]
    columns = [_on_grid(std, u) for std, u in zip(stds.tolist(), grids, strict=True)]
    joined = [np.concatenate(column) for column in zip(*columns, strict=True)]
    return Laplace(np.cumsum([0, *map(len, grids[:-1])]), np.concatenate(grids), *joined)


def laplace_on(std: float, reach: float) -> FloatArray:
    """ln φ and ψ₁ … ψ₄ of one standard deviation on the grid of u of another, at least as large; (5, u)."""
    u = _grid(reach)
    narrow = std <= 1.0  # all is 0 far before e^u overflows
    return np.stack((_laplace_narrow(std, np.minimum(u, 100.0)) if narrow else _laplace_wide(std, u))[:5])


def _one_hot(one: FloatArray) -> SoftmaxMoments:
    return SoftmaxMoments(one, one, one, 0.0 * one, one, 0.0 * one)


def _integrate(laplace: Laplace, length: int) -> SoftmaxMoments:
    """The integrals over u for one length, at least 2, and every score variance of `laplace`."""
    pair = length * (length - 1.0) * np.exp((length - 2.0) * laplace.log_phi)
    single = length * np.exp((length - 1.0) * laplace.log_phi)

    def total(values: FloatArray) -> FloatArray:
        return np.asarray(STEP * np.add.reduceat(values, laplace.start), dtype=np.float64)

    second = total(single * laplace.psi2)
    third = total(single * laplace.psi3) / 2.0
    fourth = total(single * laplace.psi4) / 6.0
    second_squared = fourth + total(pair * laplace.psi2**2) / 6.0
    mean_score_squared = total(single * laplace.zz_psi2 + pair * laplace.z_psi1**2)
    jacobian = second - 2.0 * third + second_squared
    # Gaussian integration by parts, twice: E z² f = E f + E f'', with f = A²
    squared_tilt = 1.0 - (5.0 * third - 3.0 * fourth) / (2.0 * second)
    return SoftmaxMoments(second, third, second_squared, jacobian, mean_score_squared, squared_tilt)


def check(variance: Array, length: Array) -> None:
    """Raise InputError for what the moments of a softmax are not of."""
    if not bool(np.all((np.asarray(length) >= 1) & (np.asarray(length) <= _MAX_LENGTH))):
        raise InputError(f"softmax length is {length}; expected 1 to {_MAX_LENGTH:.0e}")
    if not bool(np.all(np.asarray(variance) >= 0)):
        raise InputError(f"score variance is {variance}; expected a number that is at least 0")


def softmax_moments(variance: Array, length: int) -> SoftmaxMoments:
    """Moments of a softmax over `length` independent N(0, variance) logits, by quadrature.

    Relative error below 1e-6; 1e-5 for the Jacobian beyond s = 1000, where it is a small difference.

    Args:
        variance: score variances, any shape; 0 to 1e4.
        length: number of logits, an integer from 1 to 1e6.

    Raises:
        InputError: a negative variance, or a length out of range.
    """
    check(variance, length)
    s = np.atleast_1d(np.asarray(variance, dtype=np.float64))
    if length == 1:
        return _one_hot(np.ones(np.shape(variance)))
    found = _integrate(laplace_of(np.sqrt(s.ravel())), length)
    return SoftmaxMoments(*(column.reshape(np.shape(variance)) for column in found))


# --- interpolation -------------------------------------------------------------------------------------------------


@lru_cache(maxsize=2)
def node_laplace(stride: int = 1) -> Laplace:
    """At `node_variances()`: at every so many, and the first three."""
    if stride == 1:
        return laplace_of(_KNEE * _NODES / (1.0 - _NODES))
    every = node_laplace()
    borders = [*every.start, len(every.u)]
    parts = [np.arange(borders[k], borders[k + 1]) for k in _places(stride)]
    some = np.concatenate(parts)
    return Laplace(np.cumsum([0, *map(len, parts[:-1])]), *(column[some] for column in every[1:]))


def _places(stride: int) -> list[int]:
    return sorted({0, 1, 2, *range(0, len(_NODES), stride)})


@lru_cache(maxsize=2)
def _slopes_from_values(n: int) -> FloatArray:
    """The matrix that maps values at n uniform nodes to a not-a-knot cubic spline's slopes there."""
    left = 4.0 * np.eye(n) + np.eye(n, k=1) + np.eye(n, k=-1)
    right = 3.0 * (np.eye(n, k=1) - np.eye(n, k=-1))
    left[0, :3], right[0, :3] = (1.0, 2.0, 0.0), (-2.5, 2.0, 0.5)
    left[-1, -3:], right[-1, -3:] = (0.0, 2.0, 1.0), (-0.5, -2.0, 2.5)
    return np.asarray(np.linalg.solve(left, right), dtype=np.float64)


_BLOCK = 4096


class Spline:
    """Cubic splines in ξ, ξ = √s/(√s + 3), of several functions of the score variance s at once."""

    def __init__(self, values: FloatArray) -> None:
        """values: (nodes, columns), at the score variances `node_variances()`, or at every second, third, …"""
        slope = _slopes_from_values(len(values)) @ values
        v0, v1, m0, m1 = values[:-1], values[1:], slope[:-1], slope[1:]
        cubic = [v0, m0, 3.0 * (v1 - v0) - 2.0 * m0 - m1, 2.0 * (v0 - v1) + m0 + m1]
        self.n_columns = values.shape[1]
        self.last = len(values) - 2
        self.intervals = (len(values) - 1) / float(_NODES[-1])  # in ξ from 0 to 1
        self.coefficients = np.stack(cubic, axis=1)  # (intervals, 4, columns)

    @cached_property
    def rows(self) -> list[list[list[float]]]:
        """The coefficients as Python floats, (intervals, columns, 4), for single values."""
        found: list[list[list[float]]] = self.coefficients.transpose(0, 2, 1).tolist()
        return found

    def __call__(self, s: Array) -> list[Array]:
        """One entry per column, of the shape of s. Plain floats take a path without NumPy, some ten times as fast."""
        if isinstance(s, float):
            std = math.sqrt(s)
            x = self.intervals * std / (std + _KNEE)
            i = min(int(x), self.last)
            x -= i
            return [((c3 * x + c2) * x + c1) * x + c0 for c0, c1, c2, c3 in self.rows[i]]
        values = np.asarray(s, dtype=np.float64)
        flat = values.ravel()
        out = np.empty((self.n_columns, flat.size))
        for start in range(0, flat.size, _BLOCK):  # a sweep's gathered coefficients would not fit the cache
            out[:, start : start + _BLOCK] = self._block(flat[start : start + _BLOCK])
        return list(out.reshape(self.n_columns, *values.shape))

    def place(self, s: FloatArray) -> tuple[NDArray[np.int64], FloatArray]:
        """Interval of every score variance, and how far into it, 0 to 1: what its cubic is of."""
        root = np.sqrt(s)
        position = self.intervals * root / (root + _KNEE)
        index = np.minimum(position.astype(np.int64), self.last)
        return index, position - index

    def _block(self, s: FloatArray) -> FloatArray:
        """(columns, entries) for a vector of score variances."""
        index, offset = self.place(s)
        offset = offset[:, None]
        c = self.coefficients[index]
        out = c[:, 3] * offset
        for power in (2, 1):
            out += c[:, power]
            out *= offset
        out += c[:, 0]
        return np.asarray(out.T)


def node_variances() -> FloatArray:
    """The score variances at which a Spline is tabulated."""
    return np.asarray((_KNEE * _NODES / (1.0 - _NODES)) ** 2, dtype=np.float64)


def vanishing(s: Array) -> Array:
    """3/(√s + 3): the softmax Jacobian falls like it at large s, so ln(J / vanishing) is tabulated instead of ln J."""
    return _KNEE / (s**0.5 + _KNEE)


@lru_cache(maxsize=256)
def node_moments(length: int, stride: int = 1) -> SoftmaxMoments:
    """The moments for one length at `node_variances()`; NaN at those that `node_laplace` leaves out."""
    if length == 1:
        return _one_hot(np.ones(len(_NODES)))
    found = np.full((len(SoftmaxMoments._fields), len(_NODES)), np.nan)
    found[:, _places(stride)] = _integrate(node_laplace(stride), length)
    return SoftmaxMoments(*found)


def linear_response(m: SoftmaxMoments) -> FloatArray:
    """(E(ΣAz)² - ΣA²)/s at the nodes: how far the mean of the attended logits moves; (1 - ΣA²)² for long rows."""
    s = node_variances()
    response = (m.mean_score_squared - m.second) / np.where(s > 0, s, 1.0)
    # A function of s near 0: the parabola in ξ² through the next two nodes gives the limit, where the quotient is 0/0.
    response[0] = (4.0 * response[1] - response[2]) / 3.0
    return np.asarray(response, dtype=np.float64)


def response_to_key_variance(length: int, stride: int = 1) -> FloatArray:
    """d ln E A_k and d ln E A_k², by d ln of the variance of logit k about the others' mean; (nodes, 2).

    The mean of those variances is kept, so this says how much more of a row a key gets that lies farther from the
    other keys than they do, at the nodes of `node_moments`: docs/theory/kernels.md, "Keys that lie apart". At least
    3 logits.
    """
    m, s, others = node_moments(length, stride), node_variances(), length - 1.0
    fourth = (5.0 * m.third - 2.0 * m.second * (1.0 - m.squared_tilt)) / 3.0
    # sums over k of E of second derivatives of A_k, A_k²: by the logit itself, and by all the others
    itself = np.stack([1.0 - 3.0 * m.second + 2.0 * m.third, 4.0 * m.second * m.squared_tilt])
    other = np.stack(
        [3.0 * m.second - 2.0 * m.third - 1.0, 6.0 * (m.second_squared - fourth) - 2.0 * (m.second - m.third)]
    )
    curved = itself + (2.0 * itself - other) / others + 2.0 * (itself - other) / (others * (others - 1.0))
    mean = np.stack([np.ones_like(s), m.second])
    return np.asarray((s * (1.0 - 1.0 / length) / (2.0 * mean) * curved).T, dtype=np.float64)

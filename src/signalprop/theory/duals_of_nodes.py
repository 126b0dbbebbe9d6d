"""Dual activations on token kernels: E f(x_i) f(x_j) and E f'(x_i) f'(x_j) for all pairs of positions.

Where all positions have one variance, as after a norm, from tables. Where variances differ: by degree for homogeneous
activations, in closed form for GELU and erf, and else by Hermite coefficients of every position. Derivations and
measured errors: `docs/theory/kernels.md`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from signalprop.network.activations import Activation, activation, numbers_of
from signalprop.network.duals import Hermite, central_dual, dual, hermite
from signalprop.network.moments import Array, FloatArray
from signalprop.network.products import pairs, product
from signalprop.theory.log_arithmetic import inverse_roots
from signalprop.theory.remembered import remembered

# Variances that differ by less than this share of their mean count as one.
_SPREAD = 1e-5
_ANGLES = np.linspace(0.0, math.pi, 4097)
# Rows and columns of a kernel that are computed at a time: they stay in the cache. Blocks are copied column by column,
# too: at a power of two these would share few of the cache's places.
_ROWS, _COLUMNS = 64, 248
# Share of E f f, and of E f' f', that a series may leave to its last term.
_VALUE_TAIL, _SLOPE_TAIL = 1e-11, 1e-7
_BEYOND = 1e-14  # share of Var f beyond the terms that are interpolated
_MOST_TERMS = 512
_FEW = 512  # entries of whose correlations all powers are held at once
_FEW_PAIRS = 1600  # entries of one variance up to which duals themselves are cheaper than a table of them
_BOUNDS = (0.7, 0.9, 0.97, 0.99)  # of correlations that are summed together, with as many terms as they need
# Variances between which coefficients are interpolated, at most, and how exactly.
_MOST_NODES, _INTERPOLATED = 128, 1e-13
_APART = 1e-4  # ratio of the variances that coefficients are interpolated between

# (variances of the rows (m, 1), of the columns (n,), correlations (m, n)) -> moments (m, n)
Pair = Callable[[FloatArray, FloatArray, FloatArray], FloatArray]
Places = NDArray[np.intp]
# (positions (..., m, 1), positions (n,), (..., 1, n) or (m, 1), their correlations, to be overwritten) -> what stands
# there, to keep
Block = Callable[[Places, Places, FloatArray], FloatArray]


@remembered(results=64, entries=256**2)  # of a grid of 180 nodes 256 kB: the way back reads the same kernels twice
def dual_of_nodes(
    name: str, derivative: int, per_token: FloatArray, shared: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """E f(x)^2 of every token, (n,), and E f(x) f(y) of two, (n, n), of Gaussian tokens; with derivative 1 of f'.

    Args:
        per_token: variances, (n,). shared: covariances of two different tokens, (n, n); the diagonal is of two at one
            place. Both may have a leading axis of members.
    """
    if per_token.ndim > 1:
        root, mean = inverse_roots(per_token), per_token.mean(1, keepdims=True)
        s = mean if (np.ptp(per_token, axis=1) <= _SPREAD * mean[:, 0]).all() else per_token
        of, place = dual_of(name, derivative, s.ravel()), np.arange(s.size).reshape(s.shape)
        rows, r = place[..., None], shared * pairs(root, root)
        alone = np.broadcast_to(of(rows, rows, np.ones(rows.shape))[..., 0], per_token.shape)
        return alone, of(rows, place[..., None, :], r.clip(-1.0, 1.0, out=r))
    of, n = dual_of(name, derivative, per_token), len(per_token)
    if (one := one_variance(per_token)) is not None:
        q = dual(name, one, 1.0)
        alone = np.full(n, q.slope_second_moment if derivative else q.second_moment)
    else:
        every = np.arange(n)[:, None]
        alone = of(every, every, np.ones((n, 1)))[:, 0]
    return alone, entry_by_entry(of, shared, inverse_roots(per_token))


def slope_of_unlike(name: str, per_token: FloatArray) -> Array:
    """E f'(x) f'(y) of two tokens that share nothing, of the size of each, (..., n), or one number for all."""
    act, one = activation(name), one_variance(per_token)
    if one is not None or act.closed_form is not None:
        return dual(name, per_token if one is None else one, 0.0).slope_moment
    slopes = _hermite_at(act, np.maximum(per_token.ravel(), 0.0)).slopes[0]
    return np.asarray(slopes.reshape(per_token.shape) ** 2)


def dual_of(name: str, derivative: int, variance: Array) -> Block:
    """E f(x) f(y), or with derivative 1 E f'(x) f'(y), of any entries.

    One variance: ReLU, GELU and erf in closed form, others entry by entry where these are few, and else by
    interpolation in arccos r, cubic for f (error below 1e-11 of the value at r = 1) and linear for f' (1e-6). Duals are
    smooth in the angle, also where they are kinked in r. The error vanishes at r = 1: tokens that are equal up to
    rounding stay so. Of the variance eight digits count, for which tables are used.

    Args:
        variance: of all positions, or of each of them, (T,). Those that differ by less than 1e-5 count as one.
    """
    if (one := one_variance(variance)) is not None:
        return _of_one(name, derivative, one)
    s = np.maximum(variance, 0.0)  # rounding can leave a diagonal below 0
    act = activation(name)
    if (degree := _degree(act)) is not None:
        return times(_of_one(name, derivative, 1.0), s ** ((degree - derivative) / 2))
    inside, numbers = numbers_of(name)
    if len(numbers) == 4 and act.closed_form is not None:  # d (f(a x) + c)
        scale, _, lift, gain = numbers
        lift = 0.0 if derivative else lift
        of = dual_of(inside, derivative, scale**2 * s)
        mean = np.asarray(central_dual(inside, scale**2 * s, 0.0).mean)
        return lambda i, j, r: (of(i, j, r) + lift * (mean[i] + mean[j] + lift)) * (gain * scale**derivative) ** 2
    if act.closed_form is not None and act.name in _PAIRS:
        pair = _PAIRS[act.name][derivative]
        return lambda i, j, r: pair(s[i], s[j], r)
    h = _hermite_at(act, s)
    if derivative:
        return _series(h.slopes, h.slope_second_moment, _SLOPE_TAIL)
    order = np.arange(1, len(h.slopes) + 1)
    beyond = h.slopes * np.sqrt(s / order[:, None])  # Stein: E f He_n / sqrt(n!)
    return _series(np.vstack([h.mean, beyond]), h.variance + h.mean**2, _VALUE_TAIL)


def times(of: Block, root: FloatArray) -> Block:
    """Entries times root_i root_j."""
    return lambda i, j, r: np.asarray(of(i, j, r) * (root[i] * root[j]))


def one_variance(variance: Array) -> float | None:
    """The one variance of all positions, to eight digits; None where they differ."""
    s = np.asarray(variance, np.float64)
    mean = float(s.sum()) / s.size
    # what is not finite is refused with the table
    one_value = not math.isfinite(mean) or float(s.max() - s.min()) <= _SPREAD * mean
    return float(f"{mean:.7e}") if one_value else None


# --- one variance --------------------------------------------------------------------------------------------------


def _of_one(name: str, derivative: int, variance: float) -> Block:
    """E f f, or E f' f', of any entries."""
    act = activation(name)
    if act.closed_form is not None and act.name in _CLOSED and math.isfinite(variance):
        closed, s = _CLOSED[act.name][derivative], np.asarray(variance)
        return lambda _, __, r: closed(s, s, r)

    def block(_: object, __: object, r: FloatArray) -> FloatArray:
        if r.size <= _FEW_PAIRS:
            return _at_entries(name, variance, r)[derivative]
        return _looked_up(_dual_table(name, variance)[derivative], r)

    return block


@remembered(results=64, entries=_FEW_PAIRS)  # the way back asks for slopes where the way forward asked for values
def _at_entries(name: str, variance: float, r: FloatArray) -> tuple[FloatArray, FloatArray]:
    q = dual(name, variance, r)
    return np.asarray(q.covariance_moment), np.asarray(q.slope_moment)


def _relu_value(s: FloatArray, _: FloatArray, r: FloatArray) -> FloatArray:
    out, sine = np.arccos(r, out=np.empty_like(r)), np.subtract(1.0, r, out=np.empty_like(r))
    np.subtract(math.pi, out, out=out)
    out *= r
    r += 1
    sine *= r
    out += np.sqrt(sine, out=sine)
    out *= s / (2 * math.pi)
    return np.asarray(out)


def _relu_slope(_: FloatArray, __: FloatArray, r: FloatArray) -> FloatArray:
    out = np.arccos(r, out=r)
    np.subtract(math.pi, out, out=out)
    out /= 2 * math.pi
    return np.asarray(out)


def _looked_up(coefficients: FloatArray, r: FloatArray) -> FloatArray:
    """A polynomial in the angle's place within its interval."""
    place = np.arccos(r, out=r)
    place /= _ANGLES[1]
    left = np.minimum(place.astype(np.intp), len(_ANGLES) - 2)
    place -= left
    found = coefficients[0].take(left)
    for column in coefficients[1:]:
        found *= place
        found += column.take(left)
    return np.asarray(found)


@lru_cache(maxsize=128)
def _dual_table(name: str, variance: float) -> tuple[FloatArray, FloatArray]:
    """Coefficients of E f f (cubic, with its exact derivatives) and of E f' f' (linear), highest power first."""
    q = dual(name, variance, np.cos(_ANGLES))
    value, slope = np.asarray(q.covariance_moment), np.asarray(q.slope_moment)
    rise = -variance * np.sin(_ANGLES) * slope * _ANGLES[1]  # d/dr E f f = variance E f' f' (Price)
    step = np.diff(value)
    third = rise[:-1] + rise[1:] - 2 * step
    cubic = np.stack([third, step - rise[:-1] - third, rise[:-1], value[:-1]])
    return cubic, np.stack([np.diff(slope), slope[:-1]])


def entry_by_entry(block: Block, kernel: FloatArray, root: FloatArray) -> FloatArray:
    """A symmetric matrix, block by block from the diagonal on.

    Args:
        root: correlations are root_i root_j times the kernel; what rounding has beyond +-1 counts as that.
    """
    n, out = len(kernel), np.empty(kernel.shape)
    positions = np.arange(n)
    for start in range(0, n, _ROWS):
        end = min(start + _ROWS, n)
        for left in range(start, n, _COLUMNS):
            part, other = slice(start, end), slice(left, left + _COLUMNS)
            r = kernel[part, other] * root[other]
            r *= root[part, None]
            found = block(positions[part, None], positions[other], r.clip(-1.0, 1.0, out=r))
            out[part, other] = found
            if (beyond := max(end, left)) < n:
                out[beyond : left + _COLUMNS, part] = found[:, beyond - left :].T
    return out


# --- a variance for every position ---------------------------------------------------------------------------------


_POINTS = np.array([-3.1, -1.2, -0.4, 0.3, 0.9, 2.7])


@lru_cache(maxsize=256)
def _degree(act: Activation) -> int | None:
    """The degree of a homogeneous activation, f(c x) = c^degree f(x) for c > 0: 1 for ReLU, 2 for its square."""
    for degree in (1, 2):
        if all(
            np.allclose(act.function(c * _POINTS), c**degree * act.function(_POINTS), rtol=1e-13, atol=0)
            for c in (2.0, 3.0, 1e-3)
        ):
            return degree
    return None


def _determinant(p: FloatArray, q: FloatArray, r: FloatArray) -> FloatArray:
    """(1 + p)(1 + q) - p q r^2."""
    out = (1 - r) * (1 + r)
    out *= p * q
    out += 1 + (p + q)
    return out


def _gelu_value(p: FloatArray, q: FloatArray, r: FloatArray) -> FloatArray:
    m, delta2 = (1 + p) * (1 + q), _determinant(p, q, r)
    root = np.sqrt(p * q)
    out = np.arcsin(r * (root / np.sqrt(m)))
    out += math.pi / 2
    out *= r
    out *= root
    out += (p * q / m) * (delta2 + r * r) / np.sqrt(delta2)
    return np.asarray(out / (2 * math.pi))


def _gelu_slope(p: FloatArray, q: FloatArray, r: FloatArray) -> FloatArray:
    delta2 = _determinant(p, q, r)
    k = r * np.sqrt(p * q)
    out = np.arcsin(k / np.sqrt((1 + p) * (1 + q)))
    out += math.pi / 2
    out += k / np.sqrt(delta2) * (1 / (1 + p) + 1 / (1 + q) + 1 / delta2)
    return np.asarray(out / (2 * math.pi))


def _erf_value(p: FloatArray, q: FloatArray, r: FloatArray) -> FloatArray:
    return np.asarray(2 / math.pi * np.arcsin(r * (2 * np.sqrt(p * q) / np.sqrt((1 + 2 * p) * (1 + 2 * q)))))


def _erf_slope(p: FloatArray, q: FloatArray, r: FloatArray) -> FloatArray:
    return np.asarray(4 / math.pi / np.sqrt(_determinant(2 * p, 2 * q, r)))


_PAIRS: dict[str, tuple[Pair, Pair]] = {"gelu": (_gelu_value, _gelu_slope), "erf": (_erf_value, _erf_slope)}


# where all positions have one variance, ReLU too
_CLOSED: dict[str, tuple[Pair, Pair]] = _PAIRS | {"relu": (_relu_value, _relu_slope)}


def _series(coefficients: FloatArray, total: FloatArray, enough: float) -> Block:
    """sum_n c_n(i) c_n(j) r_ij^n by Horner's rule.

    Args:
        coefficients: (terms, T), at variances s. total: sum of all c_n^2, also of those beyond, (T,); what the terms
            miss goes into the last of them, so that r = 1 is exact. enough: share of it that may.
    """
    captured = np.cumsum(coefficients**2, axis=0)
    left_out = np.maximum(total - captured, 0.0)
    share = np.where(total > 0, left_out / np.where(total > 0, total, 1.0), 0.0).max(1)  # of all after every term
    terms = min(1 + int(np.count_nonzero(share > enough)), len(captured), _MOST_TERMS)
    c = np.vstack([coefficients[:terms], np.sqrt(left_out[terms - 1])])
    with np.errstate(divide="ignore"):
        log_share, power = np.log(share[:terms]), np.arange(1, terms + 1)

    def few_of(largest: float) -> int:
        """Terms that correlations up to this one need: what is left out falls as largest^n, too."""
        with np.errstate(divide="ignore"):
            beyond = log_share + power * np.log(largest) > math.log(enough)
        return min(1 + int(np.count_nonzero(beyond)), terms)

    def terms_of(few: int, i: Places, j: Places) -> tuple[FloatArray, FloatArray]:
        used = few + (few == terms)  # the last one has what all others miss
        return c[:used, i], c[:used, j]

    def summed(i: Places, j: Places, r: FloatArray, largest: float) -> FloatArray:
        """By Horner's rule, for many entries."""
        left, right = terms_of(few_of(largest), i, j)
        sum_, term = np.zeros(r.shape), np.empty(r.shape)
        times: Callable[..., Any] = np.multiply
        if (i.ndim, j.ndim) == (2, 1):  # a column by a row: BLAS takes half the time of NumPy's broadcast product
            right, times = right[:, None], np.dot
        for one, other in zip(left[::-1], right[::-1], strict=True):
            sum_ *= r
            times(one, other, out=term)
            sum_ += term
        return sum_

    def summed_at_once(i: Places, j: Places, r: FloatArray, largest: float) -> FloatArray:
        """All powers of few entries, (m,)."""
        left, right = terms_of(few_of(largest), i, j)
        powers = np.empty(left.shape)
        powers[0], powers[1:] = 1.0, r
        np.multiply.accumulate(powers, axis=0, out=powers)
        powers *= left * right
        return np.asarray(powers.sum(0))

    def block(i: Places, j: Places, r: FloatArray) -> FloatArray:
        same = (i == j) & (r > 1 - 1e-12)
        r[same] = 0.0
        size = np.abs(r)
        largest = float(size.max(initial=0.0))
        bounds = [*(bound for bound in _BOUNDS if bound < largest), largest]
        sum_ = summed(i, j, r, bounds[0])
        rows, columns, _ = np.broadcast_arrays(i, j, r)
        for low, high in pairwise(bounds):
            which = np.nonzero((size > low) & (size <= high))
            if (count := len(which[0])) == 0:
                continue
            way = summed_at_once if count <= _FEW else summed
            sum_[which] = way(rows[which], columns[which], r[which], high)
        return np.where(same, total[i], sum_)

    return block


@remembered(results=4, entries=1024)  # a sublayer asks for values and slopes: 4 MB each at most
def _hermite_at(act: Activation, s: FloatArray) -> Hermite:
    """`hermite` at many variances: where it can be, interpolated in ln s at Chebyshev's points."""
    low, high, nodes = float(s.min()), float(s.max()), 16
    group = np.floor(np.log(s) / -math.log(_APART)) if 0 < low <= _APART * high else np.zeros(1)
    if len(sizes := sorted(set(group.tolist()))) > 1:  # of members: those of about one size each
        parts = [(which, _hermite_at(act, s[which])) for which in (group == k for k in sizes)]
        found = np.zeros((3 + max(len(part.slopes) for _, part in parts), len(s)))
        for which, part in parts:
            found[: 3 + len(part.slopes), which] = np.vstack([*part[:3], part.slopes])
        return Hermite(found[0], found[1], found[2], found[3:])
    while low > _APART * high and nodes <= _MOST_NODES:
        # between whole numbers of ln s, which sublayers share
        h = _interpolated(act, s, float(math.floor(math.log(low))), math.floor(math.log(high)) + 1.0, nodes)
        if h is not None:
            return h
        nodes *= 2
    return hermite(act, s, _MOST_TERMS)


def _interpolated(act: Activation, s: FloatArray, low: float, high: float, nodes: int) -> Hermite | None:
    """None where the polynomial has not converged."""
    polynomial = _polynomial(act, low, high, nodes)
    if polynomial is None:
        return None
    place = np.arccos(np.clip((np.log(s) - (high + low) / 2) / ((high - low) / 2), -1, 1))
    found = product(polynomial, np.cos(np.outer(np.arange(nodes), place)))
    return Hermite(found[0], found[1], found[2], found[3:])


@lru_cache(maxsize=64)  # of 16 nodes 64 kB at most
def _polynomial(act: Activation, low: float, high: float, nodes: int) -> FloatArray | None:
    """Chebyshev's coefficients of `hermite` over ln s from low to high, (3 + terms, nodes)."""
    angle = (np.arange(nodes) + 0.5) * (math.pi / nodes)
    h = hermite(act, np.exp((high + low) / 2 + (high - low) / 2 * np.cos(angle)), _MOST_TERMS)
    captured = np.cumsum(h.slopes**2 / np.arange(1, len(h.slopes) + 1)[:, None], axis=0)  # of Var f, over s
    needed = int(np.count_nonzero((captured < (1 - _BEYOND) * captured[-1]).any(1))) + 1
    values = np.vstack([h.mean, h.variance, h.slope_second_moment, h.slopes[:needed]])
    polynomial = product(values, np.cos(np.outer(angle, np.arange(nodes)))) * (2 / nodes)
    polynomial[:, 0] /= 2
    sizes = np.abs(values).max(1)
    sizes[3:] = sizes[3:].max()
    converged = np.abs(polynomial[:, -2:]).max(1) <= _INTERPOLATED * sizes
    return polynomial if converged.all() else None

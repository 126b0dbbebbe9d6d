"""Activations transformed so that deep stacks without skips keep tokens apart: DKS and TAT, as names of activations.

All of a network's feed-forwards are counted as one MLP, L activations deep; attention and skips are ignored (He et al.
2023 (SPA), section 3.4). With this package's moments; tested against the authors' package `dks`.
What is solved for gated feed-forwards: `docs/theory/components.md`, section 4.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from signalprop.errors import InputError
from signalprop.network.activations import Activation, activation, kinked
from signalprop.network.duals import dual
from signalprop.network.moments import FloatArray

# The trapezoid rule on a Gaussian: its error is exp(-2 pi delta / step) with delta the distance from the real axis to
# the nearest pole of f(a z + b): 0.2 for softplus at a = 14, the largest that 5 layers and more lead to.
_STEP = 0.05
_Z: FloatArray = np.arange(-200, 201, dtype=np.float64) * _STEP
_WEIGHT = np.exp(-_Z * _Z / 2) * _STEP / math.sqrt(2 * math.pi)
# Scale at which the search starts: every smooth activation is nearly quadratic there.
_FIRST = 0.05
# and at which it gives up: f is a step or a kink by then.
_LAST = 20.0
_SAME = 1e-13  # share by which two steps of a root may differ; rounding leaves about that
_SHIFTS: FloatArray = np.arange(1, 41) / 10


class _Moments(NamedTuple):
    """Of g(z) = f(a z + b): its mean and variance, and what C and Q have beyond the identity, C'(1) - 1 and Q'(1) - 1,
    free of cancellation for small a."""

    mean: float
    variance: float
    bend: float
    growth: float


def _plain(act: Activation, scale: float, shift: float) -> _Moments:
    """With h the part of g beyond its mean and its linear term: g = m + l z + h, E h = E h z = 0."""
    g, slope = act.function(scale * _Z + shift), scale * act.derivative(scale * _Z + shift)
    mean, linear = float(_WEIGHT @ g), float(_WEIGHT @ slope)
    h, back = g - mean - linear * _Z, slope - linear
    curved = float(_WEIGHT @ h**2)
    variance = linear**2 + curved
    bend = float(_WEIGHT @ back**2) - curved
    growth = linear * float(_WEIGHT @ (_Z**2 * back)) + float(_WEIGHT @ (_Z * h * back)) - curved
    return _Moments(mean, variance, bend / variance, growth / variance)


@lru_cache(maxsize=128)
def dks(name: str, n_layers: int, zeta: float = 5.0, gated: bool = False) -> str:
    """The activation d (f(a x + b) + c) with Q(1) = 1, Q'(1) = 1, C(0) = 0 and C'(1) = zeta^(1/L).

    Deep Kernel Shaping (Martens et al. 2021; xi in SPA, which sets 5): unit inputs give unit outputs, stably so;
    uncorrelated tokens stay uncorrelated, and the network is as non-linear as zeta says, at any depth. Of several
    solutions it is the one that leads to a linear network as zeta falls to 1, with the smallest shift; b > 0 where both
    signs do.

    Args:
        name: a smooth activation, such as gelu, silu, tanh or sigmoid.
        gated: Q and C are those of up * d (f(a gate + b) + c), for which C(0) = 0 always holds; b is 0, or 1 where
            f''(0) = 0 (docs/theory/components.md, section 4.3; ours).

    Returns:
        `transformed(name, a, b, c, d)`, a name for `Architecture.activation`.

    Raises:
        InputError: an activation with a kink, zeta not above 1, or more than the activation can do in so few layers.
    """
    if not 1 < zeta < 1e30 or n_layers < 1:
        raise InputError(f"DKS: zeta is {zeta!r} for {n_layers} layers; expected a number above 1, and a layer")
    act = activation(name)
    if kinked(name) or act.name.partition("(")[0] in ("identity", "transformed"):
        raise InputError(
            f"DKS needs a smooth activation such as gelu or silu, not {name!r:.80}; for leaky_relu there is TAT"
        )
    target = math.expm1(math.log(zeta) / n_layers)
    scale, shift = _solve_gated(act, target) if gated else _solve(act, target)
    if math.isnan(scale):
        # where the search stopped, `shift` holds the most that C'(1) - 1 can be
        raise InputError(
            f"DKS: {name} cannot be as non-linear as zeta {zeta:g} in {n_layers} layers; expected zeta up to "
            f"{math.exp(n_layers * math.log1p(0.999 * shift)):.4g}, or at least "
            f"{math.ceil(math.log(zeta) / math.log1p(0.999 * shift))} layers"
            if shift > 0
            else f"DKS: no transformation of {name!r:.80} keeps its variance stable; choose another activation"
        )
    if gated:
        lift, second, _ = _gate(act, scale, shift)
        return f"transformed({name}, {scale!r}, {shift!r}, {lift!r}, {1 / math.sqrt(second)!r})"
    found = _plain(act, scale, shift)
    return f"transformed({name}, {scale!r}, {shift!r}, {-found.mean!r}, {1 / math.sqrt(found.variance)!r})"


def _solve(act: Activation, target: float) -> tuple[float, float]:
    """(scale, shift) with C'(1) - 1 = target and Q'(1) = 1; (nan, the largest target) if there is none.

    Q'(1) = 1 gives a curve of shifts over scales. It is followed from nearly linear (C'(1) - 1 falls as scale^2) until
    C'(1) is large enough, or falls again.
    """
    start = _first_shift(act)
    if math.isnan(start):
        return math.nan, 0.0

    def on_curve(log_scale: float, near: float) -> float:
        """The shift that makes Q'(1) = 1, close to `near`; NaN where the curve ends."""
        scale = math.exp(log_scale)
        return _root(lambda b: _plain(act, scale, b).growth / scale**2, near, 0.02 * (1 + abs(near)))

    log_scale = math.log(_FIRST)
    shift = on_curve(log_scale, start)
    best, step = 0.0, 0.2
    while _plain(act, math.exp(log_scale), shift).bend > target:
        log_scale -= step
        shift = on_curve(log_scale, shift)
    while True:
        if math.isnan(shift):
            return math.nan, best
        bend = _plain(act, math.exp(log_scale), shift).bend
        if bend >= target:
            break
        if bend <= best or log_scale >= math.log(_LAST):
            return math.nan, max(best, bend)
        best, near = bend, shift
        step = min(step, math.log(_LAST) - log_scale)
        log_scale += step
        shift = on_curve(log_scale, near)
    near = shift
    log_scale = _root(
        lambda x: _plain(act, math.exp(x), on_curve(x, near)).bend / target - 1, log_scale - step / 2, step / 2
    )
    return math.exp(log_scale), on_curve(log_scale, near)


def _first_shift(act: Activation) -> float:
    """Where Q'(1) - 1 changes its sign for a small scale: the place nearest to 0, the positive one of two; or NaN."""
    left = right = _plain(act, _FIRST, 0.0).growth
    for b in _SHIFTS:
        for sign, before in ((1, right), (-1, left)):
            growth = _plain(act, _FIRST, sign * b).growth
            if growth * before < 0:
                return float(sign * b)
            right, left = (growth, left) if sign > 0 else (right, growth)
    return math.nan


def _gate(act: Activation, scale: float, shift: float) -> tuple[float, float, float]:
    """(c, E (g + c)^2, C'(1) - 1) of up * (g(gate) + c), g(z) = f(scale z + shift), with Q'(1) = 1.

    Q'(1) - 1 = E (g + c) g' z = 0 gives c; C'(1) - 1 = E g'^2 / E (g + c)^2. NaN where no c does it.
    """
    g, slope = act.function(scale * _Z + shift), scale * act.derivative(scale * _Z + shift)
    centre = float(act.function(np.full(1, shift))[0])
    bent = float(_WEIGHT @ (_Z * (slope - float(_WEIGHT @ slope))))  # E g''
    if abs(bent) < 1e-9 * scale:
        return math.nan, math.nan, math.nan
    lift = -float(_WEIGHT @ ((g - centre) * slope * _Z)) / bent - centre
    second = float(_WEIGHT @ (g + lift) ** 2)
    return lift, second, float(_WEIGHT @ slope**2) / second


def _solve_gated(act: Activation, target: float) -> tuple[float, float]:
    """(scale, shift) with C'(1) - 1 = target; (nan, the largest target) if there is none."""
    shift = 1.0 if math.isnan(_gate(act, _FIRST, 0.0)[2]) else 0.0

    def bend(log_scale: float) -> float:
        return _gate(act, math.exp(log_scale), shift)[2]

    log_scale, best, step = math.log(_FIRST), 0.0, 0.2
    if math.isnan(bend(log_scale)):
        return math.nan, 0.0
    while bend(log_scale) > target:
        log_scale -= step
    while True:
        found = bend(log_scale)
        if found >= target:
            break
        if not found > best or log_scale >= math.log(_LAST):
            return math.nan, max(best, found)
        best = found
        step = min(step, math.log(_LAST) - log_scale)
        log_scale += step
    return math.exp(_root(lambda x: bend(x) / target - 1, log_scale - step / 2, step / 2)), shift


def _root(residual: Callable[[float], float], near: float, width: float) -> float:
    """Root of a function near a point: bracketed within 64 widths, then by the Illinois rule; NaN if there is none."""
    low = high = near
    f_low = f_high = residual(near)
    if f_low == 0:
        return near
    for _ in range(7):
        low, high = near - width, near + width
        f_low, f_high = residual(low), residual(high)
        if f_low * f_high <= 0:
            break
        width *= 2
    else:
        return math.nan
    last = math.inf
    below = None  # whether the last step moved the lower end
    for _ in range(100):
        middle = (low * f_high - high * f_low) / (f_high - f_low)
        value = residual(middle)
        if value == 0 or not abs(middle - last) > _SAME * abs(middle):
            return middle
        moves_low = (value < 0) == (f_low < 0)
        halved = 0.5 if moves_low == below else 1.0  # an end that stays twice
        if moves_low:
            low, f_low, f_high = middle, value, f_high * halved
        else:
            high, f_high, f_low = middle, value, f_low * halved
        last, below = middle, moves_low
    return last


@lru_cache(maxsize=128)
def tat(n_layers: int, eta: float = 0.9) -> str:
    """The leaky ReLU whose L-fold correlation map takes 0 to eta, scaled to Q(1) = 1.

    Tailored Activation Transformation (Zhang et al. 2022), for leaky ReLU; SPA sets eta = 0.9.

    Raises:
        InputError: eta out of (0, 1), or beyond what ReLU itself reaches in so few layers.
    """
    if not 0 < eta < 1 or n_layers < 1:
        raise InputError(f"TAT: eta is {eta!r} for {n_layers} layers; expected a number between 0 and 1, and a layer")

    def reached(slope: float) -> float:
        c, name = 0.0, f"leaky_relu({slope!r})"
        one = float(dual(name, 1.0, 1.0).covariance_moment)
        for _ in range(n_layers):
            c = float(dual(name, 1.0, min(c, 1.0)).covariance_moment) / one
        return c

    if reached(0.0) < eta:
        raise InputError(
            f"TAT: {n_layers} layers of ReLU take correlation 0 to {reached(0.0):.3g} only; expected eta below "
            "that, or more layers"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if reached(middle) > eta else (low, middle)
    return f"transformed(leaky_relu({low!r}), 1.0, 0.0, 0.0, {math.sqrt(2 / (1 + low**2))!r})"

"""Dual activations in closed form; derivations: docs/theory/components.md (ReLU and GeLU: TGS v1 Table 17)."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from signalprop.network.moments import Array

Five = tuple[Array, Array, Array, Array, Array]
ClosedForm = Callable[[Array, Array], Five]  # of two plain floats, or of two arrays of one shape

_OF_FLOATS = SimpleNamespace(sqrt=math.sqrt, arcsin=math.asin)


def _functions(x: Array) -> Any:
    """sqrt and arcsin for arrays, or for plain floats, for which NumPy's take many times as long."""
    return _OF_FLOATS if isinstance(x, float) else np


def leaky_closed(slope: float) -> ClosedForm:
    """f = slope * x + (1 - slope) * relu(x), with E x relu(y) = r s / 2."""
    a, b = slope, 1 - slope
    linear, bend = a * a + a * b, b * b / (2 * math.pi)
    second, slope_second = linear + b * b / 2 * (1 - 1 / math.pi), linear + b * b / 2
    quarter = math.pi / 2

    def closed(s: Array, r: Array) -> Five:
        xp = _functions(s)
        mean = b * xp.sqrt(s / (2 * math.pi))
        half = quarter + xp.arcsin(r)
        covariance = s * (linear * r + bend * (xp.sqrt((1 - r) * (1 + r)) - 1 + r * half))
        return mean, s * second, covariance, slope_second + 0 * s, linear + bend * half

    return closed


def relu2_closed(s: Array, r: Array) -> Five:
    xp = _functions(s)
    root = xp.sqrt((1 - r) * (1 + r))
    half = np.pi / 2 + xp.arcsin(r)
    covariance = s * s / (2 * np.pi) * (3 * root * r + half * (1 + 2 * r * r) - np.pi / 2)
    return s / 2, 1.25 * s * s, covariance, 2 * s, 2 * s / np.pi * (root + r * half)


def gelu_closed(s: Array, r: Array) -> Five:
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


def erf_closed(s: Array, r: Array) -> Five:
    xp = _functions(s)
    one = 1 + 2 * s
    share = 2 * s / one
    variance = 2 / np.pi * xp.arcsin(share)
    covariance = 2 / np.pi * xp.arcsin(r * share)
    slope = 4 / np.pi / xp.sqrt((1 + 2 * s * (1 - r)) * (1 + 2 * s * (1 + r)))
    return 0 * s, variance, covariance, 4 / np.pi / xp.sqrt(1 + 4 * s), slope


def identity_closed(s: Array, r: Array) -> Five:
    return 0 * s, s, r * s, 1 + 0 * s, 1 + 0 * s * r


def transformed_closed(inside: ClosedForm, scale: float, lift: float, gain: float) -> ClosedForm:
    """Of d (f(a x) + c), from the closed form of f."""

    def closed(s: Array, r: Array) -> Five:
        mean, variance, covariance, slope2, slope = inside(scale**2 * s, r)
        back = (gain * scale) ** 2
        return gain * (mean + lift), gain**2 * variance, gain**2 * covariance, back * slope2, back * slope

    return closed

"""Activations transformed so that deep stacks without skips keep tokens apart: DKS and TAT, as names of activations.

All of a network's feed-forwards are counted as one MLP, L activations deep; attention and skips are ignored (He et al.
2023 (SPA), section 3.4). Own solvers on our own moments; tested against the package `dks`, which is the authors' own.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from signalprop.activations import activation, dual
from signalprop.errors import InputError
from signalprop.moments import FloatArray


@lru_cache(maxsize=128)
def dks(name: str, n_layers: int, zeta: float = 5.0) -> str:
    """The activation d (f(a x + b) + c) with Q(1) = 1, Q'(1) = 1, C(0) = 0 and C'(1) = zeta^(1/L).

    Deep Kernel Shaping (Martens et al. 2021; xi in SPA, which sets 5): unit inputs give unit outputs, stably so;
    uncorrelated tokens stay uncorrelated, and the network is as non-linear as zeta says, at any depth.

    Args:
        name: a smooth activation, such as gelu, silu, tanh or sigmoid.

    Returns:
        `transformed(name, a, b, c, d)`, a name for `Architecture.activation`.

    Raises:
        InputError: an activation with a kink, zeta not above 1, or no solution.
    """
    if not zeta > 1 or n_layers < 1:
        raise InputError(f"DKS: zeta is {zeta!r} for {n_layers} layers; expected a number above 1, and a layer")
    act = activation(name)
    if act.name.partition("(")[0] in ("relu", "leaky_relu", "relu2", "elu", "identity", "transformed"):
        raise InputError(f"DKS needs a smooth activation such as gelu or silu, not {name!r}; for leaky_relu use tat")
    z, weight = np.polynomial.hermite_e.hermegauss(200)
    weight = weight / weight.sum()
    target = zeta ** (1 / n_layers)

    def moments(scale: float, shift: float) -> tuple[float, float, float, float]:
        """(mean, variance of f, C'(1), Q'(1)) of the transformed activation."""
        f, slope = act.function(scale * z + shift), act.derivative(scale * z + shift)
        mean = float(weight @ f)
        variance = float(weight @ (f - mean) ** 2)
        c_slope = scale**2 * float(weight @ slope**2) / variance
        return mean, variance, c_slope, scale * float(weight @ ((f - mean) * slope * z)) / variance

    def residual(at: FloatArray) -> FloatArray:
        _, _, c_slope, q_slope = moments(math.exp(at[0]), at[1])
        return np.array([math.log((c_slope - 1) / (target - 1)) if c_slope > 1 else -50.0, q_slope - 1])

    for start in ((0.0, 0.0), (-1.0, 0.3), (0.0, 1.0), (0.0, -1.0), (-2.0, 0.3), (-2.0, -0.3), (-3.0, 1.0)):
        found = _newton(residual, np.array(start))
        if found is not None:
            scale, shift = math.exp(found[0]), float(found[1])
            mean, variance, _, _ = moments(scale, shift)
            return f"transformed({name}, {scale!r}, {shift!r}, {-mean!r}, {1 / math.sqrt(variance)!r})"
    raise InputError(f"DKS: no transformation of {name!r} for {n_layers} layers and zeta {zeta:g}; choose another zeta")


def _newton(residual: object, at: FloatArray) -> FloatArray | None:
    """Root of two equations by damped Newton steps; None where it does not converge."""
    assert callable(residual)
    value = residual(at)
    for _ in range(100):
        h = 1e-6
        columns = [(residual(at + h * e) - residual(at - h * e)) / (2 * h) for e in np.eye(2)]
        try:
            step = np.linalg.solve(np.stack(columns, 1), value)
        except np.linalg.LinAlgError:
            return None
        step *= min(1.0, 1.0 / max(float(np.abs(step).max()), 1e-300))
        for damping in 0.5 ** np.arange(12):
            tried = residual(at - damping * step)
            if np.abs(tried).max() < np.abs(value).max():
                at, value = at - damping * step, tried
                break
        else:
            return at if np.abs(value).max() < 1e-9 else None
    return at if np.abs(value).max() < 1e-9 else None


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

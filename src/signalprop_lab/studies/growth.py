"""What the recursion tends to with depth: correlation fixed points and growth orders.

Sources: TGS Table 3, section 4.6, v1 appendices F, G, L, corrected; derivations in `docs/theory/network.md`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.network.layout import layer_starts
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import PLACEMENTS, Parametrization
from signalprop.results.profile import Profile
from signalprop.theory.branches import OneNode, branches_of

__all__ = ["FixedPoint", "Growth", "fixed_point", "growth_orders"]


Branches = Sequence[OneNode]


@dataclass(frozen=True)
class FixedPoint:
    """Where an endless repetition of one layer tends to.

    Attributes:
        token_correlation: of the stream, r*; 1 is rank collapse.
        gradient_correlation: token correlation of the gradient, r_g*.
        variance_per_layer: what one layer adds to the stream's variance (pre-norm, unit skip), else None.
        gradient_exponent: eta of G_n / G_N ~ (N / n)^eta (pre-norm, unit skip), else None.
        gradient_rate: factor per layer on the gradient variance on its way down (post-norm), else None.
    """

    token_correlation: float
    gradient_correlation: float
    variance_per_layer: float | None
    gradient_exponent: float | None
    gradient_rate: float | None


@typed
def fixed_point(parametrization: Parametrization) -> FixedPoint:
    """The fixed points of the first layer of a bidirectional stack (`parametrization`), repeated without end.

    Pre-norm: branches are added for ever, so r* = (c_A + c_F)(r*) / (v_A + v_F)(r*), and the gradient's correlation is
    that of what the two branches send back. Post-norm: r* is the fixed point of the layer's map, and the gradient the
    dominant eigenvector of the layer's backward map (TGS v1 appendix F, corrected on that page).

    Raises:
        InputError: the layer is causal, or neither pre-norm with unit skip nor post-norm.
    """
    p = parametrization
    attention, feed_forward = layer_starts(p)[0] + np.arange(2)
    placement = PLACEMENTS[p.placement[attention]]
    if p.architecture.kind != "encoder":
        raise InputError(f"fixed points are for bidirectional stacks, this is an {p.architecture.kind}")
    branches = branches_of(p)
    if p.norm_bias.any():
        raise InputError("fixed points are not derived for norms with biases; expected norm_bias 0")
    if placement == "pre" and p.skip[attention] == 1 == p.skip[feed_forward]:
        return _pre_norm(p, branches, attention, feed_forward)
    if placement == "post":
        return _post_norm(p, branches, attention, feed_forward)
    raise InputError("fixed points need pre-norm with skip 1, or post-norm; predict a deep stack for anything else")


def _maps(branches: Branches, i: int, second: float, r: float) -> FloatArray:
    """The 2 x 2 matrix that takes (G, Gamma) at a branch's output to its input."""
    m = branches[i].backward(np.array([i]), (np.array([second]), np.array([r]))).stream
    return np.array([[m.vv[0], m.vc[0]], [m.cv[0], m.cc[0]]])


def _pre_norm(p: Parametrization, branches: Branches, att: int, ff: int) -> FixedPoint:
    beta2 = {i: float(p.branch[i]) ** 2 for i in (att, ff)}
    second = {i: float(p.norm_output[i]) ** 2 for i in (att, ff)}

    def added(r: float) -> tuple[float, float]:
        parts = [(beta2[i], branches[i].forward(i, (second[i], r))) for i in (att, ff)]
        return sum(w * float(b.per_token) for w, b in parts), sum(w * float(b.shared) for w, b in parts)

    r = _iterate(lambda r: added(r)[1] / added(r)[0])
    d = added(r)[0]
    matrix = np.sum([beta2[i] * second[i] * _maps(branches, i, second[i], r) for i in (att, ff)], axis=0)
    rate, r_g = _dominant(matrix)
    return FixedPoint(r, r_g, d, rate / d, None)


def _post_norm(p: Parametrization, branches: Branches, att: int, ff: int) -> FixedPoint:
    lam2 = {i: float(p.skip[i]) ** 2 for i in (att, ff)}
    beta2 = {i: float(p.branch[i]) ** 2 for i in (att, ff)}
    after = {i: float(p.norm_output[i]) ** 2 for i in (att, ff)}
    before = {att: after[ff], ff: after[att]}  # each reads what the other's norm outputs

    def half(i: int, r: float) -> tuple[float, float]:
        b = branches[i].forward(i, (before[i], r))
        n = lam2[i] * before[i] + beta2[i] * float(b.per_token)
        return (lam2[i] * before[i] * r + beta2[i] * float(b.shared)) / n, n

    r = _iterate(lambda r: half(ff, half(att, r)[0])[0])
    middle, n_att = half(att, r)
    _, n_ff = half(ff, middle)
    identity = np.eye(2)
    down = (lam2[att] * identity + beta2[att] * _maps(branches, att, before[att], r)) * after[att] / n_att
    up = (lam2[ff] * identity + beta2[ff] * _maps(branches, ff, before[ff], middle)) * after[ff] / n_ff
    rate, r_g = _dominant(down @ up)
    return FixedPoint(r, r_g, None, None, rate)


def _iterate(step: Callable[[float], float]) -> float:
    """The fixed point of a map of [0, 1] into itself that is reached from 1/2 (Steffensen, falling back on the map)."""
    r = 0.5
    for _ in range(10_000):
        first = step(r)
        second = step(min(1.0, max(0.0, first)))
        bend = second - 2 * first + r
        new = r - (first - r) ** 2 / bend if abs(bend) > 1e-14 else second
        if not 0 <= new <= 1 or not math.isfinite(new):
            new = min(1.0, max(0.0, second))
        if abs(new - r) < 1e-13:
            return new
        r = new
    return r


def _dominant(matrix: FloatArray) -> tuple[float, float]:
    """(largest eigenvalue, Gamma / G of its eigenvector) of a non-negative 2 x 2 matrix."""
    values, vectors = np.linalg.eig(matrix)
    # a decorrelated gradient (Gamma = 0) is an eigenvector too: with equal eigenvalues the correlated one attracts
    best = max(range(2), key=lambda k: (round(float(values[k].real), 12), abs(vectors[1, k])))
    g, gamma = vectors[:, best].real
    return float(values[best].real), float(gamma / g) if g != 0 else 1.0


@dataclass(frozen=True)
class Growth:
    """How a positive quantity depends on depth N, from its values at several depths.

    Attributes:
        order: `exp`, `power`, `log` or `constant`: the simplest law that fits.
        exponent: of N in the power law (d ln q / d ln N at the deep end), or per layer in the exponential.
    """

    order: str
    exponent: float

    def __str__(self) -> str:
        forms = {"constant": "O(1)", "log": "O(log N)", "power": f"O(N^{self.exponent:.2f})"}
        return forms.get(self.order, f"O(e^{{{self.exponent:+.3g} N}})")


def growth_order(depths: ArrayLike, log_values: ArrayLike) -> Growth:
    """Fit the growth law of a quantity given as logarithms at increasing depths (at least three, deep ones last).

    Exponential: the slope per layer stays put while the local power rises with depth. Constant: the local power at the
    deep end is below 0.02. Logarithmic: it falls like 1 / ln N. Otherwise a power law with that local exponent.

    Raises:
        InputError: fewer than three depths, or not increasing.
    """
    n, y = np.asarray(depths, float), np.asarray(log_values, float)
    if len(n) < 3 or len(n) != len(y) or not (np.diff(n) > 0).all():
        raise InputError("a growth order needs values at three or more increasing depths")
    powers = np.diff(y) / np.diff(np.log(n))
    per_layer = np.diff(y) / np.diff(n)
    last = float(powers[-1])
    if abs(last) < 0.02:
        return Growth("constant", last)
    if abs(powers[-1]) > 1.5 * abs(powers[-2]) and abs(powers[-1]) > 2 and per_layer[-1] * per_layer[-2] > 0:
        return Growth("exp", float(per_layer[-1]))
    value = np.exp(0.5 * (y[1:] + y[:-1]))
    # q = a + b ln N has local power b / q: then power * value stays put
    slopes = powers * value
    if last < 0.35 and last > 0 and abs(slopes[-1] - slopes[-2]) < 0.1 * abs(slopes[-1]):
        return Growth("log", last)
    return Growth("power", last)


@typed
def growth_orders(profiles: Mapping[int, Profile]) -> dict[str, Growth]:
    """Growth of forward variance, gradient variance (first over last) and sensitivity, from profiles by depth.

    These are the quantities of TGS Table 3.
    """
    depths = sorted(profiles)
    items: Sequence[Profile] = [profiles[n] for n in depths]
    out = {"forward": growth_order(depths, [p.forward["stream_out"].log_variance[-1] for p in items])}
    gradients = [p.gradient["stream_in"].log_variance[0] for p in items if p.gradient is not None]
    if len(gradients) == len(items):
        out["gradient"] = growth_order(depths, gradients)
    for kind in ("mean", "median"):
        out[f"sensitivity_{kind}"] = growth_order(depths, [math.log(max(p.sensitivity()[kind], 1e-300)) for p in items])
    return out


def growth_fit(variances: ArrayLike) -> dict[str, float]:
    """How well laws fit the variances of the outputs of layers 1, 2, ... of a stack: R^2 of a straight line.

    Returns:
        `logarithmic`: of variances against the logarithm of the layer. `linear`: against the layer. `exponential`: of
        their logarithm against the layer.
    """
    y = np.asarray(variances, np.float64)
    x = np.arange(1.0, len(y) + 1)
    return {"logarithmic": _r2(np.log(x), y), "linear": _r2(x, y), "exponential": _r2(x, np.log(y))}


def _r2(x: FloatArray, y: FloatArray) -> float:
    return float(np.corrcoef(x, y)[0, 1] ** 2) if np.ptp(y) > 1e-12 * np.abs(y).max() else 1.0

"""Bounds and growth laws of deep stacks: how far blocks are from the identity, how the stream and gradients can grow.

Two parts. The laws hold at initialisation, for any Parametrization: distance of every layer's Jacobian from the
identity, and the gain of all of them together. The bounds are those of Sun et al. 2025, "The Curse of Depth in Large
Language Models" (arXiv:2502.05795v1, equation numbers are its own): Lemma 1, Theorem 1, and with LayerNorm Scaling
Lemma 3, Theorem 2; as `printed`, and `corrected` where the print does not hold. Derivations, errata, measured
accuracy: `docs/theory/depth.md`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.network.layout import PLACEMENTS, layer_starts
from signalprop.network.moments import Array, FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.results.profile import Profile
from signalprop.theory.blocks import BranchBackward
from signalprop.theory.logs import NO_SIGNAL, correlation, log, log_add, safe_exp
from signalprop.theory.network import POST, PRE, Returned, is_shaped, returned

__all__ = ["DepthBounds", "depth_bounds"]

Form = Literal["printed", "corrected"]
Growth = Literal["exponential", "quadratic", "linear", "logarithmic"]
_EPSILON = 0.25  # the printed Lemma 3 and Theorem 2 need 0 < epsilon <= 1/4
_LARGEST = 1e60  # factor of one sublayer on a gradient's variance; a layer's three together still fit a double
Rowset = NDArray[np.intp]


# --- laws at initialisation ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Nearness:
    """How near layers are to the identity, and what they do to a gradient together; arrays (..., layers).

    Encoder first. Everything is a root mean square over random networks and over gradients that are white: independent
    in every feature of every token.

    Attributes:
        identity_distance: |J - I|_F / sqrt(n) of a layer's Jacobian J over the whole sequence, n = tokens x features.
        log_gain: ln of the gain from a stack's last stream back to the layer's input; the first layer's is the end-to-
            end gain |dy/dx|_F / sqrt(n). A norm behind the stack is not in it.
        log_plain_gain: the same by the plain product of what each sublayer does to white gradients, as if those stayed
            white. Attention makes them alike, and then sums them up: this one is too low.
    """

    identity_distance: FloatArray
    log_gain: FloatArray
    log_plain_gain: FloatArray

    def statistics(self) -> dict[str, Any]:
        """As `Profile.statistics` holds it: a number per layer each."""
        return {"identity_distance": self.identity_distance, "log_gain": self.log_gain}


def nearness(parametrization: Parametrization, profile: Profile) -> Nearness:
    """Nearness of a network's layers to the identity, at the forward signal that a profile tells of.

    A branch is random and of mean 0 at initialisation, so with the factors a of the skip path and b_v of what the
    branch makes of a white gradient, both behind the layer's norms, |J - I|_F^2 / n = (1 - a)^2 + b_v. For pre-norm
    layers of few and small branches that is j_A / sigma^2 + j_F / sigma'^2. A post-norm also removes the stream's own
    direction, one feature of d. Of trained weights it says what random ones of their size would do. With dropout: of
    the network in training mode. In a decoder behind an encoder: with respect to the decoder's own stream.

    Raises:
        InputError: attention is shaped or has ALiBi, or the profile is of another number of sublayers.
    """
    p = _as_run(parametrization, profile)
    back = returned(p, profile)
    places = _places(p)
    skip, noise = _layers(p, back, places)
    kept = 1.0 - np.minimum(_removed(p, back, places) / p.architecture.d_model, 1.0)
    white = np.minimum(back.skip**2 + back.maps.vv, _LARGEST)
    return Nearness(
        identity_distance=np.sqrt((1 - kept) + kept * (1 - skip) ** 2 + noise.vv),
        log_gain=_log_gain(p, skip**2, noise),
        log_plain_gain=_from_the_end(p, _by_layer(p, log(white) / 2)),
    )


def _as_run(p: Parametrization, profile: Profile) -> Parametrization:
    """The parametrization at the sequence lengths of a profile."""
    if is_shaped(p):
        raise InputError(
            "nearness and bounds need attention by scores alone; attention here is "
            f"{p.shaping.kind if p.shaping.kind != 'none' else 'ALiBi'}: measure its Jacobians instead"
        )
    if profile.n_sublayers != p.n_sublayers:
        raise InputError(
            f"the profile has {profile.n_sublayers} sublayers, the parametrization {p.n_sublayers}; "
            "give a profile of the same architecture"
        )
    lengths = {"seq_len": profile.architecture.seq_len, "target_len": profile.architecture.target_len}
    if all(getattr(p.architecture, name) == length for name, length in lengths.items()):
        return p
    return replace(p, architecture=p.architecture.replace(**lengths))


def _by_layer(p: Parametrization, column: FloatArray) -> FloatArray:
    """Sums over the sublayers of every layer."""
    return np.asarray(np.add.reduceat(column, layer_starts(p), axis=-1))


def _from_the_end(p: Parametrization, layers: FloatArray) -> FloatArray:
    """Sums from every layer to the end of its stack."""
    stack = p.stack[layer_starts(p)]
    parts = [np.cumsum(layers[..., stack == s][..., ::-1], axis=-1)[..., ::-1] for s in sorted(set(stack.tolist()))]
    return np.concatenate(parts, axis=-1)


def _places(p: Parametrization) -> list[tuple[Rowset, Rowset]]:
    """(layers, their sublayers) at the first place within a layer, the second, the third."""
    starts = layer_starts(p)
    sizes = np.diff(starts, append=p.n_sublayers)
    return [(np.flatnonzero(sizes > k), starts[sizes > k] + k) for k in range(int(sizes.max()))]


def _layers(
    p: Parametrization, back: Returned, places: Sequence[tuple[Rowset, Rowset]]
) -> tuple[FloatArray, BranchBackward]:
    """What whole layers make of a gradient's (variance, token covariance): skip^2 times it, plus a 2 x 2 matrix.

    The two stay apart, since what branches send back can be small beside 1.
    """
    shape = (*p.skip.shape[:-1], len(places[0][0]))
    skip = np.ones(shape)
    noise, held = (BranchBackward(*(np.zeros(shape) for _ in range(4))) for _ in range(2))
    for layers, i in reversed(places):
        vv, vc, cv, cc = (
            np.clip(column[..., i] + other[..., layers], -_LARGEST, _LARGEST)
            for column, other in zip(back.maps, held, strict=True)
        )
        if p.parallel[i].all():  # meets the gradient that the sublayer before it meets
            for column, value in zip(held, (vv, vc, cv, cc), strict=True):
                column[..., layers] = value
            continue
        own = np.minimum(back.skip[..., i] ** 2, _LARGEST)
        later = skip[..., layers] ** 2
        n_vv, n_vc, n_cv, n_cc = (column[..., layers] for column in noise)
        noise.vv[..., layers] = own * n_vv + later * vv + vv * n_vv + vc * n_cv
        noise.vc[..., layers] = own * n_vc + later * vc + vv * n_vc + vc * n_cc
        noise.cv[..., layers] = own * n_cv + later * cv + cv * n_vv + cc * n_cv
        noise.cc[..., layers] = own * n_cc + later * cc + cv * n_vc + cc * n_cc
        skip[..., layers] *= np.sign(back.skip[..., i]) * np.sqrt(own)
    return skip, noise


def _removed(p: Parametrization, back: Returned, places: Sequence[tuple[Rowset, Rowset]]) -> FloatArray:
    """How many of the d features the post-norms of every layer take out of the skip path, or as good as.

    Each removes the direction of the sum before it. Two of one layer remove the same one as far as the later sum is
    the skip path. LayerNorm removes the mean as well, in all of them the same. The first layer of a stack meets
    embeddings whose sizes scatter by 1 / sqrt(2d), and so does the factor of its skip path.
    """
    layer_norm = p.architecture.norm == "layernorm"
    removed = np.zeros((*p.skip.shape[:-1], len(places[0][0])))
    for place, (layers, i) in enumerate(places):
        share = back.skip_share[..., i]
        if place == 0:
            uneven = (p.layer[i] == 0) & (not p.architecture.embedding_norm)
            directions = 1.0 + layer_norm + 0.5 * uneven * share**2
        else:
            directions = 1.0 - share
        removed[..., layers] += (p.placement[i] == POST) * directions
    return removed


def _log_gain(p: Parametrization, skip2: FloatArray, noise: BranchBackward) -> FloatArray:
    """ln of the gain from the end of its stack to every layer's input, of a gradient that is white at the end."""
    stack = p.stack[layer_starts(p)].tolist()
    columns = [np.moveaxis(column, -1, 0) for column in (skip2, *noise)]
    rows: Any = list(zip(*(c.tolist() if c.ndim == 1 else c for c in columns), strict=True))  # plain floats are fast
    out = np.empty(columns[0].shape)
    total: Array = 0.0
    r: Array = 0.0  # token correlation of the gradient
    for layer in range(len(rows) - 1, -1, -1):
        if layer + 1 < len(rows) and stack[layer] != stack[layer + 1]:
            total = r = 0.0
        a, vv, vc, cv, cc = rows[layer]
        variance = a + vv + vc * r
        r = correlation(a * r + cv + cc * r, variance)
        total = total + log(variance) / 2
        out[layer] = total
    return np.moveaxis(out, 0, -1)


@dataclass(frozen=True)
class GrowthFit:
    """How well laws fit the variances behind layers, and the exponent of the power that fits best.

    Attributes:
        logarithmic, linear, quadratic, exponential: R^2 of a straight line: of variances against the logarithm of the
            layer, and against the layer; of their root against the layer, and of their logarithm. best: the name of the
            largest.
        exponent: see `growth_exponent`.
    """

    logarithmic: float
    linear: float
    quadratic: float
    exponential: float
    exponent: float

    @property
    def best(self) -> str:
        """The law that fits best."""
        return max(("logarithmic", "linear", "quadratic", "exponential"), key=lambda name: getattr(self, name))


def growth_fit(variances: ArrayLike) -> GrowthFit:
    """Which law the variances of the outputs of layers 1, 2, ... of a stack follow.

    Raises:
        InputError: fewer than three, or one that is not positive.
    """
    y = _variances(variances)
    x = np.arange(1.0, len(y) + 1)
    return GrowthFit(_r2(np.log(x), y), _r2(x, y), _r2(x, np.sqrt(y)), _r2(x, np.log(y)), growth_exponent(y))


def growth_exponent(variances: ArrayLike) -> float:
    """p of variance ~ layer^p behind layers 1, 2, ... of a stack: least squares of logarithms, deeper three quarters.

    The first quarter is left out since what the embedding holds bends the curve there. Fresh pre-norm stacks have 1,
    branches aligned with the stream 2; with LayerNorm Scaling about 0 and 1 (docs/theory/depth.md).

    Raises:
        InputError: as `growth_fit`.
    """
    y = _variances(variances)
    deep = slice(len(y) // 4, None)
    return float(np.polyfit(np.log(np.arange(1.0, len(y) + 1))[deep], np.log(y[deep]), 1)[0])


def _variances(given: ArrayLike) -> FloatArray:
    y = np.asarray(given, np.float64)
    if y.ndim != 1 or len(y) < 3 or not (y > 0).all() or not np.isfinite(y).all():
        raise InputError("a growth law needs the positive variances of three or more layers, one number each")
    return y


def _r2(x: FloatArray, y: FloatArray) -> float:
    return float(np.corrcoef(x, y)[0, 1] ** 2) if np.ptp(y) > 1e-12 * np.abs(y).max() else 1.0


# --- Lemmas 1 and 3: the stream's variance -------------------------------------------------------------------------


def variance_recursion(
    n_layers: int, start: float = 1.0, *, increment: ArrayLike = 1.0, scaled: bool = False, form: Form = "corrected"
) -> FloatArray:
    """Variances sigma_1^2, ..., sigma_{n+1}^2 of the stream, by Lemma 1 (6), or with LayerNorm Scaling Lemma 3 (40).

    printed: sigma_{l+1}^2 = sigma_l^2 (1 + c / (t_l sigma_l)), t_l = 1 or sqrt(l), c^2 the increment. It is exactly
        solvable: c^2 l^2 / 4 (1 + o(1)), and l if sigma_1 = c = 1 with scaling. The 1/sigma_l stems from a correlation
        of branch and stream of 1, which the paper's assumption 1 excludes (errata to (13)-(15), (19)).
    corrected: sigma_l^2 + c^2 / t_l^2, uncorrelated as at initialisation: linear, with scaling logarithmic. (A gated
        branch falls with 1 / l^2 instead: give `increment` per layer.)

    Args:
        increment: variance that a layer's branches add before any scaling, one number or one per layer.

    Raises:
        InputError: no layer, or a negative number.
    """
    c2 = _increments(n_layers, start, increment)
    t2 = np.arange(1.0, n_layers + 1) if scaled else np.ones(n_layers)
    if form == "corrected":
        return np.concatenate([[start], start + np.cumsum(c2 / t2)])
    steps, v = np.sqrt(c2 / t2).tolist(), float(start)
    out = [v]
    for step in steps:
        v += step * math.sqrt(v)
        out.append(v)
    return np.array(out)


def variance_bounds(
    n_layers: int, start: float = 1.0, *, increment: ArrayLike = 1.0, scaled: bool = False, form: Form = "corrected"
) -> tuple[FloatArray, FloatArray]:
    """(lower, upper) bounds of sigma_1^2, ..., sigma_{n+1}^2; arguments and errors as `variance_recursion`.

    printed: the explicit bounds of the recursion (6) in the proof of Lemma 1, sigma_1^2 exp(sum(1/k - 1/2k)) after (23)
        and sigma_1^2 (1 + sqrt(c / sigma_1))^(l-1) of (22), "exp Theta(L)"; with scaling sigma_1^2 times (50), the same
        sum, and L^(2 - epsilon) of (41), epsilon = 1/4. They hold only for sigma_1 >= c: (22) has the square root of
        what it needs. The sum after (23) is for variances k^2, not k, and gives sqrt(L), not exp(sqrt(L)).
    corrected: uncorrelated branches, sigma_1^2 + sum c_k^2 / t_k^2, and aligned ones, (sigma_1 + sum c_k / t_k)^2 by
        the triangle inequality: l to l^2, with scaling ln l to l. The upper one holds for any weights, trained ones
        too, with branches of these variances, the lower one for branches not opposed to the stream.
    """
    c2 = _increments(n_layers, start, increment)
    layers = np.arange(1.0, n_layers + 1)
    t2 = layers if scaled else np.ones(n_layers)
    if form == "corrected":
        upper = np.concatenate([[0.0], np.cumsum(np.sqrt(c2 / t2))]) + math.sqrt(start)
        return variance_recursion(n_layers, start, increment=increment, scaled=scaled), upper**2
    lower = start * np.exp(np.concatenate([[0.0], np.cumsum(1 / (2 * layers))]))
    if scaled:
        return lower, start * np.arange(1.0, n_layers + 2) ** (2 - _EPSILON)
    factors = np.sqrt(np.sqrt(c2) / math.sqrt(start)) if start > 0 else np.full(n_layers, np.inf)
    return lower, start * np.exp(np.concatenate([[0.0], np.minimum(np.cumsum(np.log1p(factors)), 700.0)]))


def _increments(n_layers: int, start: float, increment: ArrayLike) -> FloatArray:
    c2 = np.asarray(increment, np.float64)
    if n_layers < 1 or not start >= 0 or not (c2 >= 0).all() or c2.shape not in ((), (n_layers,)):
        raise InputError(
            f"{n_layers} layers from variance {start} with increments of shape {c2.shape}; expected at least one "
            "layer, and variances >= 0, one or one per layer"
        )
    return np.array(np.broadcast_to(c2, n_layers))


# --- Theorems 1 and 2: the norm of the Jacobian --------------------------------------------------------------------


class Constants(NamedTuple):
    """A and B of Theorem 1 (9), and the bounds on the two branches' Jacobians (before a norm) that they come from."""

    a: FloatArray
    b: FloatArray
    feed_forward: FloatArray
    attention: FloatArray


def theorem_constants(
    d_model: int,
    d_ff: int,
    n_heads: int,
    d_head: int,
    n_tokens: int,
    std: ArrayLike | Mapping[str, ArrayLike],
    *,
    form: Form = "corrected",
) -> Constants:
    """A and B of Theorem 1 for weights of standard deviation `std`: a number, one per layer, or these by role.

    corrected: A = f + a, B = f a, the coefficients of the product (34) of the two factors, with
        f = s_up s_down (sqrt d + sqrt d_ff)^2 from (29), a = 2 d h kappa s_v s_o (s_q s_k d sqrt(d_head) + 1 +
        sqrt(d_head / d)), kappa = sqrt T + 2 + 1 / sqrt T. For activations of slope up to 1; a gated feed-forward
        counts as its up and down projections alone, so that there the bound is of order, not strict.
    printed: (36) and (37). (30) and with it (36) divide by (sqrt d + sqrt d_ff)^2 instead of multiplying; (36) lacks
        the s_q s_k on d sqrt(d_head), (37) is not the product's second coefficient.

    Raises:
        InputError: a width below 1, a negative standard deviation, or a missing role.
    """
    if min(d_model, d_ff, n_heads, d_head, n_tokens) < 1:
        raise InputError("widths, heads and tokens of Theorem 1 are whole numbers; expected 1 or more of each")
    roles = ("query", "key", "value", "output", "up", "down")
    if isinstance(std, Mapping):
        missing = [role for role in roles if role not in std]
        if missing:
            raise InputError(f"std has no {', '.join(missing)}; expected one number for all roles, or all six roles")
        q, k, v, o, up, down = (np.asarray(std[role], np.float64) for role in roles)
    else:
        q = k = v = o = up = down = np.asarray(std, np.float64)
    if any(not (s >= 0).all() for s in (q, k, v, o, up, down)):
        raise InputError("a standard deviation is negative or NaN; expected numbers >= 0")
    widths = (math.sqrt(d_model) + math.sqrt(d_ff)) ** 2
    kappa = math.sqrt(n_tokens) + 2 + 1 / math.sqrt(n_tokens)
    outer = 2 * d_model * n_heads * kappa * v * o
    scores = d_model * math.sqrt(d_head)
    through_values = 1 + math.sqrt(d_head / d_model)
    if form == "corrected":
        feed_forward, attention = up * down * widths, outer * (q * k * scores + through_values)
        return Constants(feed_forward + attention, feed_forward * attention, feed_forward, attention)
    feed_forward, attention = up * down / widths, outer * (scores + through_values)
    return Constants(feed_forward + attention, outer * q * k * scores, feed_forward, attention)


def log_jacobian_bound(
    variances: ArrayLike, a: ArrayLike, b: ArrayLike, *, scaled: bool = False, form: Form = "corrected"
) -> FloatArray:
    """ln of the products (9) of Theorem 1, or with LayerNorm Scaling (42) of Theorem 2, over layers 1..l for every l.

    Factors 1 + A / (t_l sigma_l) + B / (t_l sigma_l)^2. Without scaling t_l = 1 and both forms are one (their A and B
    differ, see `theorem_constants`). With it t_l = sqrt(l) corrected, l as printed: the factor l^-1/2 is in each
    branch once (erratum to (52)-(55)).

    Args:
        variances: sigma_l^2 of the streams that enter the layers.

    Raises:
        InputError: a variance that is not positive.
    """
    v = np.asarray(variances, np.float64)
    if not (v > 0).all():
        raise InputError("a variance of the stream is not positive; expected numbers > 0")
    t = np.arange(1.0, v.shape[-1] + 1) ** (0.0 if not scaled else 0.5 if form == "corrected" else 1.0)
    sigma = t * np.sqrt(v)
    return np.asarray(np.cumsum(np.log1p(np.asarray(a) / sigma + np.asarray(b) / sigma**2), axis=-1))


def log_bound_rate(
    n_layers: ArrayLike, a: float, b: float, growth: Growth, *, scaled: bool = False, form: Form = "corrected"
) -> FloatArray:
    """ln of what the products of `log_jacobian_bound` grow like with depth L, leading terms, where variances are

        exponential e^l, quadratic l^2, linear l, logarithmic ln l.

    corrected, Theorem 1: bounded by exp(A / (sqrt e - 1) + B / (e - 1)); L^A; exp(2 A sqrt L) L^(B - A^2/2); (none).
        Theorem 2: (none); bounded by exp(A zeta(3/2) + B zeta(3)); L^A; exp(2 A sqrt(L / ln L)).
    printed, Theorem 1: (38) for the exponential, which takes sigma = e^l for sigma^2 and expands a logarithm beyond
        its radius of convergence; (39), "Theta(L)", for the linear. Theorem 2: (57) for L^(2 - epsilon), epsilon = 1/4,
        here `quadratic`, "omega(1)"; (44), "Theta(L)", for the linear. Both Theta(L) stand for (A's power of) L.

    Raises:
        InputError: the paper, or its correction, has no rate for that growth.
    """
    n = np.asarray(n_layers, np.float64)
    e, root_e = math.e, math.sqrt(math.e)
    rates: dict[tuple[str, bool, str], FloatArray | float] = {
        ("exponential", False, "corrected"): a / (root_e - 1) + b / (e - 1),
        ("quadratic", False, "corrected"): a * np.log(n),
        ("linear", False, "corrected"): 2 * a * np.sqrt(n) + (b - a**2 / 2) * np.log(n),
        ("quadratic", True, "corrected"): a * 2.6123753486854883 + b * 1.2020569031595943,  # zeta(3/2), zeta(3)
        ("linear", True, "corrected"): a * np.log(n),
        ("logarithmic", True, "corrected"): 2 * a * np.sqrt(n / np.log(np.maximum(n, 2.0))),
        ("exponential", False, "printed"): a / (e - 1)
        + b / (e**2 - 1)
        - (a**2 / (e**2 - 1) + 2 * a * b / (e**3 - 1) + b**2 / (e**4 - 1)) / 2,
        ("linear", False, "printed"): np.log(n),
        ("quadratic", True, "printed"): a * (n ** (_EPSILON / 2 - 1) - 1) / (_EPSILON / 2 - 1)
        + b * (n ** (_EPSILON - 3) - 1) / (_EPSILON - 3),
        ("linear", True, "printed"): np.log(n),
    }
    if (growth, scaled, form) not in rates:
        known = sorted({name for name, s, f in rates if s == scaled and f == form})
        theorem = "Theorem 2" if scaled else "Theorem 1"
        raise InputError(f"{theorem} ({form}) has no rate for growth {growth!r}; expected {', '.join(known)}")
    return np.array(np.broadcast_to(rates[growth, scaled, form], n.shape))


# --- both, for a Parametrization -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class DepthBounds:
    """Variances and bounds of every layer beside each other; arrays (..., layers), encoder first.

    Attributes:
        form: printed or corrected.
        log_variance: of the stream that the layer puts out, from the profile.
        log_uncorrelated, log_aligned: the same if the profile's branches were uncorrelated with the stream (as at
            initialisation), and if they were parallel to it (no weights can do more with them).
        log_factor: ln of the layer's factor in the bound of Theorem 1 (of Theorem 2 where norms are scaled).
        log_bound: ln of the bound on |dy/dx|_2 from the input of the stack to the layer's output.
    """

    form: Form
    log_variance: FloatArray
    log_uncorrelated: FloatArray
    log_aligned: FloatArray
    log_factor: FloatArray
    log_bound: FloatArray

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary, a list per array."""
        return {name: value if name == "form" else value.tolist() for name, value in vars(self).items()}


@typed
def depth_bounds(parametrization: Parametrization, profile: Profile, *, form: Form = "corrected") -> DepthBounds:
    """Lemma 1 and Theorem 1 (Lemma 3 and Theorem 2 under LayerNorm Scaling) for a network's weights and variances.

    Args:
        parametrization: also of a live or trained model, by `sp.read_parametrization`.
        profile: predicted or measured.
        form: `printed` is the product (9), or (42) with the scale on norms squared, at the variance that enters the
            layer; `corrected` takes a factor skip + |branch| * norms * constant per sublayer, at the variance that its
            norm meets, for pre-norm and post-norm.

    Raises:
        InputError: attention is shaped, another placement than pre-norm (corrected: or post-norm), or the profile is of
            another number of sublayers.
    """
    p = _as_run(parametrization, profile)
    allowed = (PRE,) if form == "printed" else (PRE, POST)
    others = sorted({PLACEMENTS[k] for k in set(p.placement.tolist()) - set(allowed)})
    if others:
        names = " or ".join(PLACEMENTS[k] for k in allowed)
        raise InputError(f"Theorem 1 ({form}) needs norm placement {names}; this network has {', '.join(others)}")
    a, starts = p.architecture, layer_starts(p)
    constants = theorem_constants(a.d_model, a.d_ff, a.n_heads, a.d_head, a.seq_len, p.weights, form=form)
    if form == "printed":
        variance = safe_exp(profile.forward["stream_in"].log_variance[..., starts])
        sigma = np.sqrt(variance) / p.norm_scale[..., starts] ** 2
        log_factor = np.log1p(_by_layer(p, constants.a) / sigma + _by_layer(p, constants.b) / sigma**2)
    else:
        log_factor = _by_layer(p, _log_factors(p, profile, constants.a))
    ends = np.append(starts[1:], p.n_sublayers) - 1
    uncorrelated, aligned = _extremes(p, profile)
    whole = _from_the_end(p, log_factor)
    stack = p.stack[starts]
    first = np.array([np.flatnonzero(stack == s)[0] for s in stack])
    return DepthBounds(
        form=form,
        log_variance=profile.forward["stream_out"].log_variance[..., ends],
        log_uncorrelated=uncorrelated[..., ends],
        log_aligned=aligned[..., ends],
        log_factor=log_factor,
        log_bound=whole[..., first] - whole + log_factor,
    )


def _log_factors(p: Parametrization, profile: Profile, constant: FloatArray) -> FloatArray:
    """ln of a bound on the norm of every sublayer's Jacobian, from one on its branch's for inputs of size 1."""
    stream, branch = (profile.forward[point].log_variance for point in ("stream_in", "branch"))
    stream, branch = np.maximum(stream, NO_SIGNAL), np.maximum(branch, NO_SIGNAL)
    epsilon = log(float(p.architecture.norm_eps))
    skip = np.where(p.parallel, 1.0, np.abs(p.skip))
    pre = p.placement == PRE
    met = np.where(pre, stream, np.logaddexp(log(skip**2) + stream, log(p.branch**2) + branch))
    norm = log(np.abs(p.norm_output)) - np.logaddexp(met, epsilon) / 2
    read = np.where(pre, p.norm_output**2, safe_exp(stream))  # larger inputs have larger scores
    scale = np.abs(p.branch) * constant * np.maximum(read, 1.0)
    return np.where(pre, np.log(skip + scale * safe_exp(norm)), norm + np.log(skip + scale))


def _extremes(p: Parametrization, profile: Profile) -> tuple[FloatArray, FloatArray]:
    """ln of every stream_out's variance, with uncorrelated branches and with aligned ones."""
    stream, after = profile.forward["stream_in"].log_variance, profile.forward["stream_out"].log_variance
    log_skip = log(np.where(p.parallel, 1.0, p.skip**2))
    log_branch = log(p.branch**2) + np.maximum(profile.forward["branch"].log_variance, NO_SIGNAL)
    low, high = np.empty(stream.shape), np.empty(stream.shape)
    least: Array
    most: Array
    for i in range(p.n_sublayers):
        if i == 0 or p.stack[i] != p.stack[i - 1]:
            least = most = np.maximum(stream[..., i], NO_SIGNAL)
        least = log_add(log_skip[..., i] + least, log_branch[..., i])
        most = 2 * log_add((log_skip[..., i] + most) / 2, log_branch[..., i] / 2)
        if p.placement[i] == POST:
            least = most = after[..., i]
        low[..., i], high[..., i] = least, most
    return low, high

"""Moments through the single components of a transformer, forward and backward.

Every forward function takes the Moments of its input and returns those of its output; every `*_backward`
takes the Moments of the gradient at the output and returns those of the gradient at the input. All fields
broadcast. Standing assumptions: weights are independent, zero-mean and independent of the input; gradients
have zero mean and are independent of the forward values and of the layer's own weights. The formulas are
derived, with their validity and measured error, in docs/theory/components.md; TGS is Transformers Get Stable
(Kedia et al., 2024).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from signalprop.errors import InputError
from signalprop.network.activations import central_dual
from signalprop.network.moments import Array, FloatArray, Moments, ratio


def _like(value: FloatArray) -> Array:
    return value if value.ndim else float(value)


def _clip(value: Array, low: Array, high: Array) -> Array:
    return _like(np.asarray(np.clip(value, low, high)))


def _where(condition: NDArray[np.bool_], then: Array, otherwise: Array) -> Array:
    return _like(np.asarray(np.where(condition, then, otherwise)))


# --- embeddings, linear maps, dropout -------------------------------------------------------------


def embedding_sum(variances: Sequence[Array], correlations: Sequence[Array], dropout: Array = 0.0) -> Moments:
    """Sum of independent embedding tables, then dropout (TGS v1 B.1, plus the dropout that it omits).

    Args:
        variances: variance of one entry of each table.
        correlations: token correlation that each table produces (token ids: sum of p_i^2; segments: 2/3;
            learned positions: 0).
        dropout: embedding dropout probability in [0, 1).

    Raises:
        InputError: a different number of variances and correlations, none at all, or a bad dropout.
    """
    if not len(variances) or len(variances) != len(correlations):
        raise InputError(
            f"embedding_sum got {len(variances)} variances and {len(correlations)} correlations; "
            "expected one of each per embedding table"
        )
    variance: Array = 0.0
    covariance: Array = 0.0
    for v, r in zip(variances, correlations, strict=True):
        variance = variance + v
        covariance = covariance + v * r
    tables = Moments(variance=variance, token_correlation=ratio(covariance, variance))
    return _dropped(tables, dropout)


def linear(x: Moments, fan_in: int, weight_variance: Array, bias_variance: Array = 0.0) -> Moments:
    """Linear map with independent zero-mean weights (TGS v1 B.2); exact for any input distribution.

    Args:
        x: moments of the input features.
        fan_in: number of input features.
        weight_variance: variance of one weight.
        bias_variance: variance of a random bias. One draw serves all tokens, so it adds to variance and
            covariance.

    Raises:
        InputError: fan_in below 1 or a negative variance.
    """
    _check_linear("fan_in", fan_in, weight_variance, bias_variance)
    gain = fan_in * weight_variance
    variance = gain * x.second_moment + bias_variance
    covariance = gain * (x.covariance + x.mean**2) + bias_variance
    return Moments(variance=variance, token_correlation=_clip(ratio(covariance, variance), -1, 1))


def linear_backward(g: Moments, fan_out: int, weight_variance: Array) -> Moments:
    """Gradient at the input of a map with `fan_out` outputs (TGS v1 B.2); exact. Raises as `linear`."""
    _check_linear("fan_out", fan_out, weight_variance, 0.0)
    variance = fan_out * weight_variance * g.second_moment
    return Moments(variance=variance, token_correlation=g.token_correlation)


def linear_weight_gradient(x: Moments, g: Moments, tokens: int) -> Array:
    """Expected square of one weight's gradient, summed over `tokens` tokens (components.md, section 2).

    Args:
        x: moments of the layer's input.
        g: moments of the gradient at its output, independent of x.
        tokens: number of tokens that the gradient sums over. Pairs of tokens are taken to share the
            correlations of x and g, so tokens of independent sequences must be added up by sequence.
    """
    pairs = tokens * (tokens - 1)
    return tokens * x.second_moment * g.variance + pairs * (x.covariance + x.mean**2) * g.covariance


def _check_linear(name: str, fan: int, weight_variance: Array, bias_variance: Array) -> None:
    if fan < 1:
        raise InputError(f"{name} is {fan}; expected a whole number of features, 1 or more")
    if np.any(np.asarray(weight_variance) < 0) or np.any(np.asarray(bias_variance) < 0):
        raise InputError("a weight or bias variance is negative; expected variances >= 0, not logarithms")


def dropout(x: Moments, p: Array) -> Moments:
    """Dropout with independent masks, kept entries divided by 1 - p (TGS v1 B.3); exact for any input.

    Raises:
        InputError: p outside [0, 1).
    """
    return _dropped(x, p)


def _dropped(x: Moments, p: Array) -> Moments:
    if not np.all((np.asarray(p) >= 0) & (np.asarray(p) < 1)):
        raise InputError(f"dropout probability is {p}; expected 0 <= p < 1: the share dropped, not the share kept")
    variance = (x.variance + p * x.mean**2) / (1 - p)
    kept = ratio(x.variance, variance)
    return Moments(x.mean, variance, x.token_correlation * kept, x.feature_correlation * kept)


def dropout_backward(g: Moments, p: Array) -> Moments:
    """Gradient at the input of dropout: variance / (1 - p), covariances unchanged (TGS v1 B.3); exact."""
    return _dropped(g, p)


# --- activations ----------------------------------------------------------------------------------


def activate(x: Moments, name: str) -> Moments:
    """Element-wise activation of a zero-mean Gaussian (TGS v1 B.4, B.5: ReLU and GeLU); as exact as `dual`.

    Raises:
        InputError: unknown activation, or x has a mean: the formulas are for the output of a linear map.
    """
    _check_centred(x, name)
    token = central_dual(name, x.variance, x.token_correlation)
    feature: Array = 0.0
    if np.any(np.asarray(x.feature_correlation) != 0):
        across = central_dual(name, x.variance, x.feature_correlation)
        feature = ratio(across.covariance, across.variance)
    return Moments(token.mean, token.variance, ratio(token.covariance, token.variance), feature)


def activate_backward(g: Moments, x: Moments, name: str) -> Moments:
    """Gradient at the input of `activate(x, name)`; errors as there."""
    _check_centred(x, name)
    slope = central_dual(name, x.variance, x.token_correlation)
    token = g.token_correlation * ratio(slope.slope_moment, slope.slope_second_moment)
    feature: Array = 0.0
    if np.any(np.asarray(g.feature_correlation) != 0):
        across = central_dual(name, x.variance, x.feature_correlation)
        feature = g.feature_correlation * ratio(across.slope_moment, across.slope_second_moment)
    return Moments(0.0, g.variance * slope.slope_second_moment, token, feature)


def _check_centred(x: Moments, name: str) -> None:
    if np.any(np.abs(x.mean) > 1e-6 * np.sqrt(x.variance)):
        raise InputError(
            f"activation {name!r}: its input has mean {x.mean}; expected mean 0; pass the moments after the linear map"
        )


# --- normalisation --------------------------------------------------------------------------------


def mean_sample_correlation(r: Array, n: int) -> Array:
    """Mean of the cosine between two n-dimensional Gaussian vectors whose entries have correlation r.

    rho_n(r) = r F(1/2, 1/2; n/2 + 1; r^2) / F(1/2, 1/2; n/2 + 1; 1), with F Gauss's hypergeometric function:
    exactly +-1 at r = +-1, and r (1 - (1 - r^2) / 2n) for large n. n = 0 gives 0. The denominator equals
    Gauss's product of gamma functions, whose direct evaluation loses digits when n is large. Error below
    2e-15, at n = 1 below 1e-12.
    """
    if n == 0:
        return 0.0 * r
    r = np.clip(np.asarray(r, float), -1.0, 1.0)
    return _like(np.asarray(r * _hypergeometric(0.5, n / 2 + 1, r) / _hypergeometric(0.5, n / 2 + 1, 1.0)))


def layer_norm(x: Moments, d: int, finite_width: bool = True) -> Moments:
    """LayerNorm over d features, gain 1, bias 0 (TGS v1 B.6 with its finite-width covariance corrected).

    Exact for Gaussian features that are independent, or that share one common component: centring removes
    it. d = 1 outputs 0, and so does an input of variance 0, or of feature correlation 1.

    Args:
        x: moments of the input; its mean and feature correlation drop out.
        d: number of features.
        finite_width: False gives d -> infinity. Use that in whole-model recursions: successive norms
            project out nearly the same directions, so their 1/d terms must not be compounded.

    Raises:
        InputError: d below 1.
    """
    _check_width(d)
    alive = np.asarray(x.variance * (1 - x.feature_correlation)) > 0
    if not finite_width:
        return Moments(0.0, _where(alive, 1.0, 0.0), _where(alive, x.token_correlation, 0.0))
    if d == 1:
        return Moments(0.0, _where(alive, 0.0, 0.0), _where(alive, 0.0, 0.0))
    token = mean_sample_correlation(x.token_correlation, d - 1)
    return Moments(0.0, _where(alive, 1.0, 0.0), _where(alive, token, 0.0), _where(alive, -1 / (d - 1), 0.0))


def layer_norm_backward(g: Moments, x: Moments, d: int, finite_width: bool = True) -> Moments:
    """Gradient at the input of `layer_norm(x, d)`: variance (d-2)/(d-3) / variance of x; as exact as it.

    d <= 2 gives 0: the norm is then locally constant. At d = 3 the expectation is infinite; the variance
    returned there is its value at the median norm of x, 1 / (2 ln 2), and the token correlation is left
    as it was. An input without spread gives 0. Arguments and errors as `layer_norm`.
    """
    _check_width(d)
    spread = x.variance * (1 - x.feature_correlation)
    variance = ratio(g.variance * (1 - g.feature_correlation), spread)
    if not finite_width:
        return Moments(0.0, variance, g.token_correlation)
    scale, overlap = _norm_jacobian(d - 1, x.token_correlation)
    feature = _where(np.asarray(variance * scale) > 0, -1 / max(d - 1, 1), 0.0)
    return Moments(0.0, variance * scale, g.token_correlation * overlap, feature)


def rms_norm(x: Moments, d: int, finite_width: bool = True) -> Moments:
    """RMSNorm over d features, gain 1 (not in TGS; components.md, section 5).

    Exact for mean 0 and independent Gaussian features. With a mean, an expansion to first order in 1/d. A
    feature correlation is passed on as if the norm of x did not fluctuate: 27 % too high at 0.2.
    Variance and mean 0 give 0. Arguments and errors as `layer_norm`.
    """
    _check_width(d)
    x = _normal(x)
    power = x.second_moment
    share = ratio(x.variance, power)
    bias = ratio(x.mean, np.sqrt(power))
    product = ratio(x.covariance + x.mean**2, power)
    if finite_width:
        spread, cross, mixed = _power_fluctuation(share, x.token_correlation, d)
        bias = _clip(bias * (1 + 3 * spread / 8 - share / d), -1, 1)
        expanded = product * (1 + 3 * spread / 4 + cross / 4) - mixed
        exact = mean_sample_correlation(x.token_correlation, d)
        product = _where(np.asarray(x.mean) == 0, exact, _clip(expanded, -1, 1))
    variance = _where(np.asarray(power) > 0, 1 - bias**2, 0.0)
    token = _clip(ratio(product - bias**2, variance), -1, 1)
    token = _where(np.asarray(x.variance) > 0, token, 0.0)
    return Moments(bias, variance, token, _where(np.asarray(variance) > 0, x.feature_correlation, 0.0))


def rms_norm_backward(g: Moments, x: Moments, d: int, finite_width: bool = True) -> Moments:
    """Gradient at the input of `rms_norm(x, d)`: for mean 0, variance (d-1)/(d-2) / variance of x, exactly.

    With a mean, an expansion to first order in 1/d (leading order if the gradient's features are correlated
    too). d = 1 gives 0; at d = 2 and mean 0 the expectation is infinite, and the variance returned is its
    value at the median norm of x, 1 / (2 ln 2). An input of mean and variance 0 gives 0. Arguments and
    errors as `layer_norm`.
    """
    _check_width(d)
    x = _normal(x)
    share = ratio(x.variance, x.second_moment)
    bias2 = 1 - share
    cosine = ratio(x.covariance + x.mean**2, x.second_moment)
    # The mean of x lies along the common component of the gradient's features: the norm removes part of it.
    own_kept = 1 - g.feature_correlation * bias2
    pair_kept = 1 - g.feature_correlation * bias2 * (2 - cosine)
    common = g.feature_correlation * (1 - bias2) ** 2
    scale: Array = 1.0
    overlap: Array = 1.0
    if finite_width:
        scale, overlap = _norm_jacobian(d, x.token_correlation)
        if np.any(np.asarray(x.mean) != 0):
            spread, cross, _ = _power_fluctuation(share, x.token_correlation, d)
            own = (1 - 1 / d) * (1 + spread)
            pair = (1 - (2 - cosine**2) / d) * (1 + 3 * spread / 4 + cross / 4)
            centred = np.asarray(x.mean) == 0
            scale, overlap = _where(centred, scale, own), _where(centred, overlap, ratio(pair, own))
        common = common * ((d * d - 2) / ((d + 2) * (d - 1)) if d > 1 else 0.0)
        common = common - (1 - g.feature_correlation) * bias2 / d
    token = _clip(g.token_correlation * overlap * ratio(pair_kept, own_kept), -1, 1)
    variance = ratio(g.variance, x.second_moment) * scale * own_kept
    return Moments(0.0, _clip(variance, 0.0, np.inf), token, _clip(ratio(common, own_kept), -1, 1))


def _normal(x: Moments) -> Moments:
    """x with a mean of 0 where its square would be no normal double, and lose its digits."""
    return replace(x, mean=_where(np.abs(x.mean) < 1e-150, 0.0, x.mean))


def _check_width(d: int) -> None:
    if d < 1:
        raise InputError(f"a norm over d = {d} features; expected a whole number, 1 or more; pass d_model")


def _power_fluctuation(share: Array, r: Array, d: int) -> tuple[Array, Array, Array]:
    """Fluctuations, of order 1/d, of the mean squares of two tokens of second moment 1 and variance `share`.

    Returns the variance of one, the covariance of both, and that of one with the tokens' mean product.
    """
    mean_square = 1 - share
    spread = (2 * share**2 + 4 * mean_square * share) / d
    cross = (2 * (r * share) ** 2 + 4 * mean_square * r * share) / d
    mixed = (2 * r * share**2 + 2 * mean_square * share * (1 + r)) / d
    return spread, cross, mixed


def _norm_jacobian(n: int, r: Array) -> tuple[float, Array]:
    """E tr(P_u) / |u|^2, and E tr(P_u P_v) / (|u| |v|) relative to it; u, v Gaussian n-vectors.

    P_u projects out the direction of u. This is what a norm does to the gradient's variance and token
    correlation.
    """
    if n <= 1:
        return 0.0, 0.0 * r
    if n == 2:  # E 1/|u|^2 diverges; the median of |u|^2 is 2 ln 2
        return 1 / (2 * math.log(2)), np.ones_like(r, dtype=float) if np.ndim(r) else 1.0
    r = np.clip(np.asarray(r, float), -1.0, 1.0)
    z, rest = r * r, (1 - r) * (1 + r)
    safe = np.where(rest > 0, r, 0.0)  # the second hypergeometric diverges at 1, where the overlap is 1
    unit = (n - 2) * _hypergeometric(0.5, n / 2, r)
    aligned = rest * _hypergeometric(1.5, n / 2 + 1, safe) + z * (n - 1) ** 2 / (n + 2) * _hypergeometric(
        1.5, n / 2 + 2, safe
    )
    overlap = (unit + aligned / n) / ((n - 1) * _hypergeometric(0.5, n / 2, 1.0))
    return (n - 1) / (n - 2), _like(np.where(rest > 0, np.clip(overlap, 0.0, 1.0), 1.0))


# From this c on the power series of F(a, a; c; z) converges fast even at z = 1.
_SERIES_FROM = 17.0


def _hypergeometric(a: float, c: float, r: Array) -> FloatArray:
    """F(a, a; c; r^2) for a = 1/2 or 3/2 and c > a, by its power series or by Euler's integral."""
    r = np.clip(np.asarray(r, float), -1.0, 1.0)
    if c >= _SERIES_FROM:
        return np.asarray(np.polynomial.polynomial.polyval(r * r, _series(a, c)))
    node, weight = _euler_rule(a, c)
    rest = np.asarray((1 - r) * (1 + r))[..., None]
    return np.asarray((rest * np.cos(node) ** 2 + np.sin(node) ** 2) ** -a @ weight)


@lru_cache(maxsize=256)
def _series(a: float, c: float) -> FloatArray:
    terms = [1.0]
    while terms[-1] > 1e-18:
        k = len(terms) - 1
        terms.append(terms[-1] * (a + k) ** 2 / ((c + k) * (k + 1)))
    return np.array(terms)


@lru_cache(maxsize=256)
def _euler_rule(a: float, c: float) -> tuple[FloatArray, FloatArray]:
    """Double-exponential nodes on (0, pi/2), and weights cos^(2a-1) sin^(2c-2a-1) of sum 1.

    The nodes crowd exponentially towards 0, where the integrand changes over sqrt(1 - r^2) however small
    that is.
    """
    t = np.arange(-3.6, 3.6, 0.05)
    logistic = 1 / (1 + np.exp(-np.pi * np.sinh(t)))
    node = np.pi / 2 * logistic
    jacobian = np.cosh(t) * logistic * (1 - logistic)
    weight = jacobian * np.cos(node) ** (2 * a - 1) * np.sin(node) ** (2 * c - 2 * a - 1)
    return node, np.asarray(weight / weight.sum())

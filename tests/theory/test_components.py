"""Component formulas against special functions and Monte Carlo with standard errors, and their invariants."""

from __future__ import annotations

import warnings

import mpmath
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from signalprop.errors import InputError
from signalprop.network.activations import ACTIVATIONS
from signalprop.network.moments import Moments
from signalprop.theory import components as c

SAMPLES = 40_000


def gaussian(rng, m: Moments, d: int, n: int = SAMPLES):
    """Two tokens of d features, shape (n, 2, d), with separable token and feature correlation."""
    token = np.sqrt(m.token_correlation), np.sqrt(1 - m.token_correlation)
    feature = np.sqrt(m.feature_correlation), np.sqrt(1 - m.feature_correlation)

    def tokens(width):
        return token[0] * rng.standard_normal((n, 1, width)) + token[1] * rng.standard_normal((n, 2, width))

    z = feature[1] * tokens(d)
    if m.feature_correlation:
        z = z + feature[0] * tokens(1)
    return m.mean + np.sqrt(m.variance) * z


def assert_matches(x, expected: Moments, bias: float = 0.0):
    """Compare samples (n, 2, d) with Moments, each quantity to 4.5 standard errors of its mean over n draws.

    `bias`: documented relative error of an approximate formula, added to the tolerance.
    """

    def check(per_draw, value, what):
        error = per_draw.std(ddof=1) / np.sqrt(len(per_draw))
        scale = abs(expected.variance) + expected.mean**2
        assert abs(per_draw.mean() - value) <= 4.5 * error + bias * scale + 1e-12, what

    d = x.shape[-1]
    check(x.mean(axis=(1, 2)), expected.mean, "mean")
    check((x**2).mean(axis=(1, 2)), expected.second_moment, "second moment")
    check((x[:, 0] * x[:, 1]).mean(axis=1), expected.covariance + expected.mean**2, "token covariance")
    if d > 1:
        sums = x.sum(axis=2) ** 2 - (x**2).sum(axis=2)
        product = expected.feature_correlation * expected.variance + expected.mean**2
        check(sums.mean(axis=1) / (d * (d - 1)), product, "feature covariance")


# --- embeddings, linear, dropout ------------------------------------------------------------------


def test_embedding_sum_of_bert():
    zipf = 0.01372
    m = c.embedding_sum([1.0, 1.0, 1.0], [zipf, 2 / 3, 0.0])
    assert m.variance == 3 and m.token_correlation == pytest.approx(0.2268, abs=5e-5)
    # Erratum 2: embedding dropout multiplies the correlation by 1 - p.
    dropped = c.embedding_sum([0.3, 0.3, 0.3], [zipf, 2 / 3, 0.0], dropout=0.1)
    assert dropped.variance == pytest.approx(1.0)
    assert dropped.token_correlation == pytest.approx(0.204, abs=5e-4)


def test_embedding_sum_simulated():
    rng = np.random.default_rng(0)
    p, d, n = np.array([0.5, 0.3, 0.2]), 2, SAMPLES
    ids = rng.choice(3, size=(n, 2), p=p)
    table = rng.standard_normal((n, 3, d)) * np.sqrt(2.0)
    position = rng.standard_normal((n, 2, d)) * np.sqrt(0.5)
    x = np.take_along_axis(table, ids[:, :, None], axis=1) + position
    x = x * (rng.random(x.shape) >= 0.2) / 0.8
    assert_matches(x, c.embedding_sum([2.0, 0.5], [float((p**2).sum()), 0.0], dropout=0.2))


@pytest.mark.parametrize("bias_variance", [0.0, 0.7])
def test_linear_forward_and_backward(bias_variance):
    rng = np.random.default_rng(1)
    x_moments = Moments(0.4, 1.5, 0.3)
    g_moments = Moments(0.0, 0.8, 0.6)
    fan_in, fan_out, weight_variance = 6, 4, 0.2
    x, g = gaussian(rng, x_moments, fan_in), gaussian(rng, g_moments, fan_out)
    w = rng.standard_normal((SAMPLES, fan_in, fan_out)) * np.sqrt(weight_variance)
    b = rng.standard_normal((SAMPLES, 1, fan_out)) * np.sqrt(bias_variance)
    assert_matches(x @ w + b, c.linear(x_moments, fan_in, weight_variance, bias_variance))
    assert_matches(g @ w.transpose(0, 2, 1), c.linear_backward(g_moments, fan_out, weight_variance))
    squares = ((x.transpose(0, 2, 1) @ g) ** 2).mean(axis=(1, 2))
    expected = c.linear_weight_gradient(x_moments, g_moments, tokens=2)
    assert abs(squares.mean() - expected) < 4.5 * squares.std() / np.sqrt(SAMPLES)


def test_dropout_forward_and_backward():
    rng = np.random.default_rng(2)
    for m in (Moments(0.7, 1.3, 0.4, 0.25), Moments(0.0, 1.3, 0.4, 0.0)):
        x = gaussian(rng, m, 5)
        kept = (rng.random(x.shape) >= 0.3) / 0.7
        assert_matches(x * kept, c.dropout(m, 0.3))
    assert_matches(x * kept, c.dropout_backward(m, 0.3))


# --- activations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["relu", "gelu", "silu", "tanh", "relu2", "leaky_relu", "elu", "sigmoid"])
def test_activation_forward_and_backward(name):
    rng = np.random.default_rng(3)
    x_moments, g_moments = Moments(0.0, 1.7, 0.5, 0.2), Moments(0.0, 0.6, 0.7, 0.3)
    x, g = gaussian(rng, x_moments, 4), gaussian(rng, g_moments, 4)
    assert_matches(ACTIVATIONS[name].function(x), c.activate(x_moments, name))
    assert_matches(g * ACTIVATIONS[name].derivative(x), c.activate_backward(g_moments, x_moments, name))


# --- norms ----------------------------------------------------------------------------------------


def layer_norm(x):
    x = x - x.mean(axis=-1, keepdims=True)
    return rms_norm(x)


def rms_norm(x):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True))


def project(g, unit, scale):
    return (g - unit * (g * unit).mean(axis=-1, keepdims=True)) / scale


def layer_norm_jacobian(g, x):
    x = x - x.mean(axis=-1, keepdims=True)
    g = g - g.mean(axis=-1, keepdims=True)
    return rms_norm_jacobian(g, x)


def rms_norm_jacobian(g, x):
    return project(g, rms_norm(x), np.sqrt((x**2).mean(axis=-1, keepdims=True)))


@pytest.mark.parametrize("d", [2, 3, 4, 16, 40])
@pytest.mark.parametrize(("r", "r_d"), [(0.0, 0.0), (0.7, 0.0), (0.95, 0.5)])
def test_layer_norm_forward(d, r, r_d):
    rng = np.random.default_rng(4)
    m = Moments(0.8, 2.0, r, r_d)
    assert_matches(layer_norm(gaussian(rng, m, d, SAMPLES // 2)), c.layer_norm(m, d))


@pytest.mark.parametrize("d", [2, 8, 16, 40])
@pytest.mark.parametrize(("r", "r_d"), [(0.0, 0.0), (0.7, 0.0), (0.95, 0.5)])
def test_layer_norm_backward(d, r, r_d):
    rng = np.random.default_rng(5)
    x, g = Moments(0.8, 2.0, r, r_d), Moments(0.0, 0.5, 0.6, r_d)
    draws = layer_norm_jacobian(gaussian(rng, g, d, SAMPLES // 2), gaussian(rng, x, d, SAMPLES // 2))
    assert_matches(draws, c.layer_norm_backward(g, x, d))


@pytest.mark.parametrize("d", [1, 2, 8, 16, 40])
@pytest.mark.parametrize("r", [0.0, 0.7, 0.95])
def test_rms_norm_forward(d, r):
    rng = np.random.default_rng(6)
    m = Moments(0.0, 2.0, r)
    assert_matches(rms_norm(gaussian(rng, m, d, SAMPLES // 2)), c.rms_norm(m, d))


@pytest.mark.parametrize("d", [8, 16, 40])
@pytest.mark.parametrize(("r", "r_g_d"), [(0.0, 0.0), (0.7, 0.0), (0.95, 0.5)])
def test_rms_norm_backward(d, r, r_g_d):
    rng = np.random.default_rng(7)
    x, g = Moments(0.0, 2.0, r), Moments(0.0, 0.5, 0.6, r_g_d)
    draws = rms_norm_jacobian(gaussian(rng, g, d, SAMPLES // 2), gaussian(rng, x, d, SAMPLES // 2))
    assert_matches(draws, c.rms_norm_backward(g, x, d))


@pytest.mark.parametrize("d", [32, 128])
@pytest.mark.parametrize(("mean", "r"), [(0.5, 0.3), (-1.5, 0.8)])
def test_rms_norm_with_a_mean(d, mean, r):
    """First order in 1/d: the remainder is allowed 10 / d^2, 1 % at d = 32."""
    rng = np.random.default_rng(8)
    x, g = Moments(mean, 1.0, r), Moments(0.0, 0.5, 0.6)
    xs, gs = gaussian(rng, x, d, SAMPLES // 4), gaussian(rng, g, d, SAMPLES // 4)
    assert_matches(rms_norm(xs), c.rms_norm(x, d), bias=10 / d**2)
    assert_matches(rms_norm_jacobian(gs, xs), c.rms_norm_backward(g, x, d), bias=10 / d**2)


def _hypergeometric(n, z):
    """F(1/2, 1/2; n/2 + 1; z) in mpmath; by Euler's integral where its series is slow."""
    if n >= 100:
        return mpmath.hyp2f1(0.5, 0.5, mpmath.mpf(n) / 2 + 1, z)
    breaks = [0, 1e-6, 1e-4, 1e-2, 0.1, 1, mpmath.pi / 2]
    top, bottom = (
        mpmath.quad(lambda t, y=y: mpmath.sin(t) ** n / mpmath.sqrt(1 - y * mpmath.cos(t) ** 2), breaks)
        for y in (z, mpmath.mpf(0))
    )
    return top / bottom


@pytest.mark.parametrize("n", [1, 2, 3, 7, 16, 31, 32, 33, 100, 300])
def test_mean_sample_correlation_is_the_printed_formula(n):
    for r in (1e-9, 0.1, -0.5, 0.9, 0.99, 0.9999, 1 - 1e-8):
        with mpmath.workdps(30):
            half = mpmath.mpf(n) / 2
            gammas = mpmath.gamma(half + 0.5) / mpmath.gamma(half)
            printed = float(2 / mpmath.mpf(n) * gammas**2 * r * _hypergeometric(n, mpmath.mpf(r) ** 2))
        assert c.mean_sample_correlation(r, n) == pytest.approx(printed, rel=1e-12 if n == 1 else 2e-15)


def test_rms_norm_backward_with_a_mean_and_correlated_gradient_features():
    """The mean direction carries the gradient's common component: leading order, remainder of order 1/d."""
    rng = np.random.default_rng(9)
    x, g, d = Moments(0.8, 1.0, 0.5), Moments(0.0, 0.5, 0.6, 0.4), 256
    draws = rms_norm_jacobian(gaussian(rng, g, d, 4000), gaussian(rng, x, d, 4000))
    assert_matches(draws, c.rms_norm_backward(g, x, d), bias=1 / d)


def test_mean_sample_correlation_limits():
    r = np.linspace(-1, 1, 41)
    assert np.allclose(c.mean_sample_correlation(r, 1), 2 / np.pi * np.arcsin(r), rtol=1e-13)
    for n in (10**3, 10**5, 10**9):
        assert np.abs(c.mean_sample_correlation(r, n) - r * (1 - (1 - r**2) / (2 * n))).max() < 1 / n**2 + 1e-15
        assert c.mean_sample_correlation(1.0, n) == 1 and c.mean_sample_correlation(-1.0, n) == -1


@pytest.mark.parametrize("n", [3, 4, 15, 33, 34, 35, 36, 100])
@pytest.mark.parametrize("r", [0.0, -0.3, 0.9])
def test_gradient_overlap_agrees_with_the_untransformed_series(n, r):
    """The series over correlated chi variables (docs/theory/components.md), before Euler's transformation."""
    with mpmath.workdps(30):
        n_, z = mpmath.mpf(n), mpmath.mpf(r) ** 2
        a = (n_ - 1) / 2
        front = (mpmath.gamma(a) / mpmath.gamma(n_ / 2)) ** 2 / 2 * (1 - z) ** (n_ / 2 - 1)
        series = (n_ - 2) * mpmath.hyp2f1(a, a, n_ / 2, z) + mpmath.hyp3f2(a, a, 1.5, 0.5, n_ / 2 + 1, z) / n_
        expected = float(front * series)
    g = c.rms_norm_backward(Moments(0.0, 1.0, 1.0), Moments(0.0, 1.0, r), n)
    assert g.covariance == pytest.approx(expected, rel=1e-12)
    if n == 100:  # the first-order form of the literature
        assert g.covariance == pytest.approx(1 + (3 * r**2 - 1) / (2 * n), abs=2 / n**2)


def test_layer_norm_errata():
    # Erratum 4: identical tokens stay identical; (1 - 1/d) r is wrong.
    for d in (2, 3, 16, 100, 4096):
        assert c.layer_norm(Moments(0.0, 1.0, 1.0), d).token_correlation == 1
        assert c.layer_norm_backward(Moments(0.0, 1.0, 1.0), Moments(0.0, 1.0, 1.0), d).token_correlation in (
            0,
            1,
        )
    g = c.layer_norm_backward(Moments(0.0, 1.0, 0.0), Moments(0.0, 1.0, 0.0), 16)
    assert g.variance == pytest.approx(14 / 13, rel=1e-14)
    off = (1 - 1 / 100) * 0.99 / c.layer_norm(Moments(0.0, 1.0, 0.99), 100).token_correlation - 1
    assert off == pytest.approx(-0.01, abs=2e-4)
    wide = c.layer_norm(Moments(0.0, 1.0, 0.99), 100).token_correlation
    assert wide == pytest.approx(0.99 * (1 - (1 - 0.99**2) / 198), rel=1e-5)


def test_infinite_width_is_the_limit():
    x, g = Moments(0.6, 2.0, 0.3), Moments(0.0, 0.5, 0.6)
    for norm, backward in ((c.layer_norm, c.layer_norm_backward), (c.rms_norm, c.rms_norm_backward)):
        a, b = norm(x, 10**7), norm(x, 10**7, finite_width=False)
        ga, gb = backward(g, x, 10**7), backward(g, x, 10**7, finite_width=False)
        for one, two in ((a, b), (ga, gb)):
            for field in ("mean", "variance", "token_correlation", "feature_correlation"):
                assert getattr(one, field) == pytest.approx(getattr(two, field), abs=1e-6)
    assert c.rms_norm(x, 8, finite_width=False).second_moment == pytest.approx(1)


def test_small_widths_are_finite_and_documented():
    x, g = Moments(0.0, 2.0, 0.5), Moments(0.0, 0.5, 0.6)
    assert c.layer_norm(x, 1) == Moments(0.0, 0.0, 0.0, 0.0)
    assert c.layer_norm_backward(g, x, 1).variance == 0 and c.layer_norm_backward(g, x, 2).variance == 0
    typical = 0.25 / (2 * np.log(2))
    assert c.layer_norm_backward(g, x, 3).variance == pytest.approx(typical)
    assert c.rms_norm_backward(g, x, 2).variance == pytest.approx(typical)
    assert c.rms_norm_backward(g, x, 1).variance == 0
    zero = Moments(0.0, 0.0, 0.0)
    assert c.layer_norm(zero, 8).variance == 0 and c.rms_norm(zero, 8).variance == 0
    assert c.layer_norm_backward(g, zero, 8).variance == 0 and c.rms_norm_backward(g, zero, 8).variance == 0


# --- invariants -----------------------------------------------------------------------------------

correlations = st.floats(-1, 1)
moments = st.builds(
    lambda mean, v, rs, fs: Moments(mean, v, np.array(rs), fs),
    st.one_of(st.just(0.0), st.floats(-10, 10)),
    st.one_of(st.just(0.0), st.floats(1e-9, 1e4)),
    st.lists(correlations, min_size=2, max_size=2),
    correlations,
)


def assert_valid(m: Moments):
    for value in (m.mean, m.variance, m.token_correlation, m.feature_correlation):
        assert np.isfinite(value).all()
    assert np.all(np.asarray(m.variance) >= 0)
    assert np.all(np.abs(m.token_correlation) <= 1 + 1e-12)
    assert np.all(np.abs(m.feature_correlation) <= 1 + 1e-12)


@given(
    moments,
    moments,
    st.integers(1, 5000),
    st.floats(0, 0.999),
    st.sampled_from(sorted(ACTIVATIONS)),
    st.booleans(),
)
# a mean whose square is no normal double
@example(Moments(7.5e-162, 0.0, np.zeros(2)), Moments(0.0, 1.0, np.zeros(2)), 1, 0.0, "elu", True)
@example(Moments(7.5e-162, 0.0, np.zeros(2)), Moments(0.0, 0.0, np.zeros(2)), 1, 0.0, "elu", False)
@settings(max_examples=250, deadline=None)
def test_every_component_keeps_moments_valid(x, grad, d, p, name, finite):
    g = Moments(0.0, grad.variance, grad.token_correlation, grad.feature_correlation)
    centred = Moments(0.0, x.variance, x.token_correlation, x.feature_correlation)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_valid(c.linear(x, d, p, p))
        assert_valid(c.linear_backward(g, d, p))
        assert_valid(c.dropout(x, p))
        assert_valid(c.dropout_backward(g, p))
        assert_valid(c.activate(centred, name))
        assert_valid(c.activate_backward(g, centred, name))
        for y in (x, centred):
            assert_valid(c.layer_norm(y, d, finite))
            assert_valid(c.layer_norm_backward(g, y, d, finite))
            assert_valid(c.rms_norm(y, d, finite))
            assert_valid(c.rms_norm_backward(g, y, d, finite))
        assert_valid(c.embedding_sum([x.variance, 1.0], [x.token_correlation, 0.5], p))


@given(moments, st.integers(1, 500), st.booleans())
@settings(max_examples=100, deadline=None)
def test_arrays_equal_scalars(x, d, finite):
    for f in (
        lambda m: c.layer_norm(m, d, finite),
        lambda m: c.rms_norm(m, d, finite),
        lambda m: c.linear(m, d, 0.1),
    ):
        many = f(x)
        for i in range(2):
            one = f(Moments(x.mean, x.variance, float(x.token_correlation[i]), x.feature_correlation))
            assert isinstance(one.token_correlation, float)
            assert np.broadcast_to(many.token_correlation, 2)[i] == pytest.approx(one.token_correlation, abs=1e-13)


def test_bad_input_is_one_clear_line():
    x = Moments()
    for call in (
        lambda: c.dropout(x, 1.0),
        lambda: c.dropout(x, -0.1),
        lambda: c.linear(x, 0, 1.0),
        lambda: c.linear(x, 4, -1.0),
        lambda: c.layer_norm(x, 0),
        lambda: c.rms_norm_backward(x, x, -3),
        lambda: c.embedding_sum([1.0], [0.1, 0.2]),
        lambda: c.activate(Moments(0.5), "relu"),
        lambda: c.activate(x, "nonsense"),
    ):
        with pytest.raises(InputError) as caught:
            call()
        assert "\n" not in str(caught.value) and len(str(caught.value)) > 30

"""Softmax moments against mpmath, Monte Carlo and exact limits."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from signalprop.errors import InputError
from signalprop.network.moments import Moments
from signalprop.theory.attention_rows import row_moments
from signalprop.theory.log_sum import log_sum
from signalprop.theory.softmax import (
    node_variances,
    response_to_key_variance,
    softmax_moments,
)
from signalprop_lab.verification.softmax import softmax, softmax_backward


def _two_logits_by_mpmath(s: float) -> tuple[float, float, float, float]:
    """For L = 2, A = (σ(y), σ(-y)) with y ~ N(0, 2s): everything is a one-dimensional integral."""

    def expect(function):  # type: ignore[no-untyped-def]
        density = lambda y: mpmath.exp(-(y**2) / (4 * s)) / mpmath.sqrt(4 * mpmath.pi * s)  # noqa: E731
        edges = [0, 0.5, 2, 5, 10, 20, 40, 15 * mpmath.sqrt(2 * s) + 41]
        return float(2 * mpmath.quad(lambda y: function(1 / (1 + mpmath.exp(-y))) * density(y), edges))

    return (
        expect(lambda a: a**2 + (1 - a) ** 2),
        expect(lambda a: a**3 + (1 - a) ** 3),
        expect(lambda a: (a**2 + (1 - a) ** 2) ** 2),
        expect(lambda a: 4 * (a * (1 - a)) ** 2),
    )


@pytest.mark.parametrize("s", [0.01, 0.7, 4.0, 100.0, 4000.0])
def test_two_logits_agree_with_mpmath(s: float) -> None:
    expected = _two_logits_by_mpmath(s)
    for found, value in zip(softmax_moments(s, 2), expected, strict=False):
        assert float(found) == pytest.approx(value, rel=1e-5)  # J is a small difference at large s


@pytest.mark.parametrize(("length", "s"), [(10, 4.0), (300, 1.0), (300, 25.0), (1000, 9.0)])
def test_monte_carlo(length: int, s: float) -> None:
    rng = np.random.default_rng(length)
    z = rng.standard_normal((1_000_000 // length, length))
    a = np.exp(np.sqrt(s) * (z - z.max(axis=1, keepdims=True)))
    a /= a.sum(axis=1, keepdims=True)
    p, third = (a**2).sum(axis=1), (a**3).sum(axis=1)
    samples = np.stack([p, third, p**2, p - 2 * third + p**2, (a * z).sum(axis=1) ** 2])
    error = samples.std(axis=1) / np.sqrt(samples.shape[1])
    found = softmax_moments(s, length)
    assert np.all(np.abs(np.array(found[:5]) - samples.mean(axis=1)) < 4 * error)
    excess = (a**2 * z**2).sum(axis=1) - p  # unbiased given the second moment
    tilt = excess / (4 * s * float(found.second))
    assert abs(float(found.squared_tilt) - tilt.mean()) < 4 * tilt.std() / np.sqrt(len(tilt))


@pytest.mark.parametrize("length", [2, 3, 17, 300, 10_000, 1_000_000])
def test_interpolation_error(length: int) -> None:
    s = np.concatenate([[0.0, 1e-6], np.geomspace(1e-3, 1e4, 150)])
    exact, (second, jacobian, response, remaining, tilt) = softmax_moments(s, length), row_moments(s, length, False)
    np.testing.assert_allclose(second, exact.second, rtol=1e-4)
    np.testing.assert_allclose(jacobian, exact.jacobian, rtol=1e-4)
    np.testing.assert_allclose(exact.second + s * response, exact.mean_score_squared, rtol=1e-4)
    np.testing.assert_allclose(remaining, (1 - exact.second) ** 2, rtol=1e-4, atol=1e-8)
    np.testing.assert_allclose(tilt, exact.squared_tilt, atol=1e-4)


@given(
    s=st.floats(0, 1e4),
    length=st.sampled_from([1, 2, 3, 10, 64, 1000, 30_000, 1_000_000]),
)
def test_invariants(s: float, length: int) -> None:
    m = softmax_moments(s, length)
    assert 1 / length <= float(m.second) <= 1.0
    assert float(m.second) ** 2 <= float(m.second_squared) * (1 + 1e-3) <= float(m.second) * (1 + 2e-3)
    assert 0 <= float(m.jacobian) <= float(m.second) + 1e-12
    assert np.all(np.isfinite(np.array(m)))


def test_component_forward_and_backward_by_simulation() -> None:
    rng = np.random.default_rng(3)
    length, rows = 300, 4000
    common, g_common = rng.standard_normal((2, rows, 1))
    x = 0.8 * (np.sqrt(0.4) * common + np.sqrt(0.6) * rng.standard_normal((rows, length)))
    g = np.sqrt(0.3) * g_common + np.sqrt(0.7) * rng.standard_normal((rows, length))
    a = np.exp(x)
    a /= a.sum(axis=1, keepdims=True)
    back = a * (g - (a * g).sum(axis=1, keepdims=True))
    inputs = Moments(0.0, 0.64, 0.0, 0.4)
    out, gradient = softmax(inputs, length), softmax_backward(Moments(0.0, 1.0, 0.0, 0.3), inputs, length)
    assert out.mean == pytest.approx(a.mean())
    assert out.variance == pytest.approx(a.var(), rel=0.01)
    assert out.feature_correlation == pytest.approx(-1 / (length - 1))
    assert gradient.variance == pytest.approx((back**2).mean(), rel=0.01)


def test_component_token_correlation_by_simulation() -> None:
    rng = np.random.default_rng(4)
    common = rng.standard_normal((4000, 300))
    a, b = (np.exp(np.sqrt(0.5) * common + np.sqrt(0.5) * rng.standard_normal(common.shape)) for _ in range(2))
    a, b = a / a.sum(axis=1, keepdims=True), b / b.sum(axis=1, keepdims=True)
    assert softmax(Moments(0.0, 1.0, 0.5), 300).token_correlation == pytest.approx(
        np.corrcoef(a.ravel(), b.ravel())[0, 1], abs=0.02
    )


@pytest.mark.parametrize(("variance", "length"), [(-1.0, 10), (1.0, 0), (1.0, 10_000_000), (float("nan"), 10)])
def test_bad_input_is_refused(variance: float, length: int) -> None:
    with pytest.raises(InputError, match="expected"):
        softmax_moments(variance, length)


@pytest.mark.parametrize("length", [3, 10, 100])
@pytest.mark.parametrize("node", [20, 45])
def test_a_logit_of_larger_variance_gets_more_of_the_squared_weights(length: int, node: int) -> None:
    """Against the same draws with the first logit's variance about the mean a tenth up and down, the mean kept."""
    s, step = float(node_variances()[node]), 0.1
    z = np.random.default_rng(3).standard_normal((200_000 // length, length))
    change = step * (1 - 1 / length) / (1 - 2 / length)  # of a variance, so that the one about the mean changes by step
    squares, firsts = [], []
    for sign in (-1, 1):
        x = z * np.sqrt(s * np.append(1 + sign * change, np.full(length - 1, 1 - sign * change / (length - 1))))
        weights = np.exp(x - x.max(1, keepdims=True))
        firsts.append(weights[:, 0] / weights.sum(1))
        squares.append(firsts[-1] ** 2)
    for drawn, response in zip((firsts, squares), response_to_key_variance(length)[node], strict=True):
        low, high = (one.mean() for one in drawn)
        error = (drawn[1] - drawn[0]).std() / np.sqrt(len(z)) / (2 * step * (low + high) / 2)
        assert response == pytest.approx(np.log(high / low) / (2 * step), abs=4 * error + 0.02)


@pytest.mark.parametrize("node", [10, 20, 30])
def test_a_logit_of_larger_variance_by_quadrature(node: int) -> None:
    """Of three logits: the same derivatives, by integrals over all three."""
    s, step = float(node_variances()[node]), 0.003
    places, one = np.polynomial.hermite_e.hermegauss(32)
    z = np.stack(np.meshgrid(places, places, places)).reshape(3, -1)
    weight = np.multiply.outer(np.multiply.outer(one, one), one).ravel() / one.sum() ** 3
    logs = []
    for change in (-2 * step, 2 * step):
        x = np.exp(np.sqrt(s * np.array([[1 + change], [1 - change / 2], [1 - change / 2]])) * z)
        first = x[0] / x.sum(0)
        logs.append(np.log([weight @ first, weight @ first**2]))
    assert response_to_key_variance(3)[node] == pytest.approx((logs[1] - logs[0]) / (2 * step), rel=1e-4)


@pytest.mark.parametrize("length", [1, 2, 50, 2000])
def test_the_logarithm_of_the_sum_against_draws(length: int) -> None:
    z = np.random.default_rng(0).normal(size=(4000, length))
    for s in (0.1, 4.0, 16.0, 256.0):
        drawn = np.logaddexp.reduce(z * s**0.5, axis=1)
        assert log_sum(s, length) == pytest.approx(drawn.mean(), abs=4 * drawn.std() / len(drawn) ** 0.5)
    assert log_sum(0.0, length) == pytest.approx(np.log(length))

"""What two rows of attention weights have in common: against quadrature, sampling and exact ends."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from benchmarks.two_rows import LENGTHS, exact_overlap, fitted, share
from hypothesis import given
from hypothesis import strategies as st

from signalprop.files.storage import read_json
from signalprop.theory.row_overlaps import FILE, LEAST, NODES, jacobian_overlap, log_overlap, position
from signalprop.theory.softmax import softmax_moments


def pair(s, c, n: int) -> tuple:  # type: ignore[no-untyped-def]
    """(ln of the overlap of weights, that of Jacobians)."""
    return log_overlap(s, c, n), jacobian_overlap(s, c, n)


def softmaxes(rng: np.random.Generator, s: float, c: float, n: int, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples of n sum A B and of n tr J_A J_B."""
    common = rng.standard_normal((draws, n)) * math.sqrt(abs(c))
    a, b = (np.sign(x) * common + math.sqrt(s - abs(c)) * rng.standard_normal((draws, n)) for x in (1.0, c))
    a, b = (np.exp(x - x.max(1, keepdims=True)) for x in (a, b))
    a, b = a / a.sum(1, keepdims=True), b / b.sum(1, keepdims=True)
    met = (a * b).sum(1)
    return n * met, n * (met - (a * a * b).sum(1) - (a * b * b).sum(1) + met**2)


@pytest.mark.parametrize(("s", "c", "n"), [(1.0, 0.3, 100), (6.0, 2.0, 30), (16.0, 12.0, 300), (5.0, -2.0, 20)])
def test_quadrature_agrees_with_sampling(s: float, c: float, n: int) -> None:
    exact = exact_overlap(s, c, (n,))
    for found, sampled in zip(exact, softmaxes(np.random.default_rng(0), s, c, n, 10_000), strict=True):
        assert abs(found[0] - sampled.mean()) < 4.5 * sampled.std() / 100


@pytest.mark.parametrize("n", [2, 30, 2000])
@pytest.mark.parametrize(("s", "part"), [(0.5, 0.4), (4.0, 0.1), (4.0, 0.6), (10.0, 0.3), (18.0, 0.9), (35.0, 0.5)])
def test_polynomials_agree_with_quadrature(s: float, part: float, n: int) -> None:
    """And Λ_J is the slope of Λ_V (Price's theorem)."""
    c, step = part * s, 1e-4 * s
    exact = exact_overlap(s, c, (n,))
    value, up, down = (math.exp(log_overlap(s, x, n)) for x in (c, c + step, c - step))
    assert jacobian_overlap(s, c, n) == pytest.approx((up - down) / (2 * step), rel=1e-6)
    scale = 1 if s <= 11 else 3 if s <= 20 else 5
    assert value == pytest.approx(exact.value[0], rel=0.002 * scale)
    assert (up - down) / (2 * step) == pytest.approx(exact.jacobian[0], rel=0.006 * scale)


@pytest.mark.parametrize("n", [2, 7, 300])
@pytest.mark.parametrize("s", [1e-6, 0.3, 5.0, 60.0])
def test_a_row_with_itself_and_with_a_stranger(s: float, n: int) -> None:
    m = softmax_moments(s, n)
    value, met = pair(s, s, n)
    assert math.exp(value) == pytest.approx(n * float(m.second), rel=2e-3)
    assert met == pytest.approx(n * float(m.jacobian), rel=5e-3)
    value, met = pair(s, 0.0, n)
    assert value == pytest.approx(0.0, abs=2e-3 * s)
    assert met == pytest.approx((1 - float(m.second)) ** 2 * n / (n - 1), rel=2e-2)


def test_rows_avoid_what_the_other_likes() -> None:
    for s, n in ((2.0, 8), (6.0, 64)):
        assert math.exp(log_overlap(s, -0.4 * s, n)) == pytest.approx(
            exact_overlap(s, -0.4 * s, (n,)).value[0], abs=0.02
        )


@given(s=st.floats(0, 1e4), part=st.floats(LEAST, 1), n=st.integers(1, 10) | st.integers(10, 1_000_000))
def test_invariants(s: float, part: float, n: int) -> None:
    """Finite, not negative, more than one row with itself never (Cauchy and Schwarz), alike for numbers and arrays."""
    found, alone = pair(s, part * s, n), pair(s, s, n)
    assert np.isfinite(found).all() and found[1] >= 0
    assert found[0] <= alone[0] * (1 + 1e-9) + 1e-9
    assert alone[0] <= math.log(n) + 0.05
    several = pair(np.array([s, 1.0]), np.array([part * s, 0.3]), n)
    for one, two in zip(found, several, strict=True):
        assert one == pytest.approx(np.asarray(two)[0], rel=1e-9, abs=1e-12)


@given(s=st.floats(1e-6, 1e4), x=st.floats(-0.3, 1))
def test_position_and_share_are_inverse(s: float, x: float) -> None:
    assert position(s, s * share(s, x)) == pytest.approx(x, abs=1e-9)


def test_the_table_is_what_quadrature_gives() -> None:
    found, k = read_json(FILE), 11
    assert found["lengths"] == list(LENGTHS)
    np.testing.assert_allclose(fitted(float(NODES[k])), np.stack([found["even"][k], found["odd"][k]], 1), atol=1e-4)


def test_overlap_of_one_softmax_is_its_second_moment() -> None:
    s = np.array([0.1, 2.0, 256.0])
    np.testing.assert_allclose(np.exp(log_overlap(s, s, 2000)) / 2000, softmax_moments(s, 2000).second, rtol=2e-3)


@pytest.mark.parametrize("s", [0.0, np.zeros(3)])
def test_rows_without_scores_are_even(s: Any) -> None:
    """Both weigh all their keys by 1/n: their overlap is 1, and that of their Jacobians 1 - 1/n."""
    np.testing.assert_allclose(log_overlap(s, s, 30), 0, atol=1e-15)
    np.testing.assert_allclose(jacobian_overlap(s, s, 30), 1 - 1 / 30, rtol=1e-6)

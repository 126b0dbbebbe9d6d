"""Sums and triangles of large matrices, which go another way through memory than NumPy's: the same numbers."""

from __future__ import annotations

import numpy as np
import pytest

from signalprop.kernels.softmax_rows import knots, mirrored, rotation, rows_of, running


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", [(3, 5), (7, 400), (400, 7), (400, 400)])
def test_running_sums_are_numpys_bit_for_bit(shape: tuple[int, int], axis: int) -> None:
    values = np.random.default_rng(0).normal(size=shape)
    for given in (values, np.asfortranarray(values), np.flip(values, axis)):
        assert (running(given, axis) == np.cumsum(given, axis)).all()


@pytest.mark.parametrize("n", [1, 5, 128, 300])
def test_a_mirrored_matrix_is_that_of_its_upper_triangle(n: int) -> None:
    values = np.random.default_rng(n).normal(size=(n, n))
    assert (mirrored(values) == np.triu(values) + np.triu(values, 1).T).all()


def test_beyond_the_table_rows_are_one_key_each_ever_more() -> None:
    """1 - P, as J, falls as one over the root of the score variance there."""
    rows = rows_of(np.array([1e6, 4e6]), np.full(2, 32.0))
    left = 1 - rows.second
    assert 0 < left[0] < 0.01 and left[0] / left[1] == pytest.approx(2, rel=1e-6)
    assert rows.jacobian[0] / rows.jacobian[1] == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize("length", [2, 3, 12, 100, 1000, 4096])
def test_row_lengths_that_are_tabulated_lie_near_each_other(length: int) -> None:
    """From 2 to the longest, by ratios of at most 1.6, but that lengths are whole."""
    found = np.array(knots(length))
    assert (found[0], found[-1]) == (2, length)
    assert (found[1:] <= 1.6 * (found[:-1] + 0.5) + 0.5).all()


@pytest.mark.parametrize("causal", [True, False])
def test_what_rotations_leave_of_a_common_key(causal: bool) -> None:
    """rho is the mean cosine over features, half of which turn; omega its mean over all pairs of a row's keys."""
    length, d_head, base = 7, 16, 10.0
    rho, omega = rotation(length, d_head, base, 0.5, causal)
    angles = base ** (-np.arange(0, 8, 2) / 8)
    expected = [0.5 + 0.5 * np.cos(lag * angles).mean() for lag in range(length)]
    np.testing.assert_allclose(rho, expected)
    for i in range(length):
        keys = np.arange(i + 1 if causal else length)
        np.testing.assert_allclose(omega[i], rho[np.abs(keys[:, None] - keys)].mean())

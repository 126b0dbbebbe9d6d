"""Sums and triangles of large matrices, which go another way through memory than NumPy's: the same numbers."""

from __future__ import annotations

import numpy as np
import pytest

from signalprop.kernels.softmax_rows import mirrored, rows_of, running


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
    rows = rows_of(np.array([1e6, 4e6]), np.full(2, 32.0), 0.1)
    left = 1 - rows.second
    assert 0 < left[0] < 0.01 and left[0] / left[1] == pytest.approx(2, rel=1e-6)
    assert rows.jacobian[0] / rows.jacobian[1] == pytest.approx(2, rel=0.01)

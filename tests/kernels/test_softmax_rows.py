"""Sums and triangles of large matrices, which go another way through memory than NumPy's: the same numbers."""

from __future__ import annotations

import numpy as np
import pytest

from signalprop.kernels.softmax_rows import mirrored, running


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

"""Matrices that are used again: never one that somebody still holds."""

from __future__ import annotations

import numpy as np

from signalprop.theory.buffers import empty, reused


def test_a_matrix_in_use_is_never_handed_out_again() -> None:
    with reused():
        held = [empty(3) for _ in range(20)]
        for i, matrix in enumerate(held):
            matrix[:] = i
        view = empty(3)[1:]
        view[:] = -1.0
        for _ in range(20):
            empty(3)[:] = np.nan
        assert [float(matrix.mean()) for matrix in held] == list(range(20))
        assert (view == -1.0).all()


def test_one_that_nobody_holds_is() -> None:
    with reused():
        first = empty(4).ctypes.data
        assert {empty(4).ctypes.data for _ in range(5)} == {first}
        assert empty(5).shape == (5, 5)


def test_outside_every_matrix_is_fresh() -> None:
    one, other = empty(4), empty(4)
    assert one.ctypes.data != other.ctypes.data
    with reused():
        inside = empty(4)
    assert empty(4).ctypes.data != inside.ctypes.data

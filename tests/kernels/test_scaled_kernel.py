"""Kernels with a scale beside them: sums, and what a double can hold."""

from __future__ import annotations

import math

import numpy as np
import pytest

from signalprop.kernels.scaled_kernel import State

KERNEL = np.array([[2.0, 0.5], [0.5, 1.0]])


@pytest.mark.parametrize("log_scale", [-5000.0, -3.0, 0.0, 4.0, 5000.0])
def test_a_kernel_itself_is_held_where_doubles_end(log_scale: float) -> None:
    found = State(KERNEL, log_scale).absolute()
    assert np.isfinite(found).all() and (found > 0).all()
    if abs(log_scale) < 100:
        np.testing.assert_allclose(found, KERNEL * math.exp(log_scale))
    else:
        assert math.log(found[0, 0] / 2) == pytest.approx(math.copysign(700, log_scale))


@pytest.mark.parametrize("apart", [-2000.0, -700.0, -2.0, 0.0, 3.0, 700.0, 2000.0])
@pytest.mark.parametrize("both", [-3000.0, 0.0, 3000.0])
def test_sums_of_kernels_of_any_two_scales(apart: float, both: float) -> None:
    """Of one, and of members that are followed together: in logarithms what the entries sum to."""
    other = np.array([[1.0, 0.2], [0.2, 3.0]])
    one = State(KERNEL, both).plus(State(other, both + apart))
    members = State(KERNEL[None], np.full((1, 1), both)).plus(State(other[None], np.full((1, 1), both + apart)))
    for found in (one, members.of_member(0)):
        logs = np.log(np.maximum(found.kernel, 1e-300)) + found.log_scale - both
        np.testing.assert_allclose(logs, np.logaddexp(np.log(KERNEL), np.log(other) + apart), rtol=1e-9, atol=1e-12)
    assert 1e-6 < one.size < 1e6


@pytest.mark.parametrize("factor", [0.0, 1e-9, 1.0, 2e7])
def test_times_a_number(factor: float) -> None:
    found = State(KERNEL, 1.0).times(factor).rescaled()
    np.testing.assert_allclose(found.absolute(), factor * math.e * KERNEL)
    members = State(KERNEL[None], np.ones((1, 1))).times(np.full((1, 1), factor)).rescaled()
    np.testing.assert_allclose(members.of_member(0).absolute(), factor * math.e * KERNEL)


def test_nothing_adds_nothing_whatever_its_scale() -> None:
    nothing = State(np.zeros((2, 2)), 500.0)
    for found in (State(KERNEL).plus(nothing), nothing.plus(State(KERNEL))):
        np.testing.assert_array_equal(found.absolute(), KERNEL)

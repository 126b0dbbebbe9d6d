"""A softmax over groups of equal keys against sampling, and against the softmax of different keys."""

from __future__ import annotations

import numpy as np
import pytest

from signalprop.theory.repeated_keys import softmax_of_groups
from signalprop.theory.softmax import exact_softmax_moments

SIZES = np.array([9, 7, 3, 3, 2, 2, 1, 1, 1, 1])


@pytest.mark.parametrize("s", [0.25, 4.0, 16.0])
def test_groups_of_keys_against_sampling(s: float) -> None:
    logits = np.sqrt(s) * np.random.default_rng(0).normal(size=(100_000, len(SIZES)))
    a = SIZES * np.exp(logits)
    a /= a.sum(1, keepdims=True)
    slopes = a**2 * (1 - 2 * a + (a**2).sum(1, keepdims=True))
    (found,) = softmax_of_groups(s, 0.0, [np.repeat(SIZES, SIZES).astype(float)])
    first = np.cumsum(SIZES) - SIZES  # one key of every group
    for ours, drawn, within in ((found.mean, a, 1e-3), (found.second, a**2, 1e-3), (found.jacobian, slopes, 0.012)):
        error = drawn.std(0) / np.sqrt(len(a))
        assert (np.abs(ours[first] - drawn.mean(0)) < 4.5 * error + within * drawn.mean(0)).all()


@pytest.mark.parametrize(("size", "groups"), [(1, 12), (5, 12), (40, 3)])
def test_groups_of_one_size_are_as_many_keys(size: int, groups: int) -> None:
    exact = exact_softmax_moments(2.5, groups)
    (found,) = softmax_of_groups(2.5, 0.0, [np.full(size * groups, float(size))])
    assert found.mean == pytest.approx(1 / groups, rel=3e-4)
    assert found.second * groups == pytest.approx(float(exact.second), rel=3e-4)
    assert found.jacobian * groups == pytest.approx(float(exact.jacobian), rel=1e-3)
    assert found.weighted == pytest.approx(found.jacobian)

"""A softmax over groups of keys that are alike against sampling, and against the softmax of different keys."""

from __future__ import annotations

import numpy as np
import pytest

from signalprop.theory.repeated_keys import softmax_of_groups
from signalprop.theory.softmax import softmax_moments

SIZES = np.array([9, 7, 3, 3, 2, 2, 1, 1, 1, 1])


@pytest.mark.parametrize(("s", "alike"), [(0.25, 1.0), (4.0, 1.0), (16.0, 1.0), (1.0, 0.9), (4.0, 0.5), (16.0, 0.8)])
def test_groups_of_keys_against_sampling(s: float, alike: float) -> None:
    rng, of = np.random.default_rng(0), np.repeat(np.arange(len(SIZES)), SIZES)
    logits = np.sqrt(s * alike) * rng.normal(size=(100_000, len(SIZES)))[:, of]
    a = np.exp(logits + np.sqrt(s * (1 - alike)) * rng.normal(size=logits.shape))
    a /= a.sum(1, keepdims=True)
    first = np.cumsum(SIZES) - SIZES  # one key of every group
    key, group = a[:, first], np.add.reduceat(a, first, axis=1)
    squares = alike * (group**2).sum(1, keepdims=True) + (1 - alike) * (a**2).sum(1, keepdims=True)
    slopes = key**2 * (1 - 2 * (alike * group + (1 - alike) * key) + squares)
    found = softmax_of_groups(s, SIZES[of].astype(float), alike)
    for ours, drawn, within in (
        (found.mean, key, 0.002),
        (found.second, key**2, 0.006),
        (found.jacobian, slopes, 0.012),
    ):
        error = drawn.std(0) / np.sqrt(len(a))
        assert (np.abs(ours[first] - drawn.mean(0)) < 4.5 * error + within * drawn.mean(0)).all()
    pairs = (group[:, :6] ** 2 - np.add.reduceat(a**2, first, axis=1)[:, :6]) / (SIZES * (SIZES - 1))[:6]
    error = pairs.std(0) / np.sqrt(len(a))
    assert (np.abs(found.pair[first[:6]] - pairs.mean(0)) < 4.5 * error + 0.003 * pairs.mean(0)).all()


@pytest.mark.parametrize(("size", "groups"), [(1, 12), (5, 12), (40, 3)])
def test_groups_of_one_size_are_as_many_keys(size: int, groups: int) -> None:
    exact = softmax_moments(2.5, groups)
    found = softmax_of_groups(2.5, np.full(size * groups, float(size)))
    assert found.mean * size == pytest.approx(1 / groups, rel=3e-4)
    assert found.second * size**2 * groups == pytest.approx(float(exact.second), rel=3e-4)
    assert found.pair == pytest.approx(found.second)
    assert found.jacobian * size**2 * groups == pytest.approx(float(exact.jacobian), rel=1e-3)

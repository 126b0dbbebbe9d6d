"""Probes on applied models: the Profile of the built model with the same weights, in the Parametrization's units."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from applied import Pair, pair
from choice import some
from signalprop.attachment.parametrization_of import read_parametrization
from signalprop.measurement import measure
from signalprop.network.layout import PLACEMENTS
from signalprop.results.profile import POINTS, Profile

# post-norm; scaled norms; trained multipliers in several stacks; skips; parallel layers
CELLS = (
    ("bert", "deepnorm"), ("gpt2", "lns"), ("t5", "layerscale"), ("vit", "normalised-skip"),
    ("gpt_neox", "deepscalelm"),
)  # fmt: skip
every_cell = pytest.mark.parametrize(
    ("family", "scheme"), some(CELLS, (("bert", "deepnorm"), ("t5", "layerscale"), ("gpt_neox", "deepscalelm")))
)


@cache
def made(family: str, scheme: str) -> Pair:
    return pair(family, scheme, 3, torch.float32, match_eps=True)


def same(found: Profile, expected: Profile) -> None:
    """Probes reduce in single precision, models compute in it."""
    assert found.gradient is not None and expected.gradient is not None
    for ours, theirs in ((found.forward, expected.forward), (found.gradient, expected.gradient)):
        for point in POINTS:
            size = float(np.max(np.abs(theirs[point].variance)))
            for one, other in (
                (ours[point].variance, theirs[point].variance),
                (ours[point].mean ** 2, theirs[point].mean ** 2),
            ):
                np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-6 * size, err_msg=point)
            live = np.asarray(theirs[point].variance) > 1e-9 * size
            np.testing.assert_allclose(
                np.asarray(ours[point].token_correlation)[live], np.asarray(theirs[point].token_correlation)[live],
                atol=1e-4, err_msg=point,
            )  # fmt: skip
    np.testing.assert_allclose(found.gradient_scale, expected.gradient_scale, rtol=1e-3)


@every_cell
def test_a_profile_is_that_of_the_built_model(family: str, scheme: str) -> None:
    both = made(family, scheme)
    same(measure(both.applied, both.batch), measure(both.built, both.batch))


@every_cell
def test_a_table_is_read_back(family: str, scheme: str) -> None:
    """Multipliers, placements and gains exactly; weights as far as so many draws tell."""
    both = made(family, scheme)
    found, table = read_parametrization(both.applied), both.table
    for name in ("skip", "branch", "norm_scale", "value_skip", "attention_gain", "score_scale", "norm_gain"):
        kept = table.placement != PLACEMENTS.index("none") if name == "norm_gain" else slice(None)
        np.testing.assert_allclose(getattr(found, name)[kept], getattr(table, name)[kept], rtol=1e-5, err_msg=name)
    assert found.placement.tolist() == table.placement.tolist()
    assert found.architecture.norm_placement == table.architecture.norm_placement
    for role, wanted in table.weights.items():
        measured = np.asarray(found.weights[role])
        # a standard deviation of n draws has a standard error of 1/sqrt(2n); here n is at least 32 * 16
        np.testing.assert_allclose(measured, wanted, rtol=5 / np.sqrt(2 * 32 * 16), err_msg=role)
    assert found.head.scale == pytest.approx(table.head.scale)
    assert found.embedding.scale == pytest.approx(table.embedding.scale)

"""A model that carries a rescaled stream, and says so in its mapping, measures and reads like the one it stands for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from signalprop.attachment.mapping import Mapping
from signalprop.data.batches import Batch
from signalprop.measurement import measure
from signalprop.models import Transformer, build
from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import Parametrization
from signalprop.results.profile import POINTS
from signalprop.schemes import scheme

TOKENS = np.array([[3, 7, 7, 1, 9, 3, 2, 8], [5, 5, 1, 4, 9, 8, 3, 2]])
BATCH = Batch(TOKENS, np.roll(TOKENS, -1, 1))
LOUDER = 3.0  # what the rescaled model's branches are larger by


def paper(**changes: Any) -> Parametrization:
    """A network whose skips are not 1, by another number in every sublayer."""
    shape: dict[str, Any] = {"n_layers": 3, "d_model": 16, "n_heads": 2, "vocab_size": 30, "seq_len": 8}
    p = scheme("xavier")(Architecture(**shape, norm_eps=1e-12, **changes))
    skip, branch = np.random.default_rng(0).uniform(0.5, 0.9, (2, p.n_sublayers))
    return p.with_columns(skip=np.where(p.parallel, 1.0, skip), branch=branch)


def rescaled(p: Parametrization) -> tuple[Transformer, Mapping]:
    """The same function with every skip 1: the stream runs in units of the product of the skips so far."""
    product = np.cumprod(p.skip)
    before = np.where(p.parallel, np.roll(product, 2), np.roll(product, 1))
    before[:2] = np.where(p.parallel[:2], 1.0, before[:2])
    before[0] = 1.0
    twin = p.with_columns(
        skip=1.0,
        branch=p.branch / product / LOUDER,
        weight__output=LOUDER * p.weights["output"],
        weight__down=LOUDER * p.weights["down"],
    )
    model = build(twin, seed=0, dtype=torch.float64)
    mapping = model.signalprop_mapping()
    items = [
        replace(
            item,
            skip=float(p.skip[i]),
            multiplier=float(p.branch[i]),
            units=(float(before[i]), 1 / LOUDER, float(product[i])),
        )
        for i, item in enumerate(mapping.sublayers)
    ]
    for i in np.flatnonzero(p.parallel) - 1:  # the recorder has to form the sum itself
        items[i] = replace(items[i], writes=None, stream_out=None)
    return model, replace(mapping, sublayers=items)


@pytest.mark.parametrize("parallel", [False, True])
def test_a_rescaled_stream_is_measured_in_the_papers_units(parallel: bool) -> None:
    p = paper(parallel=parallel)
    model, mapping = rescaled(p)
    expected = measure(build(p, seed=0, dtype=torch.float64), BATCH)
    found = measure(model, BATCH, mapping=mapping)
    assert found.gradient is not None and expected.gradient is not None
    assert found.gradient_scale == pytest.approx(expected.gradient_scale, rel=1e-6)
    assert found.input == pytest.approx(expected.input, rel=1e-6)
    for ours, theirs in ((found.forward, expected.forward), (found.gradient, expected.gradient)):
        for point in POINTS:
            np.testing.assert_allclose(ours[point].variance, theirs[point].variance, rtol=1e-6)
            np.testing.assert_allclose(ours[point].token_correlation, theirs[point].token_correlation, atol=1e-6)
            # the probes reduce in single precision
            np.testing.assert_allclose(ours[point].mean, theirs[point].mean, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found.sensitivity_ratios, expected.sensitivity_ratios, rtol=1e-6)

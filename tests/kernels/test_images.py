"""Token kernels of images, one by one: norms divide each by its own size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from signalprop.data.batches import Batch
from signalprop.measurement.simulation import simulate
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import from_patches
from signalprop.prediction import predict
from signalprop.schemes import scheme


def images(n: int, patches: int = 16, features: int = 24) -> np.ndarray:
    """Of contrasts from .1 to 4, brighter in the middle."""
    rng = np.random.default_rng(0)
    contrast = np.geomspace(0.1, 4, n)[:, None, None]
    return np.asarray(contrast * (rng.normal(size=(n, patches, features)) + np.hanning(patches)[:, None]))


@pytest.mark.parametrize("class_token", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_images_of_different_contrast(class_token: bool) -> None:
    fields = {"n_layers": 4, "d_model": 128, "n_heads": 4, "patch_dim": 24, "seq_len": 16 + class_token, "dropout": 0.0}
    a = Architecture.preset("vit-base", class_token=class_token, **fields)
    p = scheme("huggingface")(a)
    batch = Batch(tokens=None, patches=images(12), targets=np.zeros(12, np.int64), source="made")
    inputs = batch.statistics(a)
    average = predict(p, replace(inputs, second_moments=inputs.second_moments.mean(0)))
    predicted, measured = predict(p, inputs), simulate(p, batch=batch, n_seeds=12)
    found = measured.gradient["stream_in"]

    def off(gradient: np.ndarray) -> float:
        return float(np.log(gradient[0] / found.variance[0]))

    assert abs(off(predicted.gradient["stream_in"].variance)) < 3 * found.variance_se[0] < 0.3
    assert off(average.gradient["stream_in"].variance) < -0.2
    assert any("one by one" in note for note in predicted.notes)
    assert any("average" in note for note in average.notes)


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_a_small_class_token_among_white_patches_has_a_large_gradient(placement: str) -> None:
    """Drawn as transformers does it has 1/1,000 of a patch's variance; tokens of one size give 4 to 90 times less."""
    shape = {"n_layers": 4, "d_model": 64, "n_heads": 4, "d_ff": 256, "patch_dim": 192, "n_classes": 10, "seq_len": 17}
    a = Architecture.preset("vit-small", **shape, dropout=0.0, norm_placement=placement)
    p, rng = scheme("huggingface")(a), np.random.default_rng(0)
    batch = Batch(tokens=None, patches=rng.normal(size=(16, 16, 192)), targets=rng.integers(0, 10, 16), source="white")
    predicted, measured = predict(p).gradient, simulate(p, batch=batch, n_seeds=4).gradient
    assert predicted is not None and measured is not None
    off = predicted["stream_in"].log_variance - measured["stream_in"].log_variance
    assert np.abs(off).max() < 0.25


def test_of_many_images_those_that_stand_evenly_in_their_order_are_kept() -> None:
    x = images(1000, patches=64, features=4)
    kept = from_patches(x).second_moments
    assert kept is not None and kept.shape == (366, 64, 64)  # 1.5 million pairs
    sizes = np.einsum("bii->b", kept)
    every = np.sort(np.einsum("bid,bid->b", x, x)) / 4
    np.testing.assert_allclose(np.quantile(sizes, [0.1, 0.5, 0.9]), np.quantile(every, [0.1, 0.5, 0.9]), rtol=0.04)
    assert from_patches(images(6, patches=2000, features=1)).second_moments.shape == (4, 2000, 2000)  # type: ignore[union-attr]

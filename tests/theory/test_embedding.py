"""What enters the first sublayer, against draws."""

from __future__ import annotations

import numpy as np
import pytest

from signalprop.network.architecture import Architecture
from signalprop.network.embedding_and_head import Embedding
from signalprop.network.inputs import InputStatistics
from signalprop.theory.embedding import embed


def test_class_tokens_are_drawn_with_the_variance_of_positions() -> None:
    """Of 16 patches of variance 12 * .25 and one class token of variance 4, each with a row of positions added."""
    a = Architecture.preset("vit-base", seq_len=17, patch_dim=12, d_model=64, n_heads=2)
    found = embed(a, Embedding(token=0.5, position=2.0), InputStatistics(kind="patches", token_correlation=0.0))
    assert float(found.variance) == pytest.approx((16 * 12 * 0.25 + 4.0) / 17 + 4.0)


def test_dropout_after_the_embedding_scatters_a_mean_too() -> None:
    a = Architecture(kind="decoder", n_layers=1, d_model=64, n_heads=2, seq_len=32, positions="sinusoidal")
    embedding, inputs, p = Embedding(token=0.3, position=1.5), InputStatistics(token_correlation=0.1), 0.4
    plain = embed(a, embedding, inputs)
    dropped = embed(a.replace(embedding_dropout=p), embedding, inputs)
    rng = np.random.default_rng(0)
    x = float(plain.mean) + np.sqrt(float(plain.variance)) * rng.standard_normal(400_000)
    x *= (rng.random(len(x)) >= p) / (1 - p)
    assert float(plain.mean) > 0.3
    assert float(dropped.variance) == pytest.approx(x.var(), rel=0.01)
    assert float(dropped.mean) == pytest.approx(x.mean(), rel=0.01)

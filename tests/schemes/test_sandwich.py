"""Peri-LN, running mean, normalised gates, depth-scaled sandwich norm: numbers by hand, theory, built networks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import signalprop as sp
from signalprop.models.synthetic import synthetic_batch
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics
from signalprop.network.parametrization import Parametrization
from signalprop.results.profile import Profile

ENCODER = Architecture(
    n_layers=6, d_model=256, n_heads=4, d_ff=512, norm="rmsnorm", norm_eps=0.0, positions="none", bias=False,
    activation="silu", gated=True, vocab_size=500, seq_len=32, tied_embeddings=False,
)  # fmt: skip


def table(name: str, a: Architecture = ENCODER, **options: Any) -> Parametrization:
    return sp.scheme(name, **options)(a)


def gradients(profile: Profile) -> Any:
    return profile.gradient["stream_in"].variance


def test_numbers_by_hand() -> None:
    gates = table("normalised-gates", beta=0.6)
    assert (gates.skip == 0.8).all() and gates.skip_trainable == gates.branch_trainable == "channel"
    pangu = table("depth-scaled-sandwich", gain=2.0)
    assert pangu.post_norm_gain == pytest.approx(2 / np.sqrt(6) * np.ones(12))
    assert pangu.weights["query"] == pytest.approx([(2 * 256 * 6) ** -0.5, 0] * 6)
    keel = table("keel")
    assert (keel.skip == 12).all() and set(keel.architecture.placements) == {"post"}
    assert (table("keel", alpha=3.0).skip == 3).all()
    small = table("minicpm", ENCODER.replace(n_layers=4, d_model=1024))
    assert (small.branch == 0.7).all() and small.embedding.scale == 12 and small.head.scale == 0.25
    assert small.weights["down"].max() == pytest.approx(0.05) and small.learning_rates["down"].min() == 0.25


@pytest.mark.parametrize("name", ["running-mean", "normalised-gates", "depth-scaled-sandwich", "keel", "minicpm"])
def test_predicted_is_what_built_networks_measure(name: str) -> None:
    p = table(name, ENCODER.replace(n_layers=3))
    statistics = InputStatistics(token_correlation=1 / 500, target_correlation=1 / 500)
    batch = synthetic_batch(p.architecture, statistics, 4, 0)
    measured = sp.average([sp.measure(sp.build(p, seed=seed), batch) for seed in range(2)])
    ahead = sp.predict(p, batch.statistics(p.architecture), fidelity="moments")
    for point in ("stream_out", "branch"):
        ratio = ahead.forward[point].log_variance - measured.forward[point].log_variance
        assert np.abs(ratio).max() < 0.12, point
    assert ahead.forward["stream_out"].token_correlation == pytest.approx(
        measured.forward["stream_out"].token_correlation, abs=0.05
    )
    assert np.log(gradients(ahead)) == pytest.approx(np.log(measured.gradient["stream_in"].variance), abs=0.2)

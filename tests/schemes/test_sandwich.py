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

STREAM = InputStatistics(kind="stream", variance=1.0, token_correlation=0.2, target_correlation=0.2)
ENCODER = Architecture(
    n_layers=6, d_model=256, n_heads=4, d_ff=512, norm="rmsnorm", norm_eps=0.0, positions="none", bias=False,
    activation="silu", gated=True, vocab_size=500, seq_len=32, tied_embeddings=False,
)  # fmt: skip


def table(name: str, a: Architecture = ENCODER, **options: Any) -> Parametrization:
    return sp.scheme(name, **options)(a)


def predicted(p: Parametrization) -> Profile:
    return sp.predict(p, STREAM, fidelity="moments")


def gradients(profile: Profile) -> Any:
    return profile.gradient["stream_in"].variance


def test_numbers_by_hand() -> None:
    mean = table("running-mean")
    assert mean.skip[:3] == pytest.approx([0.70710678, 0.81649658, 0.8660254])  # sqrt(1/2), sqrt(2/3), sqrt(3/4)
    assert mean.branch[:3] == pytest.approx([0.70710678, 0.57735027, 0.5])
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
    both = Architecture(kind="encoder-decoder", n_layers=1, n_decoder_layers=2, d_model=8)
    assert table("running-mean", both).branch ** -2 == pytest.approx([2, 3, 2, 3, 4, 5, 6, 7])  # each stack its own


def test_a_running_mean_is_peri_ln_in_the_gauge_of_the_number_of_additions() -> None:
    mean, peri = predicted(table("running-mean")), predicted(table("peri-ln"))
    k = np.arange(12) + 2
    out, theirs = mean.forward["stream_out"], peri.forward["stream_out"]
    assert k * out.variance == pytest.approx(theirs.variance, rel=1e-12)
    assert out.token_correlation == pytest.approx(theirs.token_correlation, rel=1e-12)
    assert gradients(mean) == pytest.approx(gradients(peri) * (k - 1) / 13, rel=1e-12)
    assert theirs.variance == pytest.approx(1 + np.arange(1, 13), rel=1e-9)  # every branch adds 1


def test_gates_that_do_not_know_the_depth_forget_the_input_exponentially() -> None:
    deep = ENCODER.replace(n_layers=60)
    constant, knows = (predicted(table("normalised-gates", deep, beta=b)) for b in (0.5, 120**-0.5))
    assert constant.forward["stream_out"].variance == pytest.approx(1.0, rel=1e-9)
    assert gradients(constant)[0] > 1e4 > 10 > gradients(knows)[0]


def test_depth_scaled_gains_add_the_same_at_any_depth() -> None:
    for n_layers in (6, 60):
        grown = predicted(table("depth-scaled-sandwich", ENCODER.replace(n_layers=n_layers)))
        assert grown.forward["stream_out"].variance[-1] == pytest.approx(3.0, rel=1e-9)  # 1 + 2 gain^2


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

"""Methods that place or scale norms: constants by hand, and what each paper claims against the prediction."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

import signalprop as sp
from commandline import refusal_of
from signalprop.models.synthetic import synthetic_batch
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics
from signalprop.network.parametrization import PLACEMENTS, Parametrization
from signalprop.prediction import predict
from signalprop.results.profile import Profile
from signalprop.schemes import scheme
from signalprop.schemes.norms import Admin, DeepNorm
from strategies import architectures

STREAM = InputStatistics(kind="stream", variance=1.0, token_correlation=0.227, target_correlation=0.3)


def encoder(n_layers: int, **changes: Any) -> Architecture:
    return Architecture.preset("tgs", **{"n_layers": n_layers, "d_model": 1024, "seq_len": 1024, **changes})


def llama(n_layers: int) -> Architecture:
    """The 130M model of the Curse of Depth paper, at other depths."""
    return Architecture(
        kind="decoder", n_layers=n_layers, d_model=768, n_heads=12, d_ff=2048, gated=True, activation="silu",
        norm="rmsnorm", norm_eps=1e-6, positions="rotary", seq_len=256, bias=False, tied_embeddings=False,
    )  # fmt: skip


def predicted(name: str, a: Architecture, inputs: InputStatistics = STREAM, **options: Any) -> Profile:
    return predict(scheme(name, **options)(a, inputs), inputs, fidelity="moments")


def placements(table: Parametrization) -> list[str]:
    return [PLACEMENTS[code] for code in table.placement]


class TestDeepNorm:
    def test_not_what_public_code_got_wrong(self) -> None:
        """xformers #219: unscaled values; labml #145: alpha on the branch; MixLN ff45826: gain inverted."""
        for n_layers in (6, 12, 200):
            table = scheme("deepnorm")(Architecture.preset("gpt2", n_layers=n_layers))
            assert table.weights["value"].max() < table.weights["query"].max()
            assert (table.skip > 1).all() and (table.branch == 1).all()
            assert table.skip[0] ** 4 == pytest.approx(2 * n_layers)
            assert table.weights["output"].max() ** 2 == pytest.approx((8 * n_layers) ** -0.5 * 2 / (768 + 768))


class TestAdmin:
    def test_the_skip_is_the_root_of_what_came_before(self) -> None:
        a = Architecture(n_layers=2, d_model=8)
        table = Admin(branch_variances=(0.44, 0.25, 0.56, 9.0))(a)
        assert table.skip == pytest.approx([1.0, 1.2, 1.3, 1.5])
        assert (table.branch == 1).all() and set(placements(table)) == {"post"}
        assert table.skip_trainable == "channel" and table.branch_trainable == "fixed"

    def test_each_stack_starts_anew(self) -> None:
        a = Architecture(kind="encoder-decoder", n_layers=1, n_decoder_layers=1, d_model=8)
        assert Admin((3.0, 5.0, 8.0, 7.0, 1.0))(a).skip == pytest.approx([1, 2, 1, 3, 4])

    def test_the_default_is_a_predicted_profile(self) -> None:
        a = encoder(6, d_model=256, seq_len=128)
        profile = predict(Admin().profiling(a), STREAM, fidelity="moments", backward=False)
        table = Admin()(a, STREAM)
        assert np.array_equal(table.skip, Admin().profiled(profile)(a).skip)
        variances = profile.forward["branch"].variance
        assert table.skip[5] ** 2 == pytest.approx(1 + variances[:5].sum())

    def test_a_measured_profile(self) -> None:
        torch = pytest.importorskip("torch")
        from signalprop.data.batches import Batch
        from signalprop.measurement import measure
        from signalprop.models import build

        a = Architecture(n_layers=6, d_model=256, norm_placement="post", dropout=0.1, vocab_size=100, seq_len=64)
        draws = np.random.default_rng(0)
        batch = Batch(tokens=draws.integers(0, 100, (8, 64)), targets=draws.integers(0, 100, (8, 64)))
        model = build(Admin().profiling(a), seed=0).train()
        torch.manual_seed(0)
        measured = Admin().profiled(measure(model, batch, backward=False))(a)
        predicted = Admin()(a, batch.statistics(a))
        # of one network: attention branches of 256 features vary by some percent, their sum by less
        assert measured.skip == pytest.approx(predicted.skip, rel=0.03)
        assert measured.skip[-1] > 1.5

    def test_what_does_not_fit(self) -> None:
        a = Architecture(n_layers=2, d_model=8)
        assert "holds 3 numbers; the architecture has 4" in refusal_of(lambda: Admin((1.0, 1.0, 1.0))(a))
        for bad in ("1,2", 3.0, (1.0, -1.0), (math.nan,), (True,), ("1",)):
            assert "branch_variances" in refusal_of(lambda bad=bad: scheme("admin", branch_variances=bad))
        assert "expected one of fixed" in refusal_of(lambda: scheme("admin", trainable="yes"))
        with_skips = predict(DeepNorm()(a), backward=False)
        assert "skip = branch = 1" in refusal_of(lambda: Admin().profiled(with_skips))
        pre = predict(scheme("xavier")(a), backward=False)
        assert "post-norm" in refusal_of(lambda: Admin().profiled(pre))


class TestLayerNormScaling:
    def test_a_post_norm_model_becomes_pre_norm(self) -> None:
        table = scheme("lns")(Architecture.preset("bert-base"))
        assert set(placements(table)) == {"pre"} and table.architecture.has_final_norm

    @pytest.mark.parametrize(
        ("n_layers", "plain", "scaled"), [(12, 0.971, 0.145), pytest.param(24, 2.156, 0.201, marks=pytest.mark.slow)]
    )
    def test_measured_variances(self, n_layers: int, plain: float, scaled: float) -> None:
        """Of random networks at width 768; seeds of the 12 layers differ by 5 %."""
        inputs = InputStatistics(token_correlation=1 / 32_000)
        for name, wanted in (("fixed", plain), ("lns", scaled)):
            profile = predict(scheme(name)(llama(n_layers)), inputs, fidelity="kernel", backward=False)
            assert profile.forward["stream_out"].variance[-1] == pytest.approx(wanted, rel=0.05)

    def test_scaled_initialisation_below_it_is_warned_of(self) -> None:
        a = encoder(48)
        with pytest.warns(UserWarning, match="lns on gpt2: both make branches smaller with depth") as caught:
            both = scheme("lns", base="gpt2")(a)
        forward = predict(both, fidelity="moments").forward
        added = forward["stream_out"].variance[-1] / forward["stream_in"].variance[0] - 1
        told = str(caught[0].message)
        assert f"add {added:.3g} times the variance" in told and "times with gpt2 alone" in told
        assert caught[0].filename == __file__


@pytest.mark.parametrize("name", ["mix-ln", "lns", "sandwich"])
class TestBases:
    @given(a=architectures())
    def test_any_architecture(self, name: str, a: Architecture) -> None:
        if a.parallel and name != "lns":
            if name == "sandwich" or a.n_layers >= 4:
                assert "parallel" in refusal_of(lambda: scheme(name)(a))
            return
        table = scheme(name)(a)
        assert Parametrization.from_json(json.loads(json.dumps(table.to_json()))) == table
        base = scheme(str(table.options["base"]))(table.architecture)
        assert replace(table, scheme=base.scheme, options=base.options, norm_scale=base.norm_scale) == base


# --- peri-LN, running mean, normalised gates, depth-scaled sandwich norm: numbers by hand, theory, built networks


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

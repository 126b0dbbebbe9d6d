"""Multipliers on residual branches: numbers worked out by hand, and what each paper claims against the prediction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commandline import refusal_of
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics
from signalprop.network.parametrization import PLACEMENTS, Parametrization
from signalprop.prediction import predict
from signalprop.results.profile import Profile
from signalprop.results.series import Series
from signalprop.schemes import scheme
from signalprop.schemes.residual import fan_in_std
from signalprop.sublayers.attention import signal as attention
from strategies import architectures

GROUPED = Architecture(
    kind="encoder-decoder", n_layers=2, n_decoder_layers=3, d_model=12, n_heads=4, n_kv_heads=2, d_head=5, d_ff=20,
    gated=True, activation="relu", dropout=0.1,
)  # fmt: skip
STREAM = InputStatistics(kind="stream", variance=1.0, token_correlation=0.227, target_correlation=0.3)


def encoder(n_layers: int, **changes: Any) -> Architecture:
    return Architecture.preset("tgs", **{"n_layers": n_layers, "d_model": 512, **changes})


def out(profile: Profile) -> Series:
    return profile.forward["stream_out"]


def removed(table: Parametrization) -> bool:
    """Whether no norm is left on the stream."""
    a = table.architecture
    placements = {PLACEMENTS[code] for code in table.placement}
    return placements == {"none"} == set(a.placements) and not a.has_final_norm


def refused(name: str, **options: Any) -> str:
    return refusal_of(lambda: scheme(name, **options))


ATTENTION_AND_FEED_FORWARD = ("query", "key", "value", "output", "gate", "up", "down")


class TestFanIn:
    def test_by_hand(self) -> None:
        found = fan_in_std(GROUPED)
        assert {role: found[role] for role in ATTENTION_AND_FEED_FORWARD} == pytest.approx(
            {
                "query": 12**-0.5,
                "key": 12**-0.5,
                "value": 12**-0.5,
                "output": 20**-0.5,
                "gate": 12**-0.5,
                "up": 12**-0.5,
                "down": 10**-0.5,  # 1 / (20 * 1/2): half of a ReLU's second moment is lost
            }
        )

    def test_a_factor_on_scores_goes_into_the_queries(self) -> None:
        for factor in (None, 1.0, 0.01):
            a = GROUPED.replace(attention_scale=factor)
            assert attention.of(scheme("stable-resnet")(a), 0).at(0).qk == pytest.approx(1.0)


class TestGates:
    """SkipInit and ReZero: at the start the network is the identity."""

    @pytest.mark.parametrize("name", ["skipinit", "rezero"])
    def test_the_table(self, name: str) -> None:
        for a in (GROUPED, GROUPED.replace(norm_placement="post"), encoder(3, norm_placement="sandwich")):
            table = scheme(name)(a)
            assert not table.branch.any() and (table.skip == 1).all()
            assert (table.branch_trainable, table.skip_trainable) == ("scalar", "fixed")
            assert removed(table)

    @pytest.mark.parametrize("placement", ["pre", "post"])
    def test_skipinit_keeps_norms_when_told(self, placement: Any) -> None:
        a = encoder(2, norm_placement=placement)
        assert scheme("skipinit", norm=True)(a).architecture == a
        assert scheme("skipinit", beta=0.25)(a).branch.tolist() == [0.25] * 4

    @given(st.data())
    def test_nothing_happens_to_the_signal(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(["skipinit", "rezero", "fixup"]))
        a = data.draw(architectures())
        profile = predict(scheme(name)(a, STREAM), STREAM, fidelity="moments")
        assert out(profile).variance == pytest.approx(np.ones(profile.n_sublayers), rel=1e-12)
        assert out(profile).token_correlation == pytest.approx(np.full(profile.n_sublayers, 0.227), rel=1e-12)
        assert profile.sensitivity() == {"mean": 0.0, "median": 0.0}
        found = profile.gradient["stream_in"].variance
        if a.kind == "encoder-decoder":  # cross-attention adds nothing, so nothing comes back to the encoder either
            assert not found[: 2 * a.n_layers].any()
            found = found[2 * a.n_layers :]
        assert found == pytest.approx(np.ones(len(found)), rel=1e-12)


class TestLayerScale:
    @pytest.mark.parametrize(("n_layers", "epsilon"), [(1, 0.1), (18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6)])
    def test_epsilon_by_depth(self, n_layers: int, epsilon: float) -> None:
        table = scheme("layerscale")(encoder(n_layers))
        assert (table.branch == epsilon).all() and (table.skip == 1).all()
        assert table.branch_trainable == "channel"
        assert table.architecture == encoder(n_layers)

    def test_sensitivity_goes_with_beta_squared(self) -> None:
        """TGS table 3 has beta; that it goes with the depth is in tests/lab/studies/test_growth.py."""
        tables = [scheme("layerscale", epsilon=e)(encoder(48), STREAM) for e in (1e-4, 1e-3)]
        small, large = (predict(table, STREAM, fidelity="moments").sensitivity()["mean"] for table in tables)
        assert large / small == pytest.approx(100.0, rel=1e-3)


class TestNormalisedSkip:
    @pytest.mark.parametrize(("norm", "attention"), [(True, 0.99), (False, 0.999)])
    def test_published_values(self, norm: bool, attention: float) -> None:
        table = scheme("normalised-skip", norm=norm)(GROUPED)
        assert table.skip[4:7].tolist() == pytest.approx([attention, attention, 0.99])
        beta = {0.99: 0.1410674, 0.999: 0.0447102}
        assert table.branch[4:7].tolist() == pytest.approx([beta[attention], beta[attention], beta[0.99]], rel=1e-5)
        assert removed(table) == (not norm)


class TestNoci:
    def test_weights_and_multipliers(self) -> None:
        table = scheme("noci")(GROUPED)
        for role, fan_out in {"query": 5, "key": 5, "value": 5, "output": 12, "gate": 20, "up": 20, "down": 12}.items():
            assert table.weights[role].max() == pytest.approx(fan_out**-0.5)
        assert table.branch == pytest.approx([2**-0.5] * 4 + [3**-0.5] * 9)
        assert (scheme("noci", beta=0.5)(GROUPED).branch == 0.5).all()
        assert "beta" in refused("noci", beta="small")

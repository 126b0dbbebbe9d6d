"""DeepScaleLM: constants by hand, and the growth laws of the derivation that the recursion has to give back.

The laws are those of L, d -> infinity; the networks here are of width and length 1024 or more, so numbers agree to
about 1 %: what is left over is given at each test.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from signalprop.errors import InputError
from signalprop.network.activations import ACTIVATIONS
from signalprop.network.architecture import Architecture
from signalprop.network.duals import dual
from signalprop.network.inputs import InputStatistics
from signalprop.network.parametrization import Parametrization
from signalprop.prediction import predict
from signalprop.results.profile import Profile
from signalprop.schemes import scheme
from signalprop.schemes.deepscalelm import DeepScaleLM, feed_forward_std, input_correlations

STREAM = InputStatistics(kind="stream", variance=1.0, token_correlation=0.227, target_correlation=0.3)


def encoder(n_layers: int, **changes: Any) -> Architecture:
    return Architecture.preset("tgs", **{"n_layers": n_layers, "d_model": 1024, "seq_len": 1024, **changes})


def predicted(name: str, a: Architecture, inputs: InputStatistics = STREAM, **options: float) -> Profile:
    return predict(scheme(name, **options)(a, inputs), inputs, fidelity="moments")


class TestConstants:
    """Every number of the papers' pseudo-code at d = 256, N = 48, p = 0.1."""

    def table(self, name: str = "deepscalelm", **options: Any) -> Parametrization:
        return scheme(name, **options)(Architecture.preset("tgs", n_layers=48))

    def test_embedding_queries_keys_and_feed_forward(self) -> None:
        table = self.table()
        e = table.embedding
        assert (e.token**2, e.position**2, e.segment**2) == pytest.approx((0.3, 0.3, 0.3))
        ffn = math.sqrt(0.9 / 2) / 256
        for role, variance, kind in (("query", 1 / 256, 0), ("key", 1 / 256, 0), ("up", ffn, 1), ("down", ffn, 1)):
            assert table.weights[role][kind::2] ** 2 == pytest.approx(np.full(48, variance))
        assert (table.head.scale, table.head.weight) == pytest.approx((1 / 16, math.sqrt(0.3)))

    def test_values_and_outputs_from_the_correlation_at_the_input_of_their_layer(self) -> None:
        table = self.table()
        r = (
            0.9
            * (float(sum(1 / i**2 for i in range(1, 32_001))) / sum(1 / i for i in range(1, 32_001)) ** 2 + 2 / 3)
            / 3
        )
        skip, branch = 46 / 48, 2 / 48
        for layer in range(48):
            expected = math.sqrt(0.9 / r) / 256
            assert table.weights["value"][2 * layer] ** 2 == pytest.approx(expected, rel=1e-12)
            assert table.weights["output"][2 * layer] ** 2 == pytest.approx(expected, rel=1e-12)
            r = skip * r + branch * 0.9
            r = skip * r + branch * 0.9 * (r + (math.sqrt(1 - r * r) - r * math.acos(r)) / math.pi)

    def test_the_simple_variant_has_one_number_for_all(self) -> None:
        table = self.table("deepscalelm-simple")
        for role in ("value", "output", "up", "down"):
            column = table.weights[role]
            assert column[column > 0] ** 2 == pytest.approx(np.full(48, math.sqrt(0.9 / 2) / 256))

    @pytest.mark.parametrize("name", ["deepscalelm", "deepscalelm-simple"])
    @pytest.mark.parametrize("trainable", ["fixed", "scalar", "channel"])
    def test_a_learnable_beta_starts_at_the_same_value(self, name: str, trainable: str) -> None:
        table = self.table(name, trainable=trainable)
        assert (table.branch_trainable, table.skip_trainable) == (trainable, "fixed")
        assert np.array_equal(table.branch, self.table(name).branch)
        with pytest.raises(InputError, match="expected one of fixed, scalar, channel"):
            scheme(name, trainable="vector")


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("gated", [False, True])
def test_a_feed_forward_branch_has_variance_1(activation: str, gated: bool) -> None:
    a = Architecture(n_layers=1, d_model=64, d_ff=200, activation=activation, gated=gated, dropout=0.3)
    up, down = feed_forward_std(a)
    second = float(dual(activation, 64 * up**2, 0.0).second_moment) * (64 * up**2 if gated else 1.0)
    assert 200 * down**2 * second / 0.7 == pytest.approx(1.0)


class TestCorrelations:
    def test_cross_attention_reads_the_encoders_output(self) -> None:
        a = Architecture(n_layers=3, n_decoder_layers=2, kind="encoder-decoder", d_model=1024, dropout=0.1)
        beta2 = DeepScaleLM().branch_variances(a)
        inputs = InputStatistics(token_correlation=0.6)
        r = input_correlations(a, inputs, beta2)
        profile = predict(scheme("deepscalelm")(a, inputs), inputs, fidelity="moments")
        encoder_output = profile.forward["stream_out"].token_correlation[5]
        assert r[7] == r[10] == pytest.approx(encoder_output, rel=0.01)

    @pytest.mark.parametrize("correlation", [0.0, -0.1])
    def test_uncorrelated_tokens_are_refused(self, correlation: float) -> None:
        x = InputStatistics(kind="stream", token_correlation=correlation)
        with pytest.raises(InputError, match="DeepScaleLM divides by it") as caught:
            scheme("deepscalelm")(encoder(2), x)
        assert "\n" not in str(caught.value)


class TestForward:
    @pytest.mark.parametrize("placement", ["pre", "post"])
    def test_branches_and_stream_have_variance_1(self, placement: str) -> None:
        # at 512 tokens the attention branch is above 1 by (1 - r)/r * e^s/(L (1 - p)), 1.9 % where r is smallest
        a = encoder(48, seq_len=512, norm_placement=placement)
        profile = predicted("deepscalelm", a)
        branch = profile.forward["branch"].variance
        assert branch[1::2] == pytest.approx(np.ones(48), abs=1e-3)
        assert ((branch[::2] > 1 - 1e-3) & (branch[::2] < 1.025)).all()
        assert np.median(branch[::2]) == pytest.approx(1.0, abs=0.003)
        assert profile.forward["stream_out"].variance == pytest.approx(np.ones(96), abs=0.005)


@pytest.mark.parametrize("gate", ["features", "heads"])
def test_gated_attention_has_variance_one(gate: str) -> None:
    """By sampling: E s(z)^2 of 10^6 normal numbers, and branches of random networks."""
    a = Architecture(
        kind="encoder", n_layers=2, d_model=256, n_heads=8, dropout=0.0, seq_len=64,
        settings={"attention": {"gate": gate}},
    )  # fmt: skip
    stream = InputStatistics(kind="stream", variance=1.0, token_correlation=0.3, target_correlation=0.3)
    z = np.random.default_rng(0).standard_normal(10**6)
    gated, plain = (scheme("deepscalelm")(x, stream) for x in (a, a.replace(settings={"attention": {"gate": "none"}})))
    ratio = (plain.weights["value"][0] / gated.weights["value"][0]) ** 4
    assert ratio == pytest.approx(((1 + np.exp(-z)) ** -2).mean(), rel=3e-3)
    branch = predict(gated, stream, fidelity="simulate", backward=False).forward["branch"].variance
    assert branch[::2] == pytest.approx(1.0, rel=0.15)

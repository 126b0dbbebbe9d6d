"""Value-SkipInit, U-SPA and E-SPA: the paper's numbers, what is refused, signals in random networks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from choice import some
from commandline import refusal_of
from signalprop.kernels.transforms import dks, tat
from signalprop.network.architecture import Architecture
from signalprop.network.duals import dual
from signalprop.network.inputs import InputStatistics
from signalprop.network.parametrization import PLACEMENTS
from signalprop.prediction import predict
from signalprop.schemes import scheme

A = Architecture(kind="decoder", n_layers=3, d_model=64, n_heads=4, activation="relu", positions="rotary", seq_len=32)


class TestTable:
    def test_identity_attention_without_skips_and_norms(self) -> None:
        table = scheme("value-skipinit")(A)
        assert table.value_skip[::2].tolist() == [1, 1, 1] and table.attention_gain[::2].tolist() == [0, 0, 0]
        assert table.value_skip[1::2].tolist() == [0, 0, 0] and table.attention_gain[1::2].tolist() == [1, 1, 1]
        assert table.attention_trainable and not table.skip.any() and (table.branch == 1).all()
        assert {PLACEMENTS[code] for code in table.placement} == {"none"} and not table.architecture.has_final_norm
        assert (table.branch_trainable, table.skip_trainable) == ("fixed", "fixed")

    def test_weights(self) -> None:
        table = scheme("value-skipinit")(A)
        for role in ("query", "key", "value", "output"):
            assert table.weights[role][0] == 1 / 8
        assert table.weights["up"][1] == 1 / 8
        assert 256 * table.weights["down"][1] ** 2 / 2 == pytest.approx(1.0)  # E relu^2 = 1/2
        assert set(table.distribution.values()) == {"orthogonal"} and not any(b.any() for b in table.biases.values())
        normal = scheme("value-skipinit", orthogonal=False)(A)
        assert set(normal.distribution.values()) == {"normal"}

    def test_norms_and_the_feed_forward_skip(self) -> None:
        table = scheme("value-skipinit", norm=True, feed_forward_skip=0.6)(A)
        assert {PLACEMENTS[code] for code in table.placement} == {"pre"} and table.architecture.has_final_norm
        assert table.skip.tolist() == [0, 0.6] * 3 and table.branch == pytest.approx([1, 0.8] * 3)


DEEP = Architecture(
    kind="decoder", n_layers=36, d_model=64, n_heads=4, activation="gelu", positions="rotary", seq_len=64
)
LLAMA = DEEP.replace(activation="silu", gated=True, norm="rmsnorm")


SPA = ("e-spa", "u-spa")


def refused(name: str, a: Architecture = DEEP, **options: Any) -> str:
    return refusal_of(lambda: scheme(name, **options)(a))


class TestActivation:
    @pytest.mark.parametrize("name", some(["value-skipinit", *SPA], ("e-spa",)))
    def test_auto(self, name: str) -> None:
        def chosen(a: Architecture, **options: Any) -> str:
            return scheme(name, **options)(a).architecture.activation

        assert chosen(DEEP) == dks("gelu", 36)
        assert chosen(LLAMA) == dks("silu", 36, gated=True)
        assert chosen(DEEP.replace(n_layers=2)) == dks("gelu", 6)
        for kept in ("relu", "leaky_relu", "leaky_relu(0.3)", "relu2", "elu", "identity", tat(36), dks("gelu", 12)):
            assert chosen(DEEP.replace(activation=kept)) == kept
        assert chosen(DEEP, feed_forward_skip=0.9) == "gelu"
        assert chosen(DEEP, activation="keep") == "gelu"
        assert chosen(DEEP, activation="dks", feed_forward_skip=0.9) == dks("gelu", 36)
        if name in SPA:
            assert chosen(DEEP, attention_skip=0.5) == "gelu"

    def test_tat(self) -> None:
        relu = DEEP.replace(activation="relu")
        assert scheme("e-spa", activation="tat")(relu).architecture.activation == tat(36)
        assert scheme("e-spa", activation="tat")(relu.replace(n_layers=3)).architecture.activation == tat(13)
        assert "not gelu; take keep or dks" in refused("e-spa", activation="tat")
        assert "not the gate" in refused("e-spa", LLAMA.replace(activation="relu"), activation="tat")
        assert "activation=keep" in refused("e-spa", relu, activation="dks")

    @pytest.mark.parametrize("gated", [False, True])
    def test_the_matrix_after_it_gives_variance_1(self, gated: bool) -> None:
        a = (LLAMA if gated else DEEP).replace(activation="tanh")
        for activation in ("auto", "keep"):
            table = scheme("e-spa", activation=activation)(a)
            second = float(dual(table.architecture.activation, 1.0, 0.0).second_moment)
            assert a.d_ff * table.weights["down"][1] ** 2 * second == pytest.approx(1.0)


class TestSpaTable:
    def test_u_spa_is_linear_in_depth(self) -> None:
        table = scheme("u-spa", repeats=0.05)(DEEP)
        assert table.shape_out[::2] == pytest.approx(0.05 + 0.75 * np.arange(1, 37) / 36)
        assert table.shape_in[::2] == pytest.approx(0.05 + 0.75 * np.arange(36) / 36)
        assert table.shaping.kind == "u-spa" and table.shaping.repeats == 0.05

    def test_skips_are_normalised_and_take_the_paper_s_filter(self) -> None:
        """He et al. eqs. 25 and 26 (with the square of the product): lambda^2 = alpha^2 + beta^2 lambda_alpha^2."""
        table = scheme("e-spa", attention_skip=0.9, feed_forward_skip=0.8)(DEEP)
        plain = scheme("e-spa", repeats=0.0)(DEEP)
        assert table.skip.tolist() == [0.9, 0.8] * 36
        assert table.branch == pytest.approx([math.sqrt(0.19), 0.6] * 36)
        gain, whole = table.shape_gain[::2], (-math.expm1(-0.01)) ** (1 / 72)
        assert 0.81 + 0.19 * gain**2 == pytest.approx(np.full(36, whole**2), abs=1e-12)
        assert table.shape_in == pytest.approx(plain.shape_in)
        own = 1 - plain.shape_in[::2] ** 2
        assert 1 - table.shape_out[::2] ** 2 == pytest.approx(gain**2 * own)

    @pytest.mark.parametrize(("name", "tied"), [("value-skipinit", True), *((name, False) for name in SPA)])
    def test_logits_start_with_variance_1(self, name: str, tied: bool) -> None:
        torch = pytest.importorskip("torch")
        from signalprop.models import build

        a = DEEP.replace(n_layers=2, d_model=256, vocab_size=2000, tied_embeddings=tied, activation="identity")
        options = {"repeats": 0.0} if name in SPA else {}
        table = scheme(name, **options)(a)
        assert table.embedding.token == pytest.approx(1 / 16) and table.embedding.scale == 16
        assert table.head.weight == pytest.approx(1 / 16) and table.head.scale == 1
        model = build(table, seed=0)
        ids = torch.from_numpy(np.random.default_rng(0).integers(0, 2000, (4, 64)))
        with torch.no_grad():
            logits = model(ids).logits
        assert float(logits.float().var()) == pytest.approx(1.0, rel=0.12)


class TestRefused:
    @pytest.mark.parametrize(
        ("name", "options", "part"),
        [
            ("e-spa", {"gamma": 0}, "gamma"),
            ("e-spa", {"gamma": -1.0}, "from 1e-09 to 30"),
            ("e-spa", {"schedule": "cosine"}, "expected one of diagonal, tanh"),
            ("e-spa", {"skip_rule": "none"}, "expected one of paper, exact"),
            ("e-spa", {"zero": "value"}, "expected one of query, key, small"),
            ("e-spa", {"repeats": 1.0}, "from 0 to 0.999"),
            ("u-spa", {"attention_skip": 1.0}, "leaves nothing to attention"),
            ("u-spa", {"rho": 1.5}, "from 0 to 1"),
            ("u-spa", {"rho": 0.3, "repeats": 0.4}, "expected a last value above the first"),
            ("e-spa", {"repeats": 0.1, "attention_skip": 0.5}, "without a skip around it; leave it out"),
            ("e-spa", {"calibrated": True}, "calibrated"),
        ],
    )
    def test_options(self, name: str, options: dict[str, Any], part: str) -> None:
        assert part in refused(name, **options)

    @pytest.mark.parametrize("name", SPA)
    @pytest.mark.parametrize(
        ("change", "part"),
        [
            ({"qk_norm": True}, "qk_norm=False"),
            ({"positions": "alibi"}, "ALiBi adds to them"),
            ({"parallel": True}, "one stack of attention and feed-forward in turn"),
            ({"kind": "encoder-decoder", "n_decoder_layers": 2, "positions": "learned"}, "not for encoder-decoders"),
            ({"settings": {"attention": {"score_cap": 50.0}}}, "has no cap, sink, norm on values or gate"),
            ({"settings": {"attention": {"sink": 0.0}}}, "choose another scheme"),
            ({"settings": {"attention": {"value_norm": True}}}, "choose another scheme"),
            ({"settings": {"attention": {"gate": "heads"}}}, "choose another scheme"),
            ({"settings": {"attention": {"window": 8}}}, "shaped attention has no window"),
            ({"branches": ("latent_attention", "feed_forward")}, "latent attention is not shaped"),
        ],
    )
    def test_architectures(self, name: str, change: dict[str, Any], part: str) -> None:
        assert part in refused(name, DEEP.replace(**change))

    @pytest.mark.parametrize("schedule", ["diagonal", "tanh"])
    @pytest.mark.parametrize("rule", ["paper", "exact"])
    @pytest.mark.parametrize(
        ("n_layers", "skip", "gamma"), some([(36, 0.98, 0.005), (32, 0.9975, 0.2), (7, 0.9, 0.001)], [(7, 0.9, 0.001)])
    )
    def test_following_the_advice_on_e_spa_works(
        self, schedule: str, rule: str, n_layers: int, skip: float, gamma: float
    ) -> None:
        a, same = DEEP.replace(n_layers=n_layers), {"schedule": schedule, "skip_rule": rule}
        message = refused("e-spa", a, attention_skip=skip, gamma=gamma, **same)
        bound, _, least = message.partition("at most ")[2].partition(", or a gamma of at least ")
        assert scheme("e-spa", attention_skip=float(bound), gamma=gamma, **same)(a)
        assert scheme("e-spa", attention_skip=skip, gamma=float(least), **same)(a)
        assert refused("e-spa", a, attention_skip=1.0002 * float(bound), gamma=gamma, **same)
        assert refused("e-spa", a, attention_skip=skip, gamma=float(least) / 1.0002, **same)


class TestSpaSignal:
    @pytest.mark.parametrize(
        ("a", "name"),
        [
            (LLAMA, "e-spa"),
            *(pytest.param(*x, marks=pytest.mark.slow) for x in ((DEEP, "e-spa"), (LLAMA, "value-skipinit"))),
        ],
    )
    def test_a_random_network_does_what_is_predicted(self, a: Architecture, name: str) -> None:
        """DKS, plain and gated, over 12 layers without skips and norms, where SiLU would have lost its gradient."""
        torch = pytest.importorskip("torch")
        from signalprop.data.batches import Batch
        from signalprop.measurement import measure
        from signalprop.models import build

        draws = np.random.default_rng(0)
        batch = Batch(tokens=draws.integers(0, 500, (2, 64)), targets=draws.integers(0, 500, (2, 64)))
        a = a.replace(n_layers=12, d_model=256, vocab_size=500)
        table = scheme(name)(a, batch.statistics(a))
        predicted = predict(table, batch.statistics(a), fidelity="kernel")
        found = measure(build(table, seed=0, dtype=torch.float32), batch)
        ahead = np.log(found.forward["stream_out"].variance / predicted.forward["stream_out"].variance)
        back = np.log(found.gradient["stream_in"].variance / predicted.gradient["stream_in"].variance)
        assert np.abs(ahead).max() < 0.35
        if name == "value-skipinit":  # E-SPA gathers gradients on the first tokens, two here: one network says little
            assert np.abs(back).max() < 0.7
        alike = found.forward["stream_out"].token_correlation - predicted.forward["stream_out"].token_correlation
        assert np.abs(alike).max() < 0.15  # one network of width 256


class TestSignal:
    STREAM = InputStatistics(kind="stream", variance=1.0, token_correlation=0.3)

    def test_what_is_left_is_a_relu_network_of_each_token_alone(self) -> None:
        """The arc-cosine map of correlations, once per layer: tokens still grow alike, without DKS or TAT."""
        a = Architecture(n_layers=20, d_model=256, seq_len=64, activation="relu")
        profile = predict(scheme("value-skipinit")(a), self.STREAM, fidelity="moments")
        r, wanted = 0.3, []
        for _ in range(20):
            r = (math.sqrt(1 - r * r) + r * (math.pi - math.acos(r))) / math.pi
            wanted.append(r)
        assert profile.forward["stream_out"].token_correlation[1::2] == pytest.approx(wanted)

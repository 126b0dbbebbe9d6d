"""Maximal update parametrizations: the published tables by hand, and what should not change with width and depth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commandline import refusal_of
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics
from signalprop.network.layout import role_mask
from signalprop.network.parametrization import LEARNING_RATES, ROLES, Parametrization
from signalprop.prediction import predict
from signalprop.schemes import scheme
from signalprop.schemes.mup import epsilon_factors
from strategies import architectures

STREAM = InputStatistics(kind="stream", variance=1.0, token_correlation=0.3, target_correlation=0.3)


def gpt2(d_model: int, n_layers: int = 4, **changes: Any) -> Architecture:
    return Architecture.preset("gpt2", d_model=d_model, n_layers=n_layers, **changes)


def columns(table: Parametrization, but: tuple[str, ...] = ()) -> dict[str, list[float]]:
    return {name: column.tolist() for name, column in table.columns().items() if name not in but}


class TestTable8:
    """Four times the base width: hidden variance 1/4, Adam's rate 1/4, the head's factor 1/4, nothing else."""

    def test_scores(self) -> None:
        more_heads = scheme("mup")(gpt2(1024))
        assert more_heads.score_scale == pytest.approx(np.full(8, 1 / 8))  # heads of 64, as at the base
        wider_heads = scheme("mup", base_d_head=16)(gpt2(1024, n_heads=16, d_head=64))
        assert wider_heads.score_scale == pytest.approx(np.full(8, 4 / 64))  # sqrt(16) / 64
        t5 = scheme("mup", base_d_head=16)(Architecture.preset("t5-small"))
        assert t5.score_scale == pytest.approx(np.full(30, 16 / 64))  # 1 there, so 1 at the base

    def test_outputs_of_zero(self) -> None:
        plain, zero = scheme("mup")(gpt2(1024)), scheme("mup", zero_outputs=True)(gpt2(1024))
        outputs = ["weight.output", "weight.down"]
        assert columns(zero, but=(*outputs,)) == columns(plain, but=(*outputs,))
        assert not any(columns(zero)[name][row] for name in outputs for row in range(8))

    def test_what_is_inversely_proportional_to_width_already_stays(self) -> None:
        a = gpt2(2048)
        table, xavier = scheme("mup", base="xavier")(a), scheme("xavier")(a)
        for role in ROLES:
            assert table.weights[role] == pytest.approx(xavier.weights[role])
        # 1/sqrt(256) at the base, then 1/m, against 1/sqrt(2048)
        assert table.head.scale == pytest.approx(1 / 16 / 8)


@given(a=architectures(), base=st.sampled_from(["fixed", "xavier", "gpt2", "pytorch"]))
def test_at_its_own_width_any_architecture_is_the_base(a: Architecture, base: str) -> None:
    table, wanted = scheme("mup", base=base, base_width=a.d_model)(a), scheme(base)(a)
    assert columns(table) == columns(wanted) and table.head == wanted.head and table.embedding == wanted.embedding


@given(a=architectures(), width=st.integers(1, 2000), depth=st.integers(1, 100), alpha=st.sampled_from([0.0, 0.5, 1.0]))
def test_any_architecture(a: Architecture, width: int, depth: int, alpha: float) -> None:
    table = scheme("depth-mup", base_width=width, base_depth=depth, alpha=alpha)(a)
    m = a.d_model / width
    layers = np.where(table.stack == table.stack[0], a.n_layers, a.n_decoder_layers or a.n_layers)
    assert table.branch == pytest.approx((depth / layers) ** alpha)
    rate = (layers / depth) ** (alpha - 1)
    for name in LEARNING_RATES:
        present = role_mask(a, name) if name in ROLES else np.ones(table.n_sublayers, bool)
        wanted = rate if name == "vectors" else rate / m
        assert table.learning_rates[name][present] == pytest.approx(wanted[present])
    for role in ROLES:
        present = role_mask(a, role)
        assert table.weights[role][present] ** 2 * m == pytest.approx(np.full(present.sum(), 0.02**2))
    assert table.head.scale == pytest.approx(1 / m) and table.embedding.learning_rate == 1


class TestDepth:
    def test_the_stream_does_not_know_the_depth(self) -> None:
        found = []
        for n_layers in (32, 128, 512, 2048):
            a = Architecture.preset("tgs", n_layers=n_layers)
            profile = predict(scheme("depth-mup", base="xavier")(a), STREAM, fidelity="moments")
            found.append((profile.forward["stream_out"].variance[-1], profile.gradient["stream_in"].variance[0]))
        for one in found[1:]:
            assert one == pytest.approx(found[0], rel=0.02)
        assert found[0][0] > 1.5  # and layers do something

    def test_depth_counted_twice_is_warned_of(self) -> None:
        with pytest.warns(UserWarning, match="depth-mup on gpt2: both make branches smaller with depth"):
            scheme("depth-mup", base="gpt2")(gpt2(256, n_layers=32))
        scheme("depth-mup", base="gpt2", alpha=0.0)(gpt2(256, n_layers=32))  # alpha = 0 leaves branches alone


@pytest.mark.parametrize(
    ("name", "options", "part"),
    [
        ("mup", {"base": "nothing"}, "unknown scheme 'nothing'"),
        ("mup", {"base": "mup"}, "cannot be its base"),
        ("mup", {"base_width": 0}, "base_width of scheme 'mup' is 0"),
        ("mup", {"base_width": 256.0}, "expected a whole number"),
        ("mup", {"base_width": True}, "expected a whole number"),
        ("mup", {"base_d_head": -1}, "base_d_head"),
        ("depth-mup", {"base_depth": 0}, "base_depth"),
        ("depth-mup", {"alpha": -0.5}, "alpha"),
        ("depth-mup", {"alpha": "1"}, "alpha"),
    ],
)
def test_bad_options(name: str, options: dict[str, Any], part: str) -> None:
    assert part in refusal_of(lambda: scheme(name, **options))


def test_a_base_that_places_norms_is_refused() -> None:
    made = scheme("mup", base="deepnorm")
    assert "both say what norms do" in refusal_of(lambda: made(gpt2(256)))


def sparse(d_model: int, width: int, top_k: int, **settings: Any) -> Architecture:
    """Two layers with experts of which a quarter are active."""
    return Architecture(
        kind="decoder", n_layers=2, d_model=d_model, n_heads=d_model // 32, d_ff=width, gated=True, norm="rmsnorm",
        branches=("attention", "experts"), vocab_size=100, seq_len=16, tied_embeddings=False, bias=False,
        settings={"experts": {"n_experts": 4 * top_k, "top_k": top_k, "width": width, **settings}},
    )  # fmt: skip


class TestExperts:
    """Width of an expert, and how many a token has, at a fixed share of active ones."""

    EXPERTS = slice(1, None, 2)

    def table(self, a: Architecture, name: str = "mup", **options: Any) -> Parametrization:
        return scheme(name, base="xavier", base_width=64, base_expert_width=64, base_top_k=2, **options)(a)

    def test_nothing_changes_at_the_base(self) -> None:
        a = sparse(64, 64, 2)
        assert columns(self.table(a)) == columns(scheme("mup", base="xavier", base_width=64)(a))

    @pytest.mark.parametrize("name", ["mup", "depth-mup", "completep"])
    def test_the_map_back_goes_with_the_experts_width_the_others_with_the_streams(self, name: str) -> None:
        base, wide = self.table(sparse(64, 64, 2), name), self.table(sparse(256, 128, 8), name)
        for role, ratio in (("router", 4), ("expert_gate", 4), ("expert_up", 4), ("expert_down", 2)):
            for kept, power in (("weights", 0.5), ("learning_rates", 1)):
                one, other = (getattr(table, kept)[role][self.EXPERTS] for table in (base, wide))
                assert other == pytest.approx(one / ratio**power)

    def test_epsilon_goes_with_the_gradients_of_experts(self) -> None:
        factors, ends = epsilon_factors(self.table(sparse(256, 128, 8)))
        assert factors.tolist() == [1.0, 0.25, 1.0, 0.25] and ends == 1.0
        by_depth, _ = epsilon_factors(self.table(sparse(256, 128, 8), "completep"))
        assert by_depth == pytest.approx(factors / 4)

    def test_weights_without_a_sum_are_made_smaller(self) -> None:
        sigmoid = {"scores": "sigmoid", "normalised": False, "shared_width": 64}
        base, more = self.table(sparse(64, 64, 2, **sigmoid)), self.table(sparse(64, 64, 8, **sigmoid))
        for role, ratio in (("expert_down", 4), ("expert_up", 1), ("shared_down", 1)):
            for one, other in ((base.weights, more.weights), (base.learning_rates, more.learning_rates)):
                assert other[role][self.EXPERTS] == pytest.approx(one[role][self.EXPERTS] / ratio)
        assert more.branch.tolist() == base.branch.tolist()

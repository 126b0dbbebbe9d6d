"""Weights made smaller by depth: numbers worked out by hand, and what each paper claims against the prediction."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics
from signalprop.network.layout import role_mask
from signalprop.network.parametrization import ROLES, Parametrization
from signalprop.prediction import predict
from signalprop.schemes import scheme
from signalprop.schemes.base import xavier_std
from strategies import architectures

GROUPED = Architecture(
    kind="encoder-decoder", n_layers=2, n_decoder_layers=3, d_model=12, n_heads=4, n_kv_heads=2, d_head=5, d_ff=20,
    gated=True, activation="relu", dropout=0.1,
)  # fmt: skip


NEW = ("takase", "ds-init", "fixup", "t-fixup", "bamboo", "skipinit", "rezero", "layerscale", "stable-resnet",
       "normalised-skip", "noci")  # fmt: skip


def encoder(n_layers: int, **changes: Any) -> Architecture:
    return Architecture.preset("tgs", **{"n_layers": n_layers, "d_model": 512, **changes})


def ratios(table: Parametrization, role: str) -> list[float]:
    """Standard deviations over Xavier's, where the role exists."""
    column = table.weights[role][role_mask(table.architecture, role)]
    return (column / xavier_std(table.architecture, role)).tolist()  # type: ignore[no-any-return]


class TestAll:
    @given(st.data())
    def test_any_architecture_keeps_all_but_its_norms(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(NEW))
        a = data.draw(architectures())
        table = scheme(name)(a)
        kept = table.architecture.model_dump(exclude={"norm_placement", "final_norm"})
        assert kept == a.model_dump(exclude={"norm_placement", "final_norm"})
        assert name in ("fixup", "t-fixup", "skipinit", "rezero", "bamboo") or table.architecture == a
        for role in ROLES:
            positive = table.weights[role][role_mask(a, role)] > 0
            assert not positive.any() if name == "fixup" and role in ("output", "down") else positive.all()

    @pytest.mark.parametrize("name", NEW)
    def test_patches_and_classes(self, name: str) -> None:
        a = Architecture.preset("vit-small", n_layers=2, d_model=32)
        inputs = InputStatistics(kind="patches", token_correlation=0.4)
        table = scheme(name)(a, inputs)
        entered = predict(table, inputs, fidelity="moments").input["variance"]
        expected = {"takase": 0.8, "t-fixup": 2 * 18**-0.5, "layerscale": 768 * 0.02**2 + 0.02**2}
        assert entered == pytest.approx(expected.get(name, 1.0), rel=0.02)  # the class token is one of 197


class TestTakase:
    def test_by_hand(self) -> None:
        a = Architecture.preset("gpt2")  # d = 768, N = 12
        table = scheme("takase")(a)
        std = 0.02282177  # sqrt(2 / 3840)
        for role in ("query", "key", "value", "up"):
            assert table.weights[role].max() == pytest.approx(std, rel=1e-6)
        for role in ("output", "down"):
            assert table.weights[role].max() == pytest.approx(std / math.sqrt(24), rel=1e-6)
        e = table.embedding
        assert (e.token, e.position, e.scale) == pytest.approx((std, std, 27.712813), rel=1e-6)
        assert (table.head.weight, table.head.scale) == (e.token, 1.0)
        assert (table.skip == 1).all() and (table.branch == 1).all() and table.architecture == a

    def test_what_the_curse_of_depth_calls_by_this_name_is_gpt2s(self) -> None:
        for a in (encoder(3), GROUPED):
            one, other = scheme("takase", scaled_embedding=False, std=0.02)(a), scheme("gpt2")(a)
            assert one.embedding == other.embedding and one.head == other.head
            columns = other.columns()
            assert all(np.array_equal(column, columns[key]) for key, column in one.columns().items())


class TestFixup:
    def test_by_hand(self) -> None:
        table = scheme("fixup")(encoder(12))  # L = 24 branches
        for role in ("query", "key", "value"):
            assert ratios(table, role) == pytest.approx([0.58879] * 12, rel=1e-4)
        assert ratios(table, "up") == pytest.approx([0.204124] * 12, rel=1e-5)
        assert not table.weights["output"].any() and not table.weights["down"].any()
        assert (table.branch == 1).all() and table.branch_trainable == "scalar"
        assert not table.architecture.has_final_norm and set(table.architecture.placements) == {"none"}

    @pytest.mark.parametrize(
        ("changes", "zero"),
        [({}, False), ({"tied_embeddings": False}, True), ({"head": "classes"}, True), ({"head": "none"}, False)],
    )
    def test_a_head_of_its_own_starts_at_0(self, changes: dict[str, Any], zero: bool) -> None:
        assert (scheme("fixup")(encoder(1, **changes)).head.weight == 0) == zero

    @pytest.mark.parametrize("a", [encoder(12), encoder(100), encoder(7, gated=True), GROUPED], ids=str)
    def test_an_update_is_of_one_size_at_any_depth(self, a: Architecture) -> None:
        """Fixup's design: a step on the last matrix of branch i moves the output by its other factors squared, and all
        L branches together by a constant."""
        table = scheme("fixup")(a)
        attention = np.prod([np.square(ratios(table, role)) for role in ("query", "key", "value")], axis=0)
        roles = ("gate", "up") if a.gated else ("up",)
        feed_forward = np.prod([np.square(ratios(table, role)) for role in roles], axis=0)
        assert attention.sum() + feed_forward.sum() == pytest.approx(1.0)


class TestTFixup:
    def test_by_hand(self) -> None:
        a = Architecture(kind="encoder-decoder", n_layers=6, d_model=512, embedding_scale=math.sqrt(512))
        table = scheme("t-fixup")(a)
        encoder_factor, decoder_factor = 0.428092, 0.368894  # 0.67 * 6^(-1/4), 54^(-1/4)
        for role in ("value", "output"):
            assert ratios(table, role) == pytest.approx([encoder_factor] * 6 + [decoder_factor] * 12, rel=1e-5)
        for role in ("up", "down"):
            assert ratios(table, role) == pytest.approx([encoder_factor] * 6 + [decoder_factor] * 6, rel=1e-5)
        for role in ("query", "key"):
            assert ratios(table, role) == pytest.approx([1.0] * 18)
        e = table.embedding
        assert (e.token, e.scale) == pytest.approx((512**-0.5 * decoder_factor, 512**0.5), rel=1e-5)
        assert table.head.weight == e.token and table.head.scale == 1.0  # tied
        assert not table.architecture.has_final_norm and set(table.architecture.placements) == {"none"}
        assert (table.branch == 1).all() and table.branch_trainable == "fixed"


class TestBamboo:
    def test_it_is_vanilla_pre_norm(self) -> None:
        for a in (encoder(3), GROUPED):
            table, vanilla = scheme("bamboo")(a), scheme("xavier")(a)
            columns = vanilla.columns()
            assert all(np.array_equal(column, columns[key]) for key, column in table.columns().items())
            assert (table.embedding, table.head, table.architecture) == (vanilla.embedding, vanilla.head, a)

"""Capped scores, sinks, norms on values and output gates: whole small networks, predicted and built."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import signalprop as sp
from signalprop.errors import InputError
from signalprop.results.cost import count_parameters, train_flops
from signalprop.sublayers.attention.heads import Heads, Row
from signalprop.sublayers.attention.on_nodes import score_variance
from signalprop.sublayers.attention.roles import has_window
from signalprop.sublayers.attention.signal import OneNode
from signalprop.sublayers.experts import signal as experts
from signalprop.theory.attention import Sizes
from signalprop.theory.attention_variants import capped, share_beside_sink


def _architecture(**settings: Any) -> sp.Architecture:
    return sp.Architecture(
        kind="decoder", n_layers=2, d_model=128, n_heads=2, d_ff=128, vocab_size=500, seq_len=32, positions="rotary",
        tied_embeddings=False, settings={"attention": settings} if settings else {},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "values"),
    [
        ({"gate": "features"}, 1.0),
        ({"gate": "heads", "window": 8}, 1.0),
        ({"sink": 1.0}, 1.0),
        ({"value_norm": True}, 2.0),
        ({"score_cap": 2.0}, 1.0),
    ],
)
def test_built_networks_are_predicted(settings: dict[str, Any], values: float) -> None:
    a = _architecture(**settings)
    table = sp.scheme("xavier")(a)
    table = table.with_columns(weight__value=values * table.weights["value"])
    assert sp.Parametrization.from_json(table.to_json()) == table
    models = [sp.build(table, seed=seed) for seed in range(5)]
    assert count_parameters(table)["total"] == sum(x.numel() for x in models[0].parameters())
    assert train_flops(table, 1, 1)["attention"] >= train_flops(sp.scheme("xavier")(_architecture()), 1, 1)["attention"]
    ids = torch.randint(0, 500, (2, 32), generator=torch.Generator().manual_seed(0))
    measured = sp.average([sp.measure(model, {"inputs": ids, "targets": ids.roll(-1, 1)}) for model in models])
    inputs = sp.InputStatistics(token_correlation=1 / 500, target_correlation=1 / 500)
    for fidelity, most in (("kernel", 0.12), ("moments", 0.25)):
        predicted = sp.predict(table, inputs, fidelity=fidelity)
        for way, at in (("forward", "branch"), ("gradient", "stream_in")):
            one, other = (getattr(profile, way)[at].log_variance for profile in (predicted, measured))
            assert np.abs(one - other).max() < most


def test_what_a_cap_and_a_sink_leave() -> None:
    z = np.random.default_rng(0).normal(size=200_000)
    assert capped(3.0, 2.0) == pytest.approx(np.mean((2 * np.tanh(np.sqrt(3.0) * z / 2)) ** 2), rel=0.01)
    assert capped(3.0, None) == 3.0
    row = np.exp(0.5 * z.reshape(-1, 50))
    share = row.sum(1) / (row.sum(1) + np.exp(2.0))
    assert share_beside_sink(np.array(50.0), np.array(0.25), np.array(0.0), 2.0) ** 2 == pytest.approx(
        (share**2).mean(), rel=0.01
    )


def test_what_does_not_go_together() -> None:
    table = sp.scheme("xavier")(_architecture(sink=0.0))
    with pytest.raises(InputError, match="sink"):
        sp.predict(table.with_columns(value_skip=0.5))
    with pytest.raises(InputError, match="gate"):
        sp.predict(sp.scheme("xavier")(_architecture(gate="heads").replace(positions="alibi")))
    notes = sp.predict(sp.scheme("xavier", qk_gain=2.0)(_architecture(score_cap=2.0))).notes
    assert any("cap" in note for note in notes)


ROW = Row(*[2.0, 0.5], *[1.0] * 9)  # score variance on unit tokens, share of a query bias


def test_a_cap_that_nothing_reaches_changes_nothing() -> None:
    """Of tokens of any size: the variance is that on an input of second moment 1."""
    per_token = np.array([1.0, 5.0])
    assert score_variance(ROW, per_token, 1e6) == pytest.approx(score_variance(ROW, per_token, None), rel=1e-6)
    assert score_variance(ROW, per_token, 0.1) < 0.01


def test_norms_of_queries_and_keys_halve_what_is_as_small_as_their_epsilon() -> None:
    heads = Heads(np.zeros((11, 1)), False, 4, 4, 8, 4, 0.0, True, 1.0)
    row = ROW._replace(query_bias=0.0)
    assert heads.scores(row, 1.0, 1.0)[0] == pytest.approx(row.qk / 4)
    assert heads.scores(row, 1e9, 3.0)[0] == pytest.approx(row.qk * 3 / 4)


def test_a_window_that_holds_all_tokens_is_none() -> None:
    """8 tokens without a mask: 7 away on both sides is all of them; the last 8 of a causal stack are."""
    for kind, widest in (("encoder", 13), ("decoder", 7)):
        for window in (widest, widest + 1):
            a = sp.Architecture(
                kind=kind, n_layers=1, d_model=8, n_heads=2, seq_len=8, settings={"attention": {"window": window}}
            )
            assert has_window(a) == (window == widest)


@pytest.mark.parametrize("fidelity", ["moments", "kernel"])
@pytest.mark.parametrize("gate", ["features", "heads"])
def test_gated_attention_of_one_token_is_a_gated_feed_forward(gate: str, fidelity: Any) -> None:
    """sigmoid(gate) * value -> output: a gate of a head sums over as many features as gates of features are."""

    def profile(branch: str, *roles: str) -> sp.Profile:
        a = sp.Architecture(
            kind="decoder", n_layers=1, d_model=32, n_heads=2, d_ff=32, vocab_size=50, seq_len=1, norm="rmsnorm",
            branches=(branch,), gated=True, activation="sigmoid",
            settings={"attention": {"gate": gate}} if branch == "attention" else {},
        )  # fmt: skip
        weights = {f"weight__{role}": size for role, size in zip(roles, (0.6, 0.3, 0.2), strict=True)}
        table = sp.scheme("xavier")(a).with_columns(**weights, **{f"bias__{roles[0]}": 0.5})
        return sp.predict(table, fidelity=fidelity)

    attention = profile("attention", "attention_gate", "value", "output")
    feed_forward = profile("feed_forward", "gate", "up", "down")
    assert attention.forward["branch"].variance == pytest.approx(feed_forward.forward["branch"].variance, rel=1e-6)
    one, other = (x.gradient["stream_in"].variance for x in (attention, feed_forward))
    assert one == pytest.approx(other, rel=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_all_lengths_lose_to_a_sink(causal: bool) -> None:
    """Without scores a row of n keys keeps n / (n + e^sink); the mean square weighs rows by their output's."""
    n, sink, r = 24, 1.5, 0.4
    read = Sizes(n, n, 64, causal=causal).on_itself(r, 0.0)
    found = OneNode(read, np.asarray(1.0), None).beside_sink(sink)
    lengths = np.arange(1, n + 1) if causal else np.array([n])
    share, size = lengths / (lengths + np.exp(sink)), r + (1 - r) / lengths
    assert float(found.shared) == pytest.approx(share.mean() ** 2, rel=0.005)
    assert float(found.per_token) == pytest.approx((size * share**2).sum() / size.sum(), rel=0.005)


def test_a_cap_is_that_on_the_scores_of_this_input() -> None:
    """Of a query of second moment 3 with a bias of half a unit and keys of 3."""
    raw = ROW.qk * (3 + ROW.query_bias) * 3
    assert score_variance(ROW, np.full(2, 3.0), 2.0) == pytest.approx(ROW.qk * capped(raw, 2.0) / raw)


def test_a_norm_on_values_takes_their_biases_too() -> None:
    """Of equal tokens heads give one value, of size 1 whatever its bias."""
    a = _architecture(value_norm=True).replace(bias=True)
    p, equal = sp.scheme("xavier")(a), sp.InputStatistics(kind="stream", token_correlation=1.0)
    plain, biased = (
        sp.predict(x, equal, fidelity="moments").forward["branch"].variance[0]
        for x in (p, p.with_columns(bias__value=2.0))
    )
    assert biased == pytest.approx(plain, rel=1e-4)


def test_a_shift_of_an_expert_s_gate_is_a_bias_that_all_tokens_share() -> None:
    def up_bias(shift: float) -> float:
        a = sp.Architecture(
            n_layers=1, d_model=32, n_heads=2, branches=[["attention", "experts"]], gated=True, kind="decoder",
            settings={"experts": {"n_experts": 4, "top_k": 2, "width": 16, "up_shift": shift}},
        )  # fmt: skip
        return float(experts.of(sp.scheme("xavier")(a), 0).expert.at(1).up_bias)

    assert up_bias(3.0) - up_bias(0.0) == pytest.approx(9.0)

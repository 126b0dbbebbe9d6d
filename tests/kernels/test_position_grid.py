"""Token kernels on a grid of positions against those of all positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from signalprop import ranking
from signalprop.data.batches import default_statistics
from signalprop.kernels import passes
from signalprop.kernels.causal_attention import TokenAttention
from signalprop.kernels.embedding_and_loss import _answering
from signalprop.kernels.position_grid import Grid, GridAttention, grid_for, grid_of
from signalprop.kernels.predicting import predict_token_kernels
from signalprop.kernels.softmax_rows import rotation
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics, from_tokens
from signalprop.prediction import predict
from signalprop.ranking import predict_all_for_ranking, predict_for_ranking
from signalprop.results.profile import POINTS, Profile
from signalprop.schemes import scheme
from signalprop.theory.signals import Signal

PRESETS = ["gpt2", "llama3-8b", "gpt-neox", "falcon-7b", "qwen2-0.5b"]


def differences(one: Profile, other: Profile) -> tuple[float, float]:
    """Largest relative difference of a variance, and of a token correlation, over all probe points."""
    pairs = [(one.forward[k], other.forward[k]) for k in POINTS] + [
        (one.gradient[k], other.gradient[k]) for k in POINTS
    ]
    return (
        max(float(np.abs(x.variance / y.variance - 1).max()) for x, y in pairs),
        max(float(np.abs(x.token_correlation - y.token_correlation).max()) for x, y in pairs),
    )


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("tokens", [1, 2, 19])
def test_a_grid_of_all_positions_is_all_positions(name: str, tokens: int) -> None:
    """Parallel branches, gates, rotary positions, grouped heads and biases."""
    a = Architecture.preset(name, seq_len=tokens, n_layers=2)
    p, statistics = scheme("xavier")(a), default_statistics(a)
    found = predict_token_kernels(p, statistics, grid=Grid(tokens, np.arange(tokens)))
    assert max(differences(found, predict_token_kernels(p, statistics))) < 1e-12


@pytest.mark.parametrize("name", ["t5-small", "bart-base", "whisper-tiny"])
@pytest.mark.parametrize(("read", "written"), [(1, 1), (2, 19), (31, 7)])
def test_an_encoder_decoder_on_a_grid_of_all_positions_is_all_positions(name: str, read: int, written: int) -> None:
    """Pre- and post-norm, biases, dropout: one node stands for all that the encoder reads."""
    a = Architecture.preset(name, seq_len=read, target_len=written, n_layers=2, n_decoder_layers=2)
    p, statistics = scheme("xavier")(a), default_statistics(a)
    found = predict_token_kernels(p, statistics, grid=Grid(written, np.arange(written)))
    assert max(differences(found, predict_token_kernels(p, statistics))) < 1e-12


def test_a_long_encoder_decoder_stands_on_a_grid() -> None:
    a = Architecture.preset("t5-small", seq_len=260, target_len=240, n_layers=2, n_decoder_layers=2)
    p = scheme("huggingface")(a)
    found = predict(p)
    assert any("interpolated" in note for note in found.notes)
    assert max(differences(found, predict(p, fidelity="kernel"))) < 2e-3
    ids = np.arange(240)[None] % 50
    known = replace(default_statistics(a), decoder=from_tokens(ids))
    assert grid_for(p, default_statistics(a)) is grid_of(240) and grid_for(p, known) is None


@settings(max_examples=20)
@given(
    tokens=st.integers(1, 30),
    seed=st.integers(0, 1000),
    qk=st.sampled_from([0.0, 0.3, 4.0]),
    dropout=st.sampled_from([0.0, 0.2]),
    rotary=st.booleans(),
)
def test_attention_of_any_kernel(tokens: int, seed: int, qk: float, dropout: float, rotary: bool) -> None:
    """On a grid of all positions, whatever stands on the diagonal as the limit of different tokens at one place."""
    x, y = np.random.default_rng(seed).normal(size=(2, tokens, 40)) + 0.5
    s, g = x @ x.T / 40, y @ y.T / 40
    grid = Grid(tokens, np.arange(tokens))
    rho, omega = rotation(tokens, 16, 1e4, 0.5, True) if rotary else (None, None)
    fields: dict[str, Any] = {"qk": qk, "d_model": 64, "dropout": dropout, "omega": omega}
    whole = TokenAttention(s, rho=rho, **fields)
    turn = grid.rotated(16, 1e4, 0.5) if rotary else None
    off = s.copy()
    np.fill_diagonal(off, 0.3)
    here = GridAttention(off, grid=grid, per_token=np.diagonal(s), turn=turn, **fields)
    for found, expected in (
        (here.output(), whole.forward()),
        (here.sent(Signal.of(g)), whole.backward(g)),
    ):
        np.testing.assert_allclose(found.matrix(), expected, rtol=1e-10, atol=1e-12 * np.abs(expected).max())


def latent(tokens: int) -> Architecture:
    """Latent attention, of which a share rotates, and experts."""
    return Architecture(
        kind="decoder", n_layers=2, d_model=64, n_heads=4, d_ff=64, norm="rmsnorm", positions="rotary",
        branches=("latent_attention", "experts"), vocab_size=100, seq_len=tokens,
        settings={"latent_attention": {"rank": 16, "d_rotary": 8}, "experts": {"n_experts": 8, "top_k": 2}},
    )  # fmt: skip


@pytest.mark.parametrize("tokens", [19, 400])
def test_latent_attention_on_a_grid(tokens: int) -> None:
    p = scheme("xavier")(latent(tokens))
    inputs = default_statistics(p.architecture)
    grid = Grid(tokens, np.arange(tokens)) if tokens < 400 else grid_for(p, inputs)
    apart = differences(predict_token_kernels(p, inputs, grid=grid), predict_token_kernels(p, inputs))
    assert max(apart) < (1e-12 if tokens < 400 else 1e-3)


@pytest.mark.parametrize(("name", "placement"), [("gpt2", "pre"), ("llama-7b", "post"), ("olmo2-7b", "res-post")])
def test_what_lies_between_is_interpolated_to_a_tenth_of_a_percent(name: str, placement: Any) -> None:
    a = Architecture.preset(name, seq_len=400, n_layers=2, norm_placement=placement)
    p, statistics = scheme("xavier")(a), default_statistics(a)
    full, coarse = predict(p, fidelity="kernel"), predict(p)
    assert any("interpolated" in note for note in coarse.notes)
    assert not any("interpolated" in note for note in full.notes)
    assert len(grid_of(400).n) < 200
    variance, correlation = differences(coarse, full)
    assert variance < 1e-3 and correlation < 1e-3
    assert grid_for(p, statistics) is grid_of(400)


def test_sums_over_nodes_are_sums_over_positions() -> None:
    """Of what is linear in ln n exactly: U, W and the averages of cosines, by explicit sums."""
    tokens = 57
    grid = Grid(tokens, np.array([0, 1, 2, 5, 11, 30, 56]))
    n = np.arange(1, tokens + 1)
    hats = np.stack([np.interp(np.log(n), np.log(grid.n), row) for row in np.eye(len(grid.n))], axis=1)  # (T, m)
    seen = n[None, :] <= grid.n[:, None]
    later = n[None, :] >= grid.n[:, None]
    np.testing.assert_allclose(grid.visible, seen @ hats, atol=1e-12)
    for power, found in enumerate(grid.by_power, 1):
        np.testing.assert_allclose(found, later @ (hats / n[:, None] ** power), atol=1e-12)
    np.testing.assert_allclose(grid.by_pairs, later[:, 1:] @ (hats[1:] / (n * (n - 1.0))[1:, None]), atol=1e-12)
    rho, _ = rotation(tokens, 16, 1e4, 0.5, True)
    cosines = rho[np.abs(np.subtract.outer(n, n))] * (1 - np.eye(tokens))
    pairs = hats.T @ (1 - np.eye(tokens)) @ hats
    some = pairs > 1e-6
    expected = hats.T @ cosines @ hats / np.where(some, pairs, 1.0)
    np.testing.assert_allclose(grid.rotated(16, 1e4, 0.5)[some], expected[some], atol=1e-10)


def test_what_positions_differ_in_otherwise_takes_all_of_them() -> None:
    a = Architecture.preset("gpt2", seq_len=300, n_layers=1)
    known = from_tokens(np.arange(300)[None] % 50)
    p = scheme("xavier")(a)
    assert grid_for(p, default_statistics(a)) is not None
    assert grid_for(p, known) is None
    for changed in ({"seq_len": 200}, {"norm_placement": "none"}, {"positions": "alibi"}):
        made = scheme("xavier")(a.replace(**changed))
        assert grid_for(made, default_statistics(made.architecture)) is None


@pytest.mark.parametrize("name", ["gpt2", "t5-base"])
def test_what_does_not_fit_is_computed_again_and_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = scheme("huggingface")(Architecture.preset(name, n_layers=9))
    kept = predict(table)
    monkeypatch.setattr(passes, "_ALL_STORED", 0)
    again = predict(table)
    assert "the others interpolated" in kept.notes[0]
    for point, series in kept.gradient.items():
        np.testing.assert_array_equal(again.gradient[point].log_variance, series.log_variance)


@pytest.mark.parametrize("placement", ["pre", "post", "none"])
def test_a_ranking_is_within_one_percent(placement: str) -> None:
    a = Architecture.preset("gpt2", n_layers=4, seq_len=128, norm_placement=placement)
    table, inputs = scheme("gpt2" if placement == "none" else "xavier")(a), default_statistics(a)
    rough, whole = predict_for_ranking(table, inputs), predict(table)
    assert rough.gradient is not None and whole.gradient is not None
    for one, other in ((rough.gradient["stream_in"], whole.gradient["stream_in"]),
                       (rough.forward["stream_out"], whole.forward["stream_out"])):  # fmt: skip
        assert one.log_variance == pytest.approx(other.log_variance, abs=0.01)
        assert not np.array_equal(one.log_variance, other.log_variance)  # it is another way
    assert rough.forward["stream_out"].variance_sd is None


def test_a_class_head_reads_one_position_of_the_last_node() -> None:
    a = Architecture(
        kind="decoder", n_layers=1, d_model=8, n_heads=2, seq_len=64, head="classes", tied_embeddings=False
    )
    grid = Grid(64, np.array([0, 5, 20, 63]))
    share = _answering(a, 8, InputStatistics(), grid)
    assert share[:4] @ grid.weights == share[4:] @ grid.weights == pytest.approx(1.0)
    assert (share[[0, 1, 2]] == 0).all()


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, ("xavier", "deepscalelm", "layerscale")),
        ({"dropout": 0.1, "attention_dropout": 0.1, "positions": "rotary"}, ("xavier", "lns")),
        ({"gated": True, "norm": "rmsnorm", "activation": "silu"}, ("xavier", "takase", "mup")),
        ({"norm_placement": "post", "activation": "relu"}, ("xavier", "deepnorm")),
        ({"norm_placement": "sandwich", "norm_bias": True}, ("xavier", "peri-ln")),
        ({}, ("fixup", "rezero", "t-fixup")),  # the second one is silent
        ({"parallel": True}, ("xavier", "ds-init")),
    ],
)
def test_tables_that_go_together_are_those_of_each(
    changes: dict[str, object], names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    a = Architecture.preset("gpt2", n_layers=2, seq_len=128, **changes)
    tables, inputs = [scheme(name)(a) for name in names], default_statistics(a)
    alone = [predict_for_ranking(table, inputs) for table in tables]
    monkeypatch.setattr(ranking, "predict_for_ranking", None)
    together = dict(predict_all_for_ranking(tables, inputs))
    for place, expected in enumerate(alone):
        found = together[place]
        assert found.notes == expected.notes
        assert found.scheme == expected.scheme
        for one, other in ((found.forward, expected.forward), (found.gradient, expected.gradient)):
            for point, series in other.items():
                np.testing.assert_allclose(one[point].log_variance, series.log_variance, atol=1e-5)
                np.testing.assert_allclose(one[point].token_correlation, series.token_correlation, atol=1e-5)


@pytest.mark.parametrize("by", [-30, -3, 0, 1, 4, 60])
def test_a_grid_moves_what_is_linear_between_its_nodes(by: int) -> None:
    """In the logarithm of the keys that a position sees; nothing stands before the first, and after the last it is as
    at the last."""
    grid = Grid(50, np.array([0, 1, 2, 4, 9, 20, 35, 49]))
    at = grid.positions + by
    expected = np.where(at >= 0, 2 + np.log(np.clip(at, 0, 49) + 1), 0.0)
    np.testing.assert_allclose(grid.moved(by) @ (2 + np.log(grid.n)), expected)


def test_what_does_not_fit_together_goes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    a = Architecture.preset("gpt2", n_layers=1, seq_len=128)
    tables, inputs = [scheme(name)(a) for name in ("xavier", "takase", "gpt2", "value-skipinit")], default_statistics(a)
    whole = dict(predict_all_for_ranking(tables, inputs))
    monkeypatch.setattr(passes, "_ALL_STORED", 2 * 6 * tables[0].n_sublayers * 8 * 64**2)
    parts = dict(predict_all_for_ranking(tables, inputs))
    assert parts.keys() == whole.keys() == set(range(4))
    for place, profile in whole.items():
        for point, series in profile.gradient.items():
            np.testing.assert_allclose(parts[place].gradient[point].log_variance, series.log_variance, atol=1e-6)

"""The layer-by-layer simulation against the whole network with every tensor kept."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from choice import some
from signalprop.data.batches import Batch, default_batch
from signalprop.errors import InputError
from signalprop.measurement.simulation import simulate
from signalprop.models import build, layerwise
from signalprop.models.transformer import Transformer, batch_tensors
from signalprop.models.weights import tensor_seed
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics, from_tokens, tensor_moments, zipf
from signalprop.network.parametrization import Parametrization
from signalprop.results.profile import POINTS, Profile
from signalprop.schemes import scheme

SMALL: dict[str, Any] = {"n_layers": 3, "d_model": 32, "n_heads": 4, "vocab_size": 60, "seq_len": 12}
CASES: dict[str, dict[str, Any]] = {
    "pre": {},
    "post": {"norm_placement": "post"},
    "sandwich": {"norm_placement": "sandwich"},
    "none": {"norm_placement": "none"},
    "mixture": {"norm_placement": ("post", "pre", "sandwich")},
    "causal": {"kind": "decoder", "n_segments": 0},
    "llama": {
        "kind": "decoder",
        "norm": "rmsnorm",
        "gated": True,
        "activation": "silu",
        "positions": "rotary",
        "n_kv_heads": 2,
        "bias": False,
        "tied_embeddings": False,
        "n_segments": 0,
    },
    "neox": {"kind": "decoder", "parallel": True, "positions": "rotary", "rotary_fraction": 0.25, "n_segments": 0},
    "qk-norm": {"qk_norm": True, "embedding_norm": True, "head_transform": True},
    "t5": {
        "kind": "encoder-decoder",
        "norm": "rmsnorm",
        "positions": "relative",
        "attention_scale": 1.0,
        "n_decoder_layers": 2,
        "target_len": 9,
        "n_segments": 0,
    },
    "bart": {"kind": "encoder-decoder", "norm_placement": "post", "n_decoder_layers": 2, "n_segments": 0},
    "classes": {"head": "classes", "n_classes": 10},
}


def architecture(case: str, **changes: Any) -> Architecture:
    return Architecture(**{"n_segments": 2, **SMALL, **CASES[case], **changes})


def table(a: Architecture) -> Parametrization:
    """A parametrization in which no multiplier or gain is trivial."""
    rng = np.random.default_rng(1)
    p = scheme("xavier", qk_gain=1.5)(a)
    n = p.n_sublayers
    columns = {name: rng.uniform(0.6, 1.4, n) for name in ("skip", "branch", "norm_gain", "post_norm_gain")}
    head = p.head.model_copy(update={"scale": 0.3, "final_norm_gain": 0.7})
    return replace(p.with_columns(**columns, bias__up=0.1), head=head)


def batch_of(a: Architecture, seed: int = 0, padded: bool = False) -> Batch:
    rng = np.random.default_rng(seed)
    length = a.target_len or a.seq_len
    tokens = rng.integers(0, a.vocab_size, (3, a.seq_len))
    targets = np.where(rng.random((3, length)) < 0.6, rng.integers(0, a.vocab_size, (3, length)), -1)
    if a.head == "classes":
        targets = rng.integers(0, a.n_classes, 3)
    keep = None
    if padded:
        keep = np.arange(a.seq_len) < np.array([[a.seq_len], [a.seq_len - 3], [5]])
        if a.kind != "encoder-decoder" and a.head == "lm":
            targets = np.where(keep, targets, -1)
    return Batch(
        tokens=tokens,
        targets=targets,
        segments=rng.integers(0, 2, tokens.shape) if a.n_segments else None,
        keep=keep,
        decoder_tokens=rng.integers(0, a.vocab_size, (3, length)) if a.kind == "encoder-decoder" else None,
    )


def whole_network(p: Parametrization, batch: Batch, seed: int) -> dict[str, list[Tensor]]:
    """Every probe point of `build` by hooks; `.grad` of each is filled by one backward pass."""
    model = build(p, seed=seed, dtype=torch.float64)
    points: dict[str, list[Tensor]] = {point: [] for point in POINTS}

    def keep(point: str, tensor: Tensor) -> Tensor:
        tensor.requires_grad_() if tensor.is_leaf else tensor.retain_grad()
        points[point].append(tensor)
        return tensor

    seed_dropout(model, seed)
    for sublayer in model.sublayers():
        sublayer.register_forward_pre_hook(lambda _, args: (keep("stream_in", args[0]), *args[1:]))
        sublayer.branch.register_forward_hook(lambda _, __, out: keep("branch", out))
        sublayer.register_forward_hook(lambda _, __, out: keep("stream_out", out))
    loss = model(**batch_tensors(batch)).loss
    loss.backward()
    return points


def seed_dropout(model: Transformer, seed: int) -> None:
    """Make the whole network draw the masks that the simulation draws."""

    def before(place: str) -> Any:
        return lambda *_: torch.manual_seed(tensor_seed(seed, place, "dropout")) and None

    for i, sublayer in enumerate(model.sublayers()):
        sublayer.register_forward_pre_hook(before(str(i)))
    for name in ("encoder", "decoder"):
        if getattr(model, name) is not None:
            getattr(model, name).embedding.register_forward_pre_hook(before(f"{name} embedding"))


def assert_equal(profile: Profile, points: dict[str, list[Tensor]], keeps: list[Any], rtol: float = 1e-8) -> None:
    top = points["stream_out"][-1].grad
    reference = float(tensor_moments(top.numpy(), keeps[-1]).variance)
    assert profile.gradient_scale == pytest.approx(reference, rel=rtol)
    for point in POINTS:
        for i, tensor in enumerate(points[point]):
            assert tensor.grad is not None
            for series, values, unit in (
                (profile.forward[point], tensor.detach(), 1.0),
                (profile.gradient[point], tensor.grad, reference),
            ):
                expected = tensor_moments(values.numpy(), keeps[i])
                where = f"{point} {i}"
                assert series.variance[i] == pytest.approx(expected.variance / unit, rel=rtol), where
                assert series.token_correlation[i] == pytest.approx(expected.token_correlation, abs=rtol), where
                assert series.mean[i] == pytest.approx(expected.mean / unit**0.5, rel=rtol, abs=1e-9), where


@pytest.mark.parametrize(
    ("case", "dropout"), some(product(CASES, (0.0, 0.2)), [(case, (0.2, 0.0)[i % 2]) for i, case in enumerate(CASES)])
)
def test_equals_the_whole_network(case: str, dropout: float) -> None:
    a = architecture(case, dropout=dropout)
    p, batch = table(a), batch_of(a)
    profile = simulate(p, batch=batch, n_seeds=1, seed=5, dtype=torch.float64)
    assert_equal(profile, whole_network(p, batch, 5), [None] * p.n_sublayers)
    assert profile.source == "simulated" and profile.fidelity == "simulate" and profile.n_seeds == 1


@pytest.mark.parametrize("case", ["pre", "causal", "t5"])
def test_padding_counts_nowhere(case: str) -> None:
    a = architecture(case)
    p, batch = table(a), batch_of(a, padded=True)
    profile = simulate(p, batch=batch, n_seeds=1, dtype=torch.float64)
    decoder = a.kind == "encoder-decoder"
    keeps = [None if decoder and stack == 1 else batch.keep for stack in p.stack]
    assert_equal(profile, whole_network(p, batch, 0), keeps)


@pytest.mark.parametrize("case", ["pre", "neox", "t5"])
def test_stored_streams_or_recomputed_ones_give_the_same(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a = architecture(case, dropout=0.1, **({} if case == "t5" else {"n_layers": 7}))
    p, batch = table(a), batch_of(a)
    whole = simulate(p, batch=batch, n_seeds=1)
    monkeypatch.setattr(layerwise, "STREAM_MEMORY", 0)
    assert simulate(p, batch=batch, n_seeds=1) == whole


def test_gradient_below_the_range_of_float32() -> None:
    a = architecture("none", n_layers=60, dropout=0.0)
    p = scheme("xavier")(a).with_columns(skip=0.1, branch=1e-6)
    profile = simulate(p, batch=batch_of(a), n_seeds=1)
    logs = profile.gradient["stream_in"].log_variance
    np.testing.assert_allclose(logs[0], 120 * np.log(0.01), rtol=1e-3)
    assert profile.forward["stream_out"].variance[5] == pytest.approx(profile.input["variance"] * 0.01**6, rel=1e-3)


def test_seeds_give_error_bars_and_the_same_numbers_again() -> None:
    a = architecture("pre", dropout=0.1)
    p = scheme("xavier")(a)
    state = torch.get_rng_state()
    steps: list[tuple[int, int]] = []
    profile = simulate(p, n_seeds=3, seed=1, batch_size=2, progress=lambda *now: steps.append(now))
    assert torch.equal(state, torch.get_rng_state())
    assert simulate(p, n_seeds=3, seed=1, batch_size=2) == profile
    assert steps == [(i + 1, 36) for i in range(36)]
    assert profile.n_seeds == 3 and profile.gradient is not None
    single = [simulate(p, n_seeds=1, seed=s, batch_size=2).forward["branch"].variance for s in (1, 2, 3)]
    np.testing.assert_allclose(profile.forward["branch"].variance, np.mean(single, 0))
    errors = np.std(single, 0, ddof=1) / np.sqrt(3) / np.mean(single, 0)
    series = profile.forward["branch"]
    assert series.variance_se is not None
    np.testing.assert_allclose(series.variance_se, errors)
    assert profile.gradient["stream_out"].variance[-1] == pytest.approx(1.0)


def test_seq_len_changes_the_data_and_the_architecture() -> None:
    p = scheme("xavier")(architecture("t5"))
    profile = simulate(p, n_seeds=1, seq_len=7)
    assert (profile.architecture.seq_len, profile.architecture.target_len) == (7, 7)


def test_stream_statistics_are_met() -> None:
    a = architecture("pre", d_model=128, seq_len=64, n_layers=1)
    inputs = InputStatistics("stream", 0.4, mean=0.5, variance=2.0, target_correlation=0.6, loss_fraction=0.5)
    profile = simulate(scheme("xavier")(a), inputs, batch_size=8, n_seeds=4)
    # 8 x 128 common features and 4 seeds: relative error of the correlation about sqrt(2 / 4096)
    assert profile.input["mean"] == pytest.approx(0.5, abs=0.06)
    assert profile.input["variance"] == pytest.approx(2.0, rel=0.02)
    assert profile.input["token_correlation"] == pytest.approx(0.4, abs=0.02)
    assert profile.gradient is not None and profile.gradient_scale is None
    assert profile.gradient["stream_out"].token_correlation[-1] == pytest.approx(0.3, abs=0.02)
    assert any("Gaussian" in note for note in profile.notes)


@pytest.mark.parametrize("case", ["causal", "bart", "classes"])
def test_ids_of_the_statistics_are_used_as_they_are(case: str) -> None:
    a = architecture(case, dropout=0.0, n_segments=0)
    p, batch = scheme("xavier")(a), batch_of(a, padded=True)
    statistics = batch.statistics(a) if case != "classes" else from_tokens(np.where(batch.keep, batch.tokens, -1))
    one, other = simulate(p, statistics, n_seeds=1), simulate(p, batch=batch, n_seeds=1)
    assert one.forward["branch"] == other.forward["branch"]
    if case != "classes":  # whose statistics hold no class ids
        assert one.gradient == other.gradient


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"n_seeds": 0}, "n_seeds is 0"),
        ({"batch_size": 0}, "batch_size 0"),
        ({"inputs": zipf(60), "batch": default_batch(Architecture(**SMALL))}, "both given"),
    ],
)
def test_refuses_bad_arguments(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        simulate(scheme("xavier")(architecture("pre")), **arguments)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": np.full((3, 12), 60)}, "holds id 60; the vocabulary is 0..59"),
        ({"targets": np.full((3, 12), 60)}, "targets hold id 60; the head has 60 outputs"),
        ({"targets": np.zeros((3, 11), int)}, "targets have shape .*; expected"),
    ],
)
def test_refuses_a_batch_that_does_not_fit(changes: dict[str, Any], words: str) -> None:
    a = architecture("pre")
    with pytest.raises(InputError, match=words):
        simulate(scheme("xavier")(a), batch=replace(batch_of(a), **changes), n_seeds=1)


def test_zero_head_gives_a_zero_gradient_and_says_so() -> None:
    a = architecture("pre", tied_embeddings=False)
    p = scheme("xavier")(a)
    p = replace(p, head=p.head.model_copy(update={"weight": 0.0}))
    profile = simulate(p, batch=batch_of(a), n_seeds=2)
    assert profile.gradient is not None and profile.gradient_scale == 0
    assert (profile.gradient["stream_in"].variance == 0).all()
    assert any("gradient at the last stream_out is zero" in note for note in profile.notes)


def test_profile_says_how_long_the_sequences_were() -> None:
    a = architecture("t5")
    batch = batch_of(a)
    short = replace(
        batch, tokens=batch.tokens[:, :6], decoder_tokens=batch.decoder_tokens[:, :4], targets=batch.targets[:, :4]
    )
    profile = simulate(scheme("xavier")(a), batch=short, n_seeds=1)
    assert (profile.architecture.seq_len, profile.architecture.target_len) == (6, 4)
    assert any("relative position bias" in note for note in profile.notes)


def test_says_where_the_signal_overflows() -> None:
    a = architecture("none", n_layers=4)
    p = scheme("xavier")(a).with_columns(branch=1e12)
    # attention 1e12, feed-forward 1e24: the squared scores of the next attention pass float32's 3e38
    with pytest.raises(
        InputError, match=r"signal is not finite at branch of sublayer 2 \(encoder layer 1, attention\)"
    ):
        simulate(p, batch=batch_of(a), n_seeds=1)

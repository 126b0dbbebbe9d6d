"""What `predict` says beside its numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from signalprop.data.batches import default_batch
from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import Parametrization
from signalprop.prediction import predict
from signalprop.results.profile import Profile
from signalprop.schemes import scheme

SMALL = Architecture.preset("tgs", n_layers=2, d_model=64, n_heads=4)


def warned(p: Parametrization) -> bool:
    return any("nearly one-hot" in note for note in predict(p).notes)


@pytest.mark.parametrize(("name", "options"), [("noci", {}), ("xavier", {"qk_gain": 2.0})])
def test_large_scores_are_pointed_at(name: str, options: dict[str, float]) -> None:
    assert warned(scheme(name, **options)(SMALL))


@pytest.mark.parametrize("name", ["xavier", "deepscalelm", "fixed", "t-fixup"])
def test_ordinary_scores_are_not(name: str) -> None:
    assert not warned(scheme(name)(SMALL))


def test_a_sweep_has_no_such_note() -> None:
    table = scheme("noci")(SMALL)
    assert not warned(Parametrization.sweep([table, table]))


def test_scores_that_nothing_reads_do_not_count() -> None:
    assert not warned(scheme("noci")(SMALL).with_columns(attention_gain=0.0, value_skip=1.0))


def said(p: Profile, words: str) -> bool:
    return any(words in note for note in p.notes)


def test_positions_of_a_causal_decoder_are_not_called_alike() -> None:
    two = Architecture.preset("t5-small", n_layers=1, d_model=64, n_heads=4)
    for a, alike in ((two, False), (SMALL, True)):
        assert said(predict(a), "averages suffice for equivalent positions") == alike
        assert said(predict(a), "positions of a causal decoder differ") != alike


def test_averages_that_are_asked_for_say_what_would_be_right() -> None:
    causal = Architecture.preset("gpt2", n_layers=2, d_model=64, n_heads=4, seq_len=16)
    words = "only a rough guide here: positions of a causal stack differ"
    assert said(predict(causal, fidelity="moments"), words)
    assert not said(predict(causal), "rough guide")
    assert not said(predict(SMALL, fidelity="moments"), "rough guide")


@pytest.mark.parametrize(("activation", "warns"), [("keep", True), ("dks", False)])
def test_gates_without_norms_are_pointed_at(activation: str, warns: bool) -> None:
    a = Architecture.preset("llama-130m", n_layers=4, d_model=256, n_heads=4, seq_len=16)
    assert said(predict(scheme("value-skipinit", activation=activation)(a)), "without norms") == warns
    assert not said(predict(a), "without norms")


@pytest.mark.parametrize(("name", "warns"), [("deepscalelm", True), ("xavier", False)])
def test_gradients_of_nearly_equal_tokens_are_pointed_at(name: str, warns: bool) -> None:
    """Two layers of DeepScaleLM have no skips."""
    a = Architecture(
        kind="encoder-decoder", n_layers=2, n_decoder_layers=2, d_model=128, n_heads=2, d_ff=256, vocab_size=2000,
        seq_len=16, target_len=16, positions="none",
    )  # fmt: skip
    found = predict(scheme(name)(a))
    assert any("nearly equal" in note for note in found.notes) == warns


def test_images_that_are_averaged_are_pointed_at() -> None:
    a = Architecture.preset("vit-small", n_layers=1, d_model=64, n_heads=4, patch_dim=4, seq_len=5)
    batch = default_batch(a, batch_size=2)
    assert said(predict(a, batch.statistics(a), fidelity="moments"), "images are predicted by their average")
    assert not said(predict(a, batch.statistics(a)), "by their average")
    assert not said(predict(a), "images are")


def test_averages_that_lose_equal_tokens_are_pointed_at() -> None:
    fields = {"n_layers": 8, "d_model": 256, "n_heads": 4, "n_kv_heads": 4, "vocab_size": 200, "seq_len": 64}
    lfm2 = Architecture.preset("lfm2-1.2b", branches=("gated_convolution", "feed_forward"), **fields)
    batch = default_batch(lfm2, batch_size=2)
    table = scheme("huggingface")(lfm2)
    real, average = predict(table, batch.statistics(lfm2)), predict(table)
    assert said(average, "repeated words enter") and not said(real, "repeated words enter")
    r = real.forward["stream_in"].token_correlation
    assert r.min() > r[0] / 2
    assert not said(predict(Architecture.preset("llama-130m", **fields)), "repeated words enter")


def test_a_batch_without_segments_is_one_segment_as_models_read_it() -> None:
    a = Architecture.preset("bert-base", n_layers=1, d_model=64, n_heads=4, vocab_size=100, seq_len=16)
    batch = default_batch(a, batch_size=2)
    one = replace(batch, segments=None).statistics(a)
    assert one.segment_correlation == 1.0
    assert batch.statistics(a).segment_correlation < 1.0


@pytest.mark.parametrize(
    ("eps", "fidelity", "expected"), [(1e-5, "moments", True), (1e-12, "moments", False), (1e-5, "kernel", False)]
)
def test_qk_norm_on_tokens_of_different_sizes_is_pointed_at(eps: float, fidelity: str, expected: bool) -> None:
    small = Architecture.preset("olmo2-7b", n_layers=2, d_model=64, n_heads=4, seq_len=16, norm_eps=eps)
    assert said(predict(scheme("huggingface")(small), fidelity=fidelity), "QK-norm divides") is expected


@pytest.mark.parametrize(
    ("kind", "placement", "fidelity", "said"),
    [("encoder", "pre", "moments", "use fidelity kernel"), ("encoder", "pre", "auto", ""),
     ("decoder", "pre", "auto", "under a causal mask"), ("encoder-decoder", "post", "auto", "at width 128"),
     ("encoder-decoder", "pre", "auto", "")],
)  # fmt: skip
def test_equal_tokens_meet_large_scores(kind: str, placement: str, fidelity: Any, said: str) -> None:
    both = {"n_decoder_layers": SMALL.n_layers, "target_len": 48} if kind == "encoder-decoder" else {}
    a = SMALL.replace(
        kind=kind, norm_placement=placement, positions="none", n_segments=0, vocab_size=100, seq_len=48, **both
    )
    inputs = default_batch(a, batch_size=2).statistics(a)
    for gain, large in ((1.5, True), (0.3, False)):
        found = predict(scheme("xavier", qk_gain=gain)(a), inputs, fidelity=fidelity).notes
        notes = [note for note in found if "are repeats" in note]
        assert len(notes) == (large and said != "") and all(said in note for note in notes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({}, "measured 1.2"), ({"attention_dropout": 0.0}, "15 %"), ({"norm_placement": "pre"}, "15 %")],
)
def test_dropout_of_sharp_attention_under_norms_on_branches(changes: dict[str, Any], said: str) -> None:
    fields = {"kind": "decoder", "norm_placement": "sandwich", "attention_dropout": 0.3, "seq_len": 8, **changes}
    a = Architecture(n_layers=2, d_model=64, n_heads=4, vocab_size=300, **fields)
    table = scheme("xavier", qk_gain=2.0)(a)
    notes = [note for note in predict(table).notes if "one-hot" in note or "attention has dropout" in note]
    assert len(notes) == 1
    assert said in notes[0]

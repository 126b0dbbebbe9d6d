"""Token kernels of whole batches: sequence by sequence, pooled as measured; padding; against random networks."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from signalprop.data.batches import default_batch, text_batch
from signalprop.kernels import passes
from signalprop.kernels.embedding_and_loss import input_kernel, sequences
from signalprop.kernels.position_grid import Grid
from signalprop.kernels.predicting import predict_token_kernels
from signalprop.kernels.scaled_kernel import State
from signalprop.kernels.stack import Stack
from signalprop.measurement.simulation import simulate
from signalprop.models.ends import sinusoidal_table
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics, from_tokens
from signalprop.network.kinds import kind_named
from signalprop.prediction import predict
from signalprop.results.profile import POINTS, Profile
from signalprop.schemes import scheme

FIELDS: dict[str, Any] = {"n_layers": 3, "d_model": 64, "n_heads": 2, "vocab_size": 50}


def statistics(n: int, length: int, seed: int = 0) -> InputStatistics:
    """Sequences of ever fewer different ids."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.integers(0, 40 // (i + 1) + 1, length + 1) for i in range(n)])
    return from_tokens(ids[:, :-1], targets=ids[:, 1:])


def single(inputs: InputStatistics, row: int) -> InputStatistics:
    return replace(inputs, tokens=inputs.tokens[[row]], targets=inputs.targets[[row]])


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_a_batch_is_its_sequences_pooled(kind: Any, placement: Any) -> None:
    a = Architecture(**FIELDS, kind=kind, seq_len=24, norm_placement=placement)
    p, inputs = scheme("xavier")(a), statistics(3, 24)
    together = predict_token_kernels(p, inputs)
    parts = [predict_token_kernels(p, single(inputs, row)) for row in range(3)]
    for point in POINTS:
        variances = np.stack([part.forward[point].variance for part in parts])
        shared = np.stack([part.forward[point].token_correlation for part in parts]) * variances
        np.testing.assert_allclose(together.forward[point].variance, variances.mean(0), rtol=1e-12)
        np.testing.assert_allclose(
            together.forward[point].token_correlation, shared.mean(0) / variances.mean(0), rtol=1e-10
        )
    # the gradient's unit differs from sequence to sequence, so the pooled one lies between them
    singles = np.stack([part.gradient["stream_in"].variance for part in parts if part.gradient is not None])
    found = together.gradient["stream_in"].variance
    assert ((found > singles.min(0) * (1 - 1e-9)) & (found < singles.max(0) * (1 + 1e-9))).all()
    assert together.gradient["stream_out"].variance[-1] == pytest.approx(1.0)
    assert together.input["token_correlation"] == together.forward["stream_in"].token_correlation[0]


def test_many_sequences_are_represented_by_four() -> None:
    a = Architecture(**FIELDS, kind="decoder", seq_len=30)
    inputs = from_tokens(np.stack([np.arange(30) % period for period in range(28, 6, -2)]))
    parts, note = sequences(a, inputs)
    assert note == "token kernels of 4 of the 11 sequences, evenly spaced by their token correlation"
    assert inputs.tokens is not None
    # ids repeat ever sooner row by row, so the order of the rows is that of their token correlation
    rows = [int(np.flatnonzero((inputs.tokens == part.tokens).all(1))[0]) for part, _ in parts]
    assert rows == [1, 4, 6, 9]
    assert predict_token_kernels(scheme("xavier")(a), inputs).notes == (note,)
    assert len(sequences(a.replace(seq_len=600), statistics(3, 600))[0]) == 2


@pytest.mark.parametrize("segments", [[0, 0, 1, 1, 1], None])
def test_tokens_that_enter_share_words_and_segments(segments: list[int] | None) -> None:
    """Entry by entry. Unknown segments are shared as often as on average, a single one always."""
    ids, (token, position, segment) = np.array([[3, 7, 3, 7, 9]]), (0.5, 0.3, 0.8)
    a = Architecture(**FIELDS, kind="encoder", seq_len=5, n_segments=2, norm_placement="pre", embedding_norm=False)
    p = scheme("xavier")(a)
    p = replace(p, embedding=p.embedding.model_copy(update={"token": token, "position": position, "segment": segment}))
    inputs = from_tokens(ids, segments=None if segments is None else np.array([segments]))
    equal = (ids[0][:, None] == ids[0]) * token**2 + position**2 * np.eye(5)
    same = inputs.segment_correlation if segments is None else np.equal.outer(segments, segments)
    expected = equal + segment**2 * np.where(np.eye(5) > 0, 1.0, same)
    kept = np.eye(5) / (1 - (a.embedding_dropout or 0.0)) + (1 - np.eye(5))
    np.testing.assert_allclose(input_kernel(p, inputs), expected * kept)
    one = replace(p, architecture=a.replace(n_segments=1))
    np.testing.assert_allclose(input_kernel(one, inputs), (equal + segment**2) * kept)


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_dropout_of_one_token_is_a_larger_branch(placement: Any) -> None:
    found = []
    for dropout, branch in ((0.2, 0.7), (0.0, 0.7 / 0.8**0.5)):
        a = Architecture(
            **FIELDS, kind="decoder", seq_len=1, norm_placement=placement, dropout=dropout, embedding_dropout=0.0,
            attention_dropout=0.0,
        )  # fmt: skip
        found.append(predict(scheme("xavier")(a).with_columns(branch=branch), fidelity="kernel"))
    dropped, larger = found
    for one, other in ((dropped.forward, larger.forward), (dropped.gradient, larger.gradient)):
        np.testing.assert_allclose(one["stream_in"].variance, other["stream_in"].variance, rtol=1e-10)


def test_progress_counts_every_sublayer_both_ways() -> None:
    p, told = scheme("xavier")(Architecture(**FIELDS, kind="decoder", seq_len=24)), []
    predict_token_kernels(p, statistics(3, 24), progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told)
    assert set(told) == {(done, 36) for done in range(1, 37)}  # 3 sequences of 6 sublayers, forward and back


def test_padding_on_the_right_of_a_decoder_changes_nothing() -> None:
    inputs = statistics(2, 24)
    assert inputs.tokens is not None and inputs.targets is not None
    padding = np.full((2, 6), -1)
    padded = from_tokens(np.hstack([inputs.tokens, padding]), targets=np.hstack([inputs.targets, padding]))
    p = scheme("xavier")(Architecture(**FIELDS, kind="decoder", seq_len=24, activation="gelu"))
    short = predict_token_kernels(p, inputs)
    longer = predict_token_kernels(scheme("xavier")(p.architecture.replace(seq_len=30)), padded)
    for point in POINTS:
        # softmax moments are interpolated between row lengths, which depend on the longest
        np.testing.assert_allclose(longer.forward[point].variance, short.forward[point].variance, rtol=0.005)
        np.testing.assert_allclose(longer.gradient[point].variance, short.gradient[point].variance, rtol=0.005)
        np.testing.assert_allclose(
            longer.forward[point].token_correlation, short.forward[point].token_correlation, atol=0.003
        )


def test_gated_feed_forwards_see_equal_tokens_sequence_by_sequence(word_stream: np.ndarray) -> None:
    """A gated block's kernel is strongly curved at low correlation: f((1 + 0) / 2) is far from (f(1) + f(0)) / 2."""
    a = Architecture(
        kind="decoder", n_layers=2, d_model=384, n_heads=4, gated=True, activation="silu", norm="rmsnorm", seq_len=96,
        positions="rotary", vocab_size=1000, bias=False, norm_bias=False, tied_embeddings=False,
    )  # fmt: skip
    batch = text_batch(a, np.where(word_stream < 1000, word_stream, 0), 3, 0)
    p = scheme("deepscalelm-simple")(a)
    predicted: Profile = predict_token_kernels(p, batch.statistics(a))
    measured = simulate(p, batch=batch, n_seeds=8, backward=False)
    ours, theirs = predicted.forward["branch"], measured.forward["branch"]
    rows = kind_named("feed_forward").of(p)
    error = np.abs(ours.token_correlation - theirs.token_correlation)[rows]
    # 1/d: random overlaps of different tokens enter the curved function too
    assert (error < 4 * theirs.token_correlation_se[rows] + 3 / a.d_model).all(), error


def test_a_classifier_sends_its_gradient_to_the_position_that_it_reads() -> None:
    fields = {"n_layers": 4, "d_model": 128, "vocab_size": 200, "seq_len": 32, "n_classes": 10}
    a = Architecture(kind="decoder", head="classes", tied_embeddings=False, **fields)  # type: ignore[arg-type]
    batch = default_batch(a, batch_size=2)
    p = scheme("xavier")(a)
    predicted, measured = predict(p, batch.statistics(a)), simulate(p, batch=batch, n_seeds=12)
    assert predicted.fidelity == "kernel" and predicted.gradient is not None and measured.gradient is not None
    found = measured.gradient["stream_in"]
    assert abs(np.log(predicted.gradient["stream_in"].variance / found.variance)[0]) < 3 * found.variance_se[0] < 0.25


def test_segments_of_a_sequence_are_blocks() -> None:
    """One layer without skips, 12 networks: by the average correlation of two segments token correlations are .05 too
    high."""
    a = Architecture.preset("tgs", n_layers=1, d_model=128, n_heads=4, vocab_size=2000, seq_len=64, dropout=0)
    p, batch = scheme("deepscalelm")(a), default_batch(a, batch_size=2)
    halves = replace(batch, segments=np.tile(np.arange(64) >= 24, (2, 1)).astype(batch.segments.dtype))
    found = predict(p, halves.statistics(a), fidelity="kernel")
    r = found.forward["stream_out"].token_correlation
    measured = np.mean([
        simulate(p, batch=halves, n_seeds=1, seed=seed).forward["stream_out"].token_correlation for seed in range(12)
    ], axis=0)  # fmt: skip
    averaged = predict(p, replace(halves.statistics(a), segments=None), fidelity="kernel")
    assert np.abs(r - measured).max() < 0.03  # standard error .01
    assert np.abs(averaged.forward["stream_out"].token_correlation - measured).max() > 0.04


def test_sinusoidal_positions_are_those_of_the_built_table() -> None:
    a = Architecture(
        kind="decoder", n_layers=1, d_model=64, n_heads=2, vocab_size=50, seq_len=16, positions="sinusoidal"
    )
    p = scheme("xavier")(a)
    p = replace(
        p, embedding=p.embedding.model_copy(update={"token": 0.0, "segment": 0.0, "position": 2.0, "scale": 1.0})
    )
    ids = np.arange(16)[None]
    table = sinusoidal_table(16, 64).double().numpy()
    table -= table.mean(1, keepdims=True)
    found = input_kernel(p, InputStatistics(tokens=ids, targets=ids))
    np.testing.assert_allclose(found, 4 * table @ table.T / 64, atol=1e-5)


def test_what_the_way_back_keeps_is_as_large_as_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a factor of 2; where no more is allowed all is kept, and a grid's members go together one at a time."""
    p = scheme("xavier")(Architecture(**FIELDS | {"n_layers": 12, "kind": "decoder", "seq_len": 96}))
    predict(p, fidelity="kernel")  # what is remembered stays
    tracemalloc.start()
    predict_token_kernels(p, InputStatistics(token_correlation=0.1))
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    stack, start = Stack(p), State(np.eye(96))
    for allowed, fits in ((held / 2, False), (2 * held, True)):
        monkeypatch.setattr(passes, "_ALL_STORED", allowed)
        assert passes._all_count(stack, start) is fits
        assert (passes.most_together(p, Grid(96, np.arange(48))) > 0) is fits

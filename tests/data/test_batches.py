"""Real input: batches of text and images for every kind of architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from signalprop.data.batches import (
    MASK,
    UNKNOWN,
    default_batch,
    default_text,
    image_batch,
    load_frames,
    load_text,
    mask_tokens,
    text_batch,
    windows,
    word_ids,
)
from signalprop.errors import InputError
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import collision_probability, tensor_moments

TEXT = "the cat and the dog, the end. " * 40
IDS = np.arange(1000) % 90 + 2


def model(**changes: Any) -> Architecture:
    return Architecture(**{"n_layers": 1, "d_model": 8, "vocab_size": 100, "seq_len": 12, **changes})


def digits(**changes: Any) -> Architecture:
    fields = {
        "input": "patches",
        "patch_dim": 16,
        "seq_len": 17,
        "class_token": True,
        "head": "classes",
        "n_classes": 10,
    }
    return model(**{**fields, **changes})


class TestText:
    def test_ids_by_falling_frequency(self) -> None:
        ids = word_ids("b a a , c a b", 5)  # a: 2, b: 3, "," comes first of the rest: 4, c is unknown
        assert ids.tolist() == [3, 2, 2, 4, UNKNOWN, 2, 3]

    def test_default_text(self) -> None:
        text = default_text()
        assert len(text) > 10**7 and "Fellow" in text
        ids = word_ids(text[:200_000], 1000)
        assert ids.max() == 999 and ids.min() == 0
        counts = np.bincount(ids)[2:]
        assert (np.diff(counts) <= 0).all()

    def test_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text(TEXT)
        assert load_text(tmp_path / "a.txt") == TEXT
        batch = default_batch(model(), text=tmp_path / "a.txt", batch_size=2)
        assert batch.source.endswith("a.txt") and batch.tokens is not None and batch.tokens.shape == (2, 12)
        (tmp_path / "empty.txt").write_text("")
        with pytest.raises(InputError, match="empty"):
            default_batch(model(), text=tmp_path / "empty.txt")

    def test_windows_are_stretches_of_the_text(self) -> None:
        ids = np.arange(50)
        rows = windows(ids, 7, 300, seed=0)
        assert rows.shape == (300, 7) and (np.diff(rows) == 1).all()
        assert set(rows[:, 0]) == set(range(44))  # every start is possible, the last too
        assert windows(ids, 50, 2, seed=0).tolist() == [ids.tolist()] * 2

    @pytest.mark.parametrize(("length", "n", "seed"), [(51, 1, 0), (5, 0, 0), (5, -1, 0), (5, 1, -1)])
    def test_impossible_windows(self, length: int, n: int, seed: int) -> None:
        with pytest.raises(InputError):
            windows(np.arange(50), length, n, seed)


class TestMasking:
    def test_shares(self) -> None:
        n = 200_000
        tokens = np.full((1, n), 7)
        inputs, targets = mask_tokens(tokens, 100, seed=0)
        chosen = targets >= 0
        assert (targets[chosen] == 7).all() and (inputs[~chosen] == 7).all()
        assert abs(chosen.mean() - 0.15) < 4 * np.sqrt(0.15 * 0.85 / n)
        kept = inputs[chosen]
        m = kept.size
        # a random id is the token itself, or the mask, once in a hundred
        for share, expected in ((np.mean(kept == MASK), 0.801), (np.mean(kept == 7), 0.101)):
            assert abs(share - expected) < 4 * np.sqrt(expected * (1 - expected) / m)
        others = kept[(kept != MASK) & (kept != 7)]
        assert set(others) == set(range(100)) - {MASK, 7}

    def test_something_always_carries_loss(self) -> None:
        found = [mask_tokens(np.full((3, 2), 5), 10, seed)[1].tolist() for seed in range(20)]
        assert [[5, -1]] * 3 in found  # where none of the six was drawn
        assert [[-1, -1]] * 3 not in found


class TestBatches:
    def test_encoder(self) -> None:
        batch = text_batch(model(n_segments=2), IDS, 5, seed=0)
        assert batch.tokens.shape == batch.targets.shape == batch.segments.shape == (5, 12)
        unmasked = batch.targets < 0
        rows = np.where(unmasked, batch.tokens, batch.targets)
        assert (np.diff(rows) % 90 == 1).all()  # the text itself, once the masks are lifted
        assert (np.diff(batch.segments) >= 0).all() and set(batch.segments.ravel()) <= {0, 1}

    def test_decoder(self) -> None:
        batch = text_batch(model(kind="decoder"), IDS, 5, seed=0)
        assert batch.tokens is not None and batch.segments is None
        assert (batch.tokens[:, 1:] == batch.targets[:, :-1]).all() and batch.targets.shape == (5, 12)

    def test_encoder_decoder(self) -> None:
        batch = text_batch(model(kind="encoder-decoder", target_len=5), IDS, 5, seed=0)
        assert batch.tokens.shape == (5, 12) and batch.decoder_tokens.shape == batch.targets.shape == (5, 5)
        assert (
            (batch.decoder_tokens[:, 0] - batch.tokens[:, -1]) % 90 == 1
        ).all()  # it goes on where the encoder stops
        assert (batch.decoder_tokens[:, 1:] == batch.targets[:, :-1]).all()

    @pytest.mark.parametrize("kind", ["encoder", "decoder", "encoder-decoder"])
    def test_statistics_are_those_of_the_ids(self, kind: str) -> None:
        a = model(kind=kind, n_segments=2)
        ids = np.random.default_rng(0).integers(0, 7, 500)
        batch = text_batch(a, ids, 6, seed=1, source="ids")
        x = batch.statistics(a)
        assert x.token_correlation == collision_probability(batch.tokens) and x.source == "ids"
        assert x.segment_correlation == collision_probability(batch.segments)
        top = x.decoder or x
        assert top.target_correlation == collision_probability(batch.targets)
        assert top.loss_fraction == pytest.approx(np.mean(batch.targets >= 0))
        if x.decoder is not None:
            assert x.decoder.token_correlation == collision_probability(batch.decoder_tokens)

    @pytest.mark.parametrize(
        ("changes", "ids", "size", "seed"),
        [
            ({}, IDS[:5], 2, 0),
            ({}, IDS + 100, 2, 0),
            ({}, IDS - 5, 2, 0),
            ({}, IDS, 0, 0),
            ({}, IDS, 2, -1),
            ({"input": "patches"}, IDS, 2, 0),
        ],
    )
    def test_bad_requests(self, changes: dict[str, Any], ids: Any, size: int, seed: int) -> None:
        with pytest.raises(InputError):
            text_batch(model(**changes), ids, size, seed)


def speech(**changes: Any) -> Architecture:
    fields = {"kind": "encoder-decoder", "input": "frames", "frame_dim": 9, "seq_len": 12, "target_len": 7}
    return model(**fields | changes)


class TestSpeech:
    def test_the_decoder_reads_the_text(self) -> None:
        batch = text_batch(speech(), IDS, 5, seed=0, source="ids")
        assert batch.tokens is None and batch.frames is not None and batch.decoder_tokens is not None
        assert batch.frames.shape == (5, 24, 9) and batch.decoder_tokens.shape == batch.targets.shape == (5, 7)
        assert (batch.decoder_tokens[:, 1:] == batch.targets[:, :-1]).all()
        assert (
            batch.input == "frames"
            and batch.source == "synthetic frames: Gaussian noise like filter banks, no speech, ids"
        )
        x = batch.statistics(speech())
        assert (x.kind, x.mean, x.variance) == ("frames", pytest.approx(0, abs=1e-12), pytest.approx(1))
        assert x.decoder is not None and x.decoder.token_correlation == collision_probability(batch.decoder_tokens)

    def test_frames_of_a_file(self, tmp_path: Path) -> None:
        frames = np.random.default_rng(0).standard_normal((2, 24, 9))
        np.save(tmp_path / "x.npy", frames)
        batch = default_batch(speech(vocab_size=50), frames=tmp_path / "x.npy", batch_size=6)
        assert batch.frames is not None and {row.tobytes() for row in batch.frames} == {row.tobytes() for row in frames}
        np.save(tmp_path / "one.npy", frames[0])
        assert load_frames(tmp_path / "one.npy").shape == (1, 24, 9)


class TestImages:
    @pytest.fixture(autouse=True)
    def _needs_scikit_learn(self) -> None:
        pytest.importorskip("sklearn")

    @pytest.mark.parametrize(("grid", "side", "channels"), [(2, 4, 1), (4, 4, 3), (8, 1, 1), (1, 16, 1), (3, 5, 3)])
    def test_patches_put_together_are_the_digits(self, grid: int, side: int, channels: int) -> None:
        from sklearn.datasets import load_digits

        a = digits(seq_len=grid * grid + 1, patch_dim=channels * side * side)
        batch = image_batch(a, 5, seed=0)
        assert batch.patches is not None and batch.patches.shape == (5, grid * grid, a.patch_dim)
        data = load_digits()
        known = (data.images - data.images.mean()) / data.images.std()
        pick = np.arange(grid * side) * 8 // (grid * side)
        patches = batch.patches.reshape(5, grid, grid, channels, side, side)
        for image, label in zip(patches, batch.targets, strict=True):
            rows = [np.concatenate([image[i, j] for j in range(grid)], axis=-1) for i in range(grid)]
            whole = np.concatenate(rows, axis=-2)
            assert all(np.array_equal(whole[0], channel) for channel in whole)
            matches = (known[:, pick][:, :, pick] == whole[0]).all((1, 2))
            assert label in data.target[matches]

    def test_statistics(self) -> None:
        batch = image_batch(digits(), 20, seed=0)
        x = batch.statistics(digits())
        m = tensor_moments(np.asarray(batch.patches))
        assert (x.kind, x.mean, x.variance, x.token_correlation) == ("patches", m.mean, m.variance, m.token_correlation)
        assert (x.loss_fraction, x.target_correlation) == (1 / 17, 0.0)

    @pytest.mark.parametrize("changes", [{"seq_len": 16}, {"patch_dim": 15}, {"seq_len": 3}])
    def test_what_is_not_a_grid(self, changes: dict[str, Any]) -> None:
        with pytest.raises(InputError, match="square"):
            image_batch(digits(**changes), 2, seed=0)

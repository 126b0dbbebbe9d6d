"""Tasks: what a model reads and is asked for, made of a recipe's data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from signalprop.diagnosis import stream as streams
from signalprop.diagnosis.stream import Frame, frame_of
from signalprop.errors import InputError
from signalprop.network.inputs import IntArray
from signalprop.network.moments import FloatArray
from signalprop_lab.training.examples import IGNORED, Example, Examples, Metrics, Prepared
from signalprop_lab.training.images import Labelled, Pixels, augmented, labelled_images, patches_of
from signalprop_lab.training.recipe import Data, Recipe, architecture_of
from signalprop_lab.training.sides import Sides, document_sides, key_of, sides
from signalprop_lab.training.sources import Classified, Pair, Place, classified, pairs, training_place
from signalprop_lab.training.speech import (
    SYNTHETIC,
    Synthetic,
    Utterance,
    longest_synthetic,
    synthetic_texts,
    utterances,
)
from signalprop_lab.training.tokenized import tokenized
from signalprop_lab.training.tokenizers import separator, special_ids

BUFFER = 2048  # examples of a stream among which the next one is drawn
_MOST_CLASSES = 100_000
_FRAMES_PER_TOKEN = 2  # of the front end of transformers' speech models (Whisper)
T = TypeVar("T")
Make = Callable[[T, np.random.Generator], Example]
Ids = tuple[IntArray, ...]  # of the texts of an example


def prepare(recipe: Recipe) -> Prepared:
    """The data of a recipe: read, split, tokenized or scaled, and what they decide of a model.

    Raises:
        InputError: data that cannot be read, or too little of them.
    """
    made: dict[str, Callable[[Recipe], Prepared]] = {
        "causal-lm": _causal_lm,
        "masked-lm": _masked_lm,
        "image-classification": _image_classification,
        "speech-to-text": _speech_to_text,
        "translation": _translation,
        "sequence-classification": _sequence_classification,
    }
    return made[recipe.task](recipe)


# --- examples ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listed(Generic[T]):
    """Examples that are made of items in memory."""

    items: Sequence[T]
    make: Make[T]

    def __len__(self) -> int:
        return len(self.items)

    def example(self, i: int, rng: np.random.Generator) -> Example:
        """What `make` makes of the i-th item."""
        return self.make(self.items[i], rng)


@dataclass(frozen=True)
class Fixed:
    """Examples whose chance is fixed: the i-th is always the same."""

    inner: Examples

    def __len__(self) -> int:
        return len(self.inner)

    def example(self, i: int, rng: np.random.Generator) -> Example:
        """The i-th one; `rng` is not asked."""
        return self.inner.example(i, np.random.default_rng([i, 2]))


@dataclass(frozen=True)
class Shuffled(Generic[T]):
    """A stream of examples, each drawn from those that wait in a buffer.

    Attributes:
        read: gives the items, anew at every call.
    """

    read: Callable[[], Iterator[T]]
    make: Make[T]

    def examples(self, seed: int) -> Iterator[Example]:
        """Every example once, in an order that the seed fixes."""
        rng = np.random.default_rng([seed, 3])
        waiting: list[T] = []
        for item in self.read():
            if len(waiting) < BUFFER:
                waiting.append(item)
                continue
            place = int(rng.integers(BUFFER))
            item, waiting[place] = waiting[place], item
            yield self.make(item, rng)
        for place in rng.permutation(len(waiting)):
            yield self.make(waiting[place], rng)


@dataclass(frozen=True, eq=False)
class Windows(Sequence[IntArray]):
    """Stretches of `width` consecutive ids, one every `step`."""

    ids: NDArray[Any]
    width: int
    step: int

    def __len__(self) -> int:
        return (self.ids.size - self.width) // self.step + 1

    def __getitem__(self, i: Any) -> Any:
        return self.ids[i * self.step : i * self.step + self.width].astype(np.int64)


def counts_of(labels: NDArray[Any], n: int) -> NDArray[np.int64]:
    """How often each of the `n` labels is asked for in training, (n,)."""
    return np.bincount(labels.ravel(), minlength=n)


def token_accuracy(predictions: NDArray[Any], labels: NDArray[Any]) -> Metrics:
    """Share of the labels (of tokens, or one per example) that are the likeliest id."""
    asked = labels != IGNORED
    return {"accuracy": float((predictions == labels)[asked].mean())}


def accuracy_and_f1(predictions: NDArray[Any], labels: NDArray[Any]) -> Metrics:
    """Accuracy, and the mean of the classes' F1, over the classes that are there or were predicted."""
    scores = []
    for c in np.union1d(predictions, labels):
        right = np.sum((predictions == c) & (labels == c))
        scores.append(2 * right / (np.sum(predictions == c) + np.sum(labels == c)))
    return token_accuracy(predictions, labels) | {"f1": float(np.mean(scores))}


# --- language models ---------------------------------------------------------------------------------------


def next_tokens(window: IntArray, rng: np.random.Generator) -> Example:
    """tokens (n,) and labels (n,) of n + 1 ids: the next token of every position."""
    return {"tokens": window[:-1], "labels": window[1:]}


@dataclass(frozen=True, eq=False)
class Masking:
    """Masked language modelling (Devlin et al. 2019, section 3.1).

    A share of the positions carries loss, never one of a special token. Of those, 80 % read the mask, 10 % a random
    token and 10 % their own. If none was drawn, one position carries loss.

    Attributes:
        plain: the ids that stand for text.
    """

    fraction: float
    mask: int
    plain: IntArray

    def __call__(self, own: IntArray, rng: np.random.Generator) -> Example:
        """tokens (n,) and labels (n,) of n ids: the token that stood there, or -100."""
        draw, fate = rng.random(own.size), rng.random(own.size)
        draw[~np.isin(own, self.plain)] = 2.0
        chosen = draw < self.fraction
        if not chosen.any():
            chosen[draw.argmin()] = draw.min() < 1
        tokens = np.where(chosen & (fate < 0.8), self.mask, own)
        tokens = np.where(chosen & (fate >= 0.9), rng.choice(self.plain, own.size), tokens)
        return {"tokens": tokens, "labels": np.where(chosen, own, IGNORED)}


def _causal_lm(recipe: Recipe) -> Prepared:
    return _language_model(recipe, 1, lambda tokenizer: (next_tokens, None))


def _masked_lm(recipe: Recipe) -> Prepared:
    def masked(tokenizer: Any) -> tuple[Masking, IntArray]:
        mask = getattr(tokenizer, "mask_token_id", None)
        if not isinstance(mask, int):
            path = recipe.data.tokenizer.path
            raise InputError(f"the tokenizer {path} has no mask token, which masked-lm reads; take one that has")
        plain = np.setdiff1d(np.arange(len(tokenizer)), special_ids(tokenizer))
        return Masking(recipe.data.mask_fraction, mask, plain), plain

    return _language_model(recipe, 0, masked)


def _language_model(
    recipe: Recipe, more: int, task: Callable[[Any], tuple[Make[IntArray], IntArray | None]]
) -> Prepared:
    """Windows of seq_len ids and `more`; `task` gives what is made of one, and the ids that are asked for (None: all
    but the first)."""
    data, length = recipe.data, recipe.data.seq_len
    width = length + more
    tokenizer, found = tokenized(data, document_sides(data), str)
    make, plain = task(tokenizer)
    end, stream = separator(tokenizer), found.stream
    train, validation = (_joined(side, end) for side in (found.train, found.validation))
    for name, ids in (("training", train), ("validation", validation)):
        if ids.size < width:
            raise InputError(
                f"the {name} text of {data.source} has {ids.size} tokens, one sequence needs {width}; give a longer "
                "text, a larger share data.validation or a smaller data.seq_len"
            )

    def windows() -> Iterator[IntArray]:
        assert stream is not None
        texts = (_joined([item], end).astype(np.int64) for item in stream())
        return (window for window in streams.stretches(texts, width, length) if window.size == width)

    listed: Any = Listed(Windows(train, width, length), make)
    return Prepared(
        train=listed if stream is None else Shuffled(windows, make),
        validation=Fixed(Listed(Windows(validation, width, length), make)),
        facts={"vocab_size": len(tokenizer), "seq_len": length},
        pads={"tokens": _pad_of(tokenizer), "labels": IGNORED},
        counts=counts_of(train[1:] if plain is None else train[np.isin(train, plain)], len(tokenizer)),
        source=data.source,
        tokenizer=tokenizer,
        unit=("tokens", length),
    )


def _joined(items: Sequence[tuple[str, Ids]], end: int | None) -> NDArray[Any]:
    """The ids of documents, one after the other, with the id `end` after each."""
    after = np.array([] if end is None else [end], np.int32)
    return np.concatenate([part.astype(np.int32) for _, (ids,) in items for part in (ids, after)])


def _pad_of(tokenizer: Any) -> int:
    pad = getattr(tokenizer, "pad_token_id", None)
    return pad if isinstance(pad, int) else 0


# --- classes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Classes:
    """How labels are numbered.

    Attributes:
        names: of the classes. numbered: whether a label is a number already.
    """

    names: tuple[str, ...]
    numbered: bool

    def id_of(self, label: Any) -> int:
        """The number of a label.

        Raises:
            InputError: it is none of the classes.
        """
        if self.numbered and isinstance(label, (int, np.integer, str)):
            number = int(label) if not isinstance(label, str) or label.isdecimal() else -1
            if 0 <= number < len(self.names):
                return number
        elif str(label) in self.names:
            return self.names.index(str(label))
        shown = ", ".join(self.names[:12])
        raise InputError(f"the label {str(label)[:40]!r} is none of the {len(self.names)} classes {shown}")


def classes_of(labels: Sequence[Any], known: tuple[str, ...] | None) -> Classes:
    """The classes of a set: known ones; else whole numbers from 0 up, which number themselves; else names, in order.

    Raises:
        InputError: fewer than two classes, or what is no class.
    """
    numbered = all(isinstance(x, (int, np.integer)) or (isinstance(x, str) and x.isdecimal()) for x in labels)
    if known is None and any(not isinstance(x, (int, np.integer, str)) for x in labels):
        wrong = next(x for x in labels if not isinstance(x, (int, np.integer, str)))
        raise InputError(f"the label {str(wrong)[:40]!r} is no class; expected whole numbers or names; see data.label")
    if known is not None:
        return Classes(known, numbered)
    numbers = [int(x) for x in labels] if numbered else []
    if numbers and (min(numbers) < 0 or max(numbers) >= _MOST_CLASSES):
        raise InputError(
            f"labels go from {min(numbers)} to {max(numbers)}; expected numbers of classes, from 0 up; see data.label"
        )
    names = tuple(map(str, range(max(numbers) + 1))) if numbers else tuple(sorted({str(x) for x in labels}))
    if len(names) < 2:
        raise InputError(f"all labels are {names[0]!r}; expected at least two classes; see data.label")
    return Classes(names, numbered)


def _one(label: int) -> NDArray[np.int64]:
    return np.array(label, np.int64)


@dataclass(frozen=True, eq=False)
class Patching:
    """An image as patches, standardised with the mean and the standard deviation of each channel of the set."""

    data: Data
    classes: Classes
    mean: FloatArray
    deviation: FloatArray
    augment: bool

    def __call__(self, image: Labelled, rng: np.random.Generator) -> Example:
        """patches (n_patches, patch_dim) and the class."""
        pixels = (image.pixels - self.mean[:, None, None]) / self.deviation[:, None, None]
        pixels = augmented(pixels, rng) if self.augment else pixels
        patches = patches_of(pixels, self.data.patch_size).astype(np.float32)
        return {"patches": patches, "labels": _one(self.classes.id_of(image.label))}


def _image_classification(recipe: Recipe) -> Prepared:
    data = recipe.data
    known = labelled_images(data, training_place(data))[1]
    found = sides(data, lambda place: labelled_images(data, place)[0], lambda image: key_of(image.pixels.tobytes()))
    classes = classes_of([x.label for x in (*found.train, *found.validation)], known)
    mean, deviation = _statistics([x.pixels for x in found.train])
    make = partial(Patching, data, classes, mean, deviation)
    before = _class_tokens(recipe)
    return Prepared(
        train=_examples(found, make(data.augment)),
        validation=Fixed(Listed(found.validation, make(False))),
        facts={
            "input": "patches",
            "patch_dim": data.channels * data.patch_size**2,
            "seq_len": (data.image_size // data.patch_size) ** 2 + before,
            "n_classes": len(classes.names),
            "head": "classes",
        },
        pads={},
        counts=_counts_of_classes(classes, [x.label for x in found.train]),
        source=data.source,
        score=token_accuracy,
        unit=("images", 1),
    )


def _statistics(images: Sequence[Pixels]) -> tuple[FloatArray, FloatArray]:
    """(mean, standard deviation) of every channel over all images."""
    count = len(images) * images[0][0].size
    mean = sum(x.sum((1, 2), dtype=np.float64) for x in images) / count
    square = sum((x.astype(np.float64) ** 2).sum((1, 2)) for x in images) / count
    deviation = np.sqrt(np.maximum(square - mean**2, 0))
    return np.asarray(mean), np.where(deviation > 0, deviation, 1.0)


def _class_tokens(recipe: Recipe) -> int:
    if recipe.model.architecture is None:
        return 0
    return architecture_of(recipe, {"input": "patches"}).n_class_tokens


def _counts_of_classes(classes: Classes, labels: Sequence[Any]) -> NDArray[np.int64]:
    return counts_of(np.array([classes.id_of(label) for label in labels]), len(classes.names))


def _examples(found: Sides[T], make: Make[T]) -> Any:
    return Listed(found.train, make) if found.stream is None else Shuffled(found.stream, make)


@dataclass(frozen=True, eq=False)
class Classifying:
    """A text's ids within the tokenizer's special tokens, and its class."""

    frame: Frame
    length: int
    classes: Classes

    def __call__(self, item: tuple[Classified, Ids], rng: np.random.Generator) -> Example:
        """tokens (n,), keep (n,) and the class; what is too long is cut off."""
        passage, (ids,) = item
        room = self.length - len(self.frame.before) - len(self.frame.behind)
        tokens = np.concatenate([self.frame.before, ids[:room], self.frame.behind]).astype(np.int64)
        return {
            "tokens": tokens,
            "keep": np.ones(tokens.size, np.bool_),
            "labels": _one(self.classes.id_of(passage.label)),
        }


def _sequence_classification(recipe: Recipe) -> Prepared:
    data = recipe.data
    known = classified(data, training_place(data))[1]
    found = sides(data, lambda place: classified(data, place)[0], lambda item: key_of(item.origin))
    classes = classes_of([x.label for x in (*found.train, *found.validation)], known)
    tokenizer, items = tokenized(data, found, lambda item: item.text)
    make = Classifying(_frame_of_texts(tokenizer), data.seq_len, classes)
    return Prepared(
        train=_examples(items, make),
        validation=Fixed(Listed(items.validation, make)),
        facts={
            "vocab_size": len(tokenizer),
            "seq_len": data.seq_len,
            "n_classes": len(classes.names),
            "head": "classes",
        },
        pads={"tokens": _pad_of(tokenizer), "keep": 0},
        counts=_counts_of_classes(classes, [x.label for x in found.train]),
        source=data.source,
        score=accuracy_and_f1,
        tokenizer=tokenizer,
        unit=("texts", 1),
    )


def _frame_of_texts(tokenizer: Any) -> Frame:
    """What a tokenizer puts around a text; else a begin and an end token, if it has them."""
    frame = frame_of(tokenizer)
    if frame.before or frame.behind:
        return frame
    begin, end = _begin_of(tokenizer), separator(tokenizer)
    return Frame(() if begin is None else (begin,), () if end is None else (end,))


# --- text from something else ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Writing:
    """What a decoder reads and is asked for: the text behind a begin token, and the text before an end token."""

    begin: int
    end: int

    def __call__(self, ids: IntArray) -> Example:
        """decoder_tokens (n + 1,) and labels (n + 1,)."""
        return {
            "decoder_tokens": np.concatenate([[self.begin], ids]).astype(np.int64),
            "labels": np.concatenate([ids, [self.end]]).astype(np.int64),
        }


def _begin_of(tokenizer: Any) -> int | None:
    for name in ("cls_token_id", "bos_token_id"):
        found = getattr(tokenizer, name, None)
        if isinstance(found, int):
            return found
    return None


def _writing(tokenizer: Any) -> Writing:
    """Where a tokenizer has no begin token, the pad stands for it (T5)."""
    begin, end = _begin_of(tokenizer), separator(tokenizer)
    if end is None:
        raise InputError("the tokenizer has no end token, behind which a text is over; take one that has")
    return Writing(_pad_of(tokenizer) if begin is None else begin, end)


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


def _translation(recipe: Recipe) -> Prepared:
    data = recipe.data
    found = sides(data, lambda place: pairs(data, place), lambda pair: key_of(pair.source))
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

    kept, notes = _fitting(data, items, fits, f"{data.seq_len} and {target_len} tokens")
    make = Translating(frame, writing)
    return Prepared(
        train=_examples(kept, make),
        validation=Fixed(Listed(kept.validation, make)),
        facts={"vocab_size": len(tokenizer), "seq_len": data.seq_len, "target_len": target_len},
        pads=_pads_of_text(tokenizer),
        counts=_counts_of_texts(kept, writing.end, len(tokenizer)),
        source=data.source,
        score=token_accuracy,
        tokenizer=tokenizer,
        unit=("sentences", 1),
        notes=notes,
    )


def _pads_of_text(tokenizer: Any) -> dict[str, float]:
    pad = _pad_of(tokenizer)
    return {"tokens": pad, "keep": 0, "decoder_tokens": pad, "labels": IGNORED}


def _counts_of_texts(found: Sides[tuple[Any, Ids]], end: int, n: int) -> NDArray[np.int64]:
    texts = [ids[-1] for _, ids in found.train]
    return counts_of(np.concatenate([*texts, np.full(len(texts), end)]), n)


def _fitting(data: Data, found: Sides[T], fits: Callable[[T], bool], room: str) -> tuple[Sides[T], tuple[str, ...]]:
    """Examples that are neither empty nor too long, and a note on the others.

    Raises:
        InputError: nothing is left on one side.
    """
    kept = found.kept(fits)
    for name, side in (("training", kept.train), ("validation", kept.validation)):
        if not side:
            raise InputError(
                f"no {name} example of {data.source} fits into {room}; raise data.seq_len or data.target_len"
            )
    n, left = (len(x.train) + len(x.validation) for x in (found, kept))
    return kept, (f"{n - left} of {n} examples are empty or longer than {room}, and left out",) if left < n else ()


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


def _speech_to_text(recipe: Recipe) -> Prepared:
    data = recipe.data
    stride, wanted = _front_end(recipe)
    most = (wanted or data.seq_len) * stride  # frames
    synthetic = data.source == "synthetic-speech"
    if synthetic and longest_synthetic(most) < 2:
        raise InputError(f"data.seq_len is {data.seq_len}; synthetic speech needs at least {-(-12 // stride)}")

    def read(place: Place) -> Iterator[Any]:
        if synthetic and place == training_place(data):
            texts = synthetic_texts(longest_synthetic(most), data.limit or SYNTHETIC)
            return (Synthetic(text, data.frame_dim) for text in texts)
        return utterances(data, place)

    tokenizer, items = tokenized(data, sides(data, read, lambda item: key_of(item.text)), lambda item: item.text)
    writing = _writing(tokenizer)
    listed = (*items.train, *items.validation)
    target_len = data.target_len or 1 + max(ids.size for _, (ids,) in listed)

    def length(item: Utterance | Synthetic) -> int:
        return len(item.frames) if isinstance(item, Utterance) else most

    def fits(item: tuple[Any, Ids]) -> bool:
        return 0 < item[1][0].size < target_len and length(item[0]) <= most

    room = f"{most // stride} tokens of {stride} frames, and {target_len} of text"
    kept, notes = _fitting(data, items, fits, room)
    longest = most if kept.stream is not None else max(length(x) for x, _ in (*kept.train, *kept.validation))
    tokens = wanted or -(-longest // stride)
    make = Hearing(tokens * stride, writing)
    return Prepared(
        train=_examples(kept, make),
        validation=Fixed(Listed(kept.validation, make)),
        facts={
            "input": "frames",
            "frame_dim": data.frame_dim,
            "seq_len": tokens,
            "vocab_size": len(tokenizer),
            "target_len": target_len,
        },
        pads=_pads_of_text(tokenizer),
        counts=_counts_of_texts(kept, writing.end, len(tokenizer)),
        source=data.source,
        score=token_accuracy,
        tokenizer=tokenizer,
        unit=("utterances", 1),
        notes=notes,
    )


def _front_end(recipe: Recipe) -> tuple[int, int | None]:
    """Frames that one token of the encoder hears, and how many tokens the recipe's model has, if it says so."""
    model = recipe.model
    if model.architecture is not None:
        architecture = architecture_of(recipe, {"input": "frames"})
        if architecture.kind != "encoder-decoder":
            raise InputError(f"model.architecture.kind is {architecture.kind}; speech-to-text needs encoder-decoder")
        return math.prod(architecture.conv_strides), model.architecture.get("seq_len")
    return _FRAMES_PER_TOKEN, (model.huggingface or {}).get("max_source_positions")

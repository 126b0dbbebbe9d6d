"""Tasks: what a model reads and is asked for, from a recipe's data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from signalprop.data.batches import patches_of
from signalprop.diagnosis.stream import Frame, frame_of
from signalprop.errors import InputError
from signalprop.network.inputs import IntArray
from signalprop.network.moments import FloatArray
from signalprop_lab.training.examples import (
    IGNORED,
    Example,
    Listed,
    Make,
    Prepared,
    Shuffled,
    Windows,
    accuracy_and_f1,
    counts_of,
    token_accuracy,
)
from signalprop_lab.training.images import Labelled, Pixels, augmented, labelled_images
from signalprop_lab.training.pairs_and_labels import Classified, classified
from signalprop_lab.training.recipe import Data, Recipe, architecture_of
from signalprop_lab.training.recipe_files import shipped
from signalprop_lab.training.sources import training_place
from signalprop_lab.training.stream_offset import StreamOffset
from signalprop_lab.training.text_generation import speech_to_text, translation
from signalprop_lab.training.tokenized import Ids, tokenized
from signalprop_lab.training.tokenizers import begin_of, pad_of, separator, special_ids
from signalprop_lab.training.validation_split import drawn_from, key_of, split_documents, split_examples

_MOST_CLASSES = 100_000


def prepare(recipe: Recipe) -> Prepared:
    """The data of a recipe: read, split, tokenized or scaled, and what they decide of a model."""
    for path in (recipe.model.pretrained, recipe.data.tokenizer.path):
        place, name = (*Path(path or "").parts, "", "")[:2]
        earlier = {"runs": ("train", name), "sweeps": ("sweep", f"sweep-{name}")}.get(place)
        if path and earlier and earlier[1] in shipped() and not Path(path).exists():
            raise InputError(f"{recipe.name} goes on from {path}; first run signalprop {' '.join(earlier)}")
    made: dict[str, Callable[[Recipe], Prepared]] = {
        "causal-lm": lambda recipe: _language_model(recipe, 1, lambda tokenizer: (next_tokens, None)),
        "masked-lm": _masked_lm,
        "image-classification": _image_classification,
        "speech-to-text": speech_to_text,
        "translation": translation,
        "sequence-classification": _sequence_classification,
    }
    return made[recipe.task](recipe)


# --- language models ---------------------------------------------------------------------------------------


def next_tokens(window: IntArray, rng: np.random.Generator) -> Example:
    """tokens (n,) and labels (n,) of n + 1 ids: the next token of every position."""
    return {"tokens": window[:-1], "labels": window[1:]}


@dataclass(frozen=True, eq=False)
class Masking:
    """Masked language modelling (Devlin et al. 2019, section 3.1).

    A share of the positions carries loss, never one of a special token. Of those, 80 % read the mask, 10 % a random
    token and 10 % the token itself. If none was drawn, one position carries loss.

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
    """Windows of seq_len ids and `more`; `task` gives the example of one, and the ids that are asked for (None: all
    but the first)."""
    data, length = recipe.data, recipe.data.seq_len
    width = length + more
    tokenizer, found = tokenized(data, split_documents(data), str)
    make, plain = task(tokenizer)
    end, stream = separator(tokenizer), found.stream
    train, validation = (_joined(side, end) for side in (found.train, found.validation))
    for name, ids, share in (("training", train, "smaller"), ("validation", validation, "larger")):
        if ids.size < width:
            raise InputError(
                f"the {name} text of {data.source} has {ids.size} tokens, one sequence needs {width}; give a longer "
                f"text, a {share} share data.validation or a smaller data.seq_len"
            )

    def windows(offset: StreamOffset) -> Iterator[list[IntArray]]:
        assert stream is not None
        for chunk in filter(None, stream(offset)):
            found = Windows(np.concatenate([np.array(offset.rest, np.int64), _joined(chunk, end)]), width, length)
            offset.rest = found.ids[len(found) * length :]
            yield [found[i] for i in range(len(found))]

    listed: Any = Listed(Windows(train, width, length), make)
    return Prepared(
        train=listed if stream is None else Shuffled(windows, make, listed),
        validation=Listed(Windows(validation, width, length), make, fixed=True),
        facts={"vocab_size": len(tokenizer), "seq_len": length},
        pads={"tokens": pad_of(tokenizer), "labels": IGNORED},
        counts=counts_of(train[1:] if plain is None else train[np.isin(train, plain)], len(tokenizer)),
        source=data.source,
        tokenizer=tokenizer,
        unit=("tokens", length),
    )


def _joined(items: Sequence[tuple[str, Ids]], end: int | None) -> NDArray[Any]:
    """The ids of documents, one after the other, with the id `end` after each."""
    after = np.array([] if end is None else [end], np.int32)
    return np.concatenate([part.astype(np.int32) for _, (ids,) in items for part in (ids, after)])


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
        """The number of a label."""
        if self.numbered and isinstance(label, (int, np.integer, str)):
            number = int(label) if not isinstance(label, str) or label.isdecimal() else -1
            if 0 <= number < len(self.names):
                return number
        elif str(label) in self.names:
            return self.names.index(str(label))
        shown = ", ".join(self.names[:12])
        raise InputError(f"the label {str(label)[:40]!r} is not one of the {len(self.names)} classes {shown}")


def classes_of(labels: Sequence[Any], known: tuple[str, ...] | None) -> Classes:
    """The classes of a set: known ones; else whole numbers from 0 up, which number themselves; else names, in order."""
    numbered = all(isinstance(x, (int, np.integer)) or (isinstance(x, str) and x.isdecimal()) for x in labels)
    if known is None and any(not isinstance(x, (int, np.integer, str)) for x in labels):
        wrong = next(x for x in labels if not isinstance(x, (int, np.integer, str)))
        raise InputError(
            f"the label {str(wrong)[:40]!r} is not a class; expected whole numbers or names; see data.label"
        )
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
    found = split_examples(
        data, lambda *where: labelled_images(data, *where)[0], lambda image: key_of(image.pixels.tobytes())
    )
    classes = classes_of([x.label for x in (*found.train, *found.validation)], known)
    mean, deviation = _statistics([x.pixels for x in found.train])
    make = partial(Patching, data, classes, mean, deviation)
    before = 0 if recipe.model.architecture is None else architecture_of(recipe, {"input": "patches"}).n_class_tokens
    return Prepared(
        train=drawn_from(found, make(data.augment)),
        validation=Listed(found.validation, make(False), fixed=True),
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


def _counts_of_classes(classes: Classes, labels: Sequence[Any]) -> NDArray[np.int64]:
    return counts_of(np.array([classes.id_of(label) for label in labels]), len(classes.names))


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
    found = split_examples(data, lambda *where: classified(data, *where)[0], lambda item: key_of(item.origin))
    classes = classes_of([x.label for x in (*found.train, *found.validation)], known)
    tokenizer, items = tokenized(data, found, lambda item: item.text)
    make = Classifying(_frame_of_texts(tokenizer), data.seq_len, classes)
    return Prepared(
        train=drawn_from(items, make),
        validation=Listed(items.validation, make, fixed=True),
        facts={
            "vocab_size": len(tokenizer),
            "seq_len": data.seq_len,
            "n_classes": len(classes.names),
            "head": "classes",
        },
        pads={"tokens": pad_of(tokenizer), "keep": 0},
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
    begin, end = begin_of(tokenizer), separator(tokenizer)
    return Frame(() if begin is None else (begin,), () if end is None else (end,))

"""Examples on two sides: which ones are for validation follows from their content, so that no order matters."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from signalprop.errors import InputError
from signalprop_lab.training.examples import Listed, Make, Shuffled
from signalprop_lab.training.recipe import Data
from signalprop_lab.training.sources import Place, documents, training_place, validation_place
from signalprop_lab.training.stream_offset import StreamOffset, in_chunks

STRETCHES = 200  # into which documents are cut that are too few to hold out whole ones
SAMPLE = 4096  # examples of a stream that tokenizer, validation data and chance come from
T = TypeVar("T")
_SPACE = re.compile(r"\s")


def key_of(content: str | bytes) -> int:
    """A hash of an example, below 2^64: the same content has the same key."""
    plain = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    return int.from_bytes(hashlib.blake2b(plain, digest_size=8).digest(), "big")


def held_out(keys: NDArray[np.uint64], share: float) -> NDArray[np.bool_]:
    """Which examples are for validation: a share of the different ones, those with the smallest keys.

    It does not depend on their order, and equal examples are on one side. At least one of two is on each side.
    """
    different = np.unique(keys)
    n = min(max(1, round(share * different.size)), different.size - 1)
    return np.asarray(keys <= different[n - 1])


@dataclass(frozen=True)
class Split(Generic[T]):
    """Examples on two sides; of a stream those at its beginning.

    Attributes:
        stream: reads the training examples of a stream, from an offset on, in chunks; None: all are in
            `train`.
    """

    train: list[T]
    validation: list[T]
    stream: Callable[[StreamOffset], Iterator[list[T]]] | None = None

    def kept(self, wanted: Callable[[T], bool]) -> Split[T]:
        """Those that are wanted."""
        stream = self.stream
        return Split(
            [x for x in self.train if wanted(x)],
            [x for x in self.validation if wanted(x)],
            None if stream is None else lambda offset: (list(filter(wanted, chunk)) for chunk in stream(offset)),
        )


def split_examples(data: Data, read: Callable[[Place, StreamOffset], Iterator[T]], key: Callable[[T], int]) -> Split[T]:
    """The recipe's examples for training and validation.

    Args:
        read: gives the examples at a place, from an offset on. key: of an example; equal keys are on one side.
    """
    place, other = training_place(data), validation_place(data)
    most = SAMPLE if data.streaming else None

    def whole(offset: StreamOffset) -> Iterator[list[T]]:
        return in_chunks(partial(read, place), offset, data.limit)

    first = list(islice(chain.from_iterable(whole(StreamOffset())), most))
    if other is not None:
        rest = list(islice(islice(read(other, StreamOffset()), data.limit), most))
        if not first or not rest:
            raise InputError(f"{(other if first else place).source} holds no examples")
        return Split(first, rest, whole if data.streaming else None)
    assert isinstance(data.validation, float)
    share = data.validation
    keys = np.array([key(item) for item in first], np.uint64)
    if not data.streaming:
        if len(set(keys.tolist())) < 2:
            raise InputError(
                f"{place.source} holds fewer than two different examples; expected some to train on and one to validate"
            )
        return _parted(first, held_out(keys, share))
    least = share * 2.0**64  # of a stream: known without the others, and a share of them on average
    out = np.array([float(k) < least for k in keys.tolist()], np.bool_)
    if out.all() or not out.any():
        raise InputError(
            f"of the first {out.size} examples of {data.source} {int(out.sum())} are held out; give a larger share "
            "data.validation, or separate validation data"
        )
    found = _parted(first, out)
    return Split(
        found.train,
        found.validation,
        lambda offset: ([x for x in chunk if float(key(x)) >= least] for chunk in whole(offset)),
    )


def _parted(items: list[T], out: NDArray[np.bool_]) -> Split[T]:
    both = list(zip(items, out.tolist(), strict=True))
    return Split([item for item, is_out in both if not is_out], [item for item, is_out in both if is_out])


def split_documents(data: Data) -> Split[str]:
    """The recipe's text in training and validation documents.

    Where even one document is more than the share that is to be held out, all are cut into some 200 stretches.
    """
    read = partial(documents, data)
    if data.streaming or not isinstance(data.validation, float):
        return split_examples(data, read, key_of)
    whole = list(islice(read(training_place(data), StreamOffset()), data.limit))
    if len(set(whole)) * data.validation < 1:
        parts = -(-STRETCHES // max(1, len(whole)))
        whole = [part for text in whole for part in stretches(text, parts)]
    return split_examples(data.model_copy(update={"limit": None}), lambda place, _: iter(whole), key_of)


def stretches(text: str, parts: int) -> Iterator[str]:
    """A text as `parts` texts of about equal length, cut at blanks; one without a blank stays whole."""
    start = 0
    for cut in range(1, parts):
        found = _SPACE.search(text, max(len(text) * cut // parts, start))
        if found is None:
            break
        if found.start() > start:
            yield text[start : found.start()]
        start = found.start()
    yield text[start:]


def drawn_from(found: Split[T], make: Make[T]) -> Any:
    """The training examples: listed, or drawn from their stream."""
    listed = Listed(found.train, make)
    return listed if found.stream is None else Shuffled(found.stream, make, listed)

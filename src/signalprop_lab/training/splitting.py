"""What is held out: documents and examples for validation, by their content, so that no order matters."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from signalprop.data.texts import Piece
from signalprop.errors import InputError
from signalprop_lab.training.recipe import Data
from signalprop_lab.training.sources import Place, documents, training_place, validation_place

STRETCHES = 200  # into which documents are cut that are too few to hold out whole ones
SAMPLE = 1 << 24  # characters of a stream that tokenizer, validation data and chance come from
SAMPLE_ROWS = 4096  # rows of a stream that they come from
T = TypeVar("T")
_SPACE = re.compile(r"\s")


def key_of(*parts: str | bytes) -> int:
    """A hash of a document or example, below 2^64: the same content has the same key."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        content = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "big") + content)
    return int.from_bytes(digest.digest(), "big")


def held_out(keys: NDArray[np.uint64], share: float) -> NDArray[np.bool_]:
    """Which documents (or examples) are for validation: a share of the different ones, those with the smallest keys.

    It does not depend on their order, and equal documents are on one side. At least one document is on each side.

    Raises:
        InputError: fewer than two different documents.
    """
    different = np.unique(keys)
    if different.size < 2:
        raise InputError("there are fewer than two different documents; expected some to train on and one to validate")
    n = min(max(1, round(share * different.size)), different.size - 1)
    return np.asarray(keys <= different[n - 1])


def always_held_out(key: int, share: float) -> bool:
    """Whether a document of a stream is for validation: known without the others; a share of them on average."""
    return key < share * 2.0**64


@dataclass(frozen=True, eq=False)
class Survey:
    """What there is to know of documents before they are split.

    Attributes:
        digest: of all of the text and where its documents end.
        keys: a hash of every document; equal documents have equal ones. lengths: in characters.
    """

    digest: str
    keys: NDArray[np.uint64]
    lengths: NDArray[np.int64]


def survey(found: Iterable[Piece]) -> Survey:
    """Read documents once."""
    whole, one = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=8)
    keys: list[int] = []
    lengths: list[int] = []
    length = 0
    for text, ends in found:
        one.update(text.encode("utf-8", "surrogatepass"))
        length += len(text)
        if ends:
            keys.append(int.from_bytes(one.digest(), "big"))
            lengths.append(length)
            whole.update(one.digest())
            one, length = hashlib.blake2b(digest_size=8), 0
    return Survey(whole.hexdigest(), np.array(keys, np.uint64), np.array(lengths, np.int64))


@dataclass(frozen=True)
class Split:
    """Documents on two sides. Each is a function that reads them anew.

    Attributes:
        digest: of the text and how it is split.
    """

    digest: str
    train: Callable[[], Iterator[Piece]]
    validation: Callable[[], Iterator[Piece]]


def split(data: Data) -> Split:
    """The recipe's text in training and validation documents.

    Where even one document is more than the share that is to be held out, all are cut into some 200 stretches.
    Of a stream it is the beginning.

    Raises:
        InputError: as `documents` and `held_out`; a stream without validation documents in its beginning.
    """

    def whole() -> Iterator[Piece]:
        found = documents(data)
        return beginning(found) if data.streaming else found

    other = validation_place(data)
    if other is not None:

        def apart() -> Iterator[Piece]:
            found = documents(data, other)
            return beginning(found) if data.streaming else found

        return Split(survey(whole()).digest + survey(apart()).digest, whole, apart)
    assert isinstance(data.validation, float)
    share = data.validation
    first = found = survey(whole())
    parts, read = 1, whole
    if not data.streaming and np.unique(first.keys).size * share < 1:
        parts = -(-STRETCHES // first.keys.size)

        def read() -> Iterator[Piece]:
            return stretches(documents(data), first.lengths, parts)

        found = survey(read())
    if data.streaming:
        out = np.array([always_held_out(int(key), share) for key in found.keys], np.bool_)
        if out.all() or not out.any():
            raise InputError(
                f"of the first {out.size} documents of {data.source} {int(out.sum())} are held out; give a larger "
                "share data.validation, or validation data of their own"
            )
    else:
        out = held_out(found.keys, share)
    digest = key_of(found.digest, str(parts), str(share), str(data.streaming))
    return Split(f"{found.digest}{digest:016x}", lambda: _chosen(read(), ~out), lambda: _chosen(read(), out))


def beginning(found: Iterable[Piece]) -> Iterator[Piece]:
    """The first documents, of some `SAMPLE` characters."""
    read = 0
    for text, ends in found:
        yield text, ends
        read += len(text)
        if ends and read >= SAMPLE:
            return


def training_stream(data: Data) -> Iterator[str]:
    """The documents of a stream that are not held out, one after the other."""
    apart = validation_place(data) is not None
    parts: list[str] = []
    for text, ends in documents(data):
        parts.append(text)
        if ends:
            whole = "".join(parts)
            parts = []
            if apart or not always_held_out(_key_of_text(whole), float(data.validation)):
                yield whole


def _key_of_text(text: str) -> int:
    """The key that `survey` gives a document."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def _chosen(found: Iterable[Piece], wanted: NDArray[np.bool_]) -> Iterator[Piece]:
    i = 0
    for text, ends in found:
        if i == wanted.size:
            return  # a file that grows while it is read
        if wanted[i]:
            yield text, ends
        i += ends


def stretches(found: Iterable[Piece], lengths: NDArray[np.int64], parts: int) -> Iterator[Piece]:
    """Every document as `parts` documents of about equal length, cut at blanks; one without a blank stays whole."""
    i, at, cut = 0, 0, 1  # document, its characters so far, the next cut
    for text, ends in found:
        start = 0
        while cut < parts:
            due = int(lengths[i]) * cut // parts - at  # in this piece
            if due >= len(text):
                break
            place = _blank(text, max(due, start))
            if place is None:
                break
            if place > start:
                yield text[start:place], True
            start, cut = place, cut + 1
        yield text[start:], ends
        at += len(text)
        if ends:
            i, at, cut = i + 1, 0, 1


def _blank(text: str, start: int) -> int | None:
    """Where the first white space from `start` on stands."""
    found = _SPACE.search(text, start)
    return None if found is None else found.start()


# --- examples ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sides(Generic[T]):
    """Examples on two sides; of a stream those in its beginning.

    Attributes:
        stream: reads the training examples of a stream anew; None: there are no others than `train`.
    """

    train: list[T]
    validation: list[T]
    stream: Callable[[], Iterator[T]] | None = None


def sides(data: Data, read: Callable[[Place], Iterator[T]], key: Callable[[T], int]) -> Sides[T]:
    """The recipe's examples for training and validation.

    Args:
        read: gives the examples at a place. key: of an example; equal keys are on one side.

    Raises:
        InputError: no examples; or, of a stream, none on one of the sides.
    """
    place, other = training_place(data), validation_place(data)
    many = SAMPLE_ROWS if data.streaming else None

    def whole() -> Iterator[T]:
        return islice(read(place), data.limit)

    first = list(islice(whole(), many))
    if other is not None:
        train, validation = first, list(islice(read(other), _least(many, data.limit)))
        if not train or not validation:
            raise InputError(f"{(place if not train else other).source} holds no examples")
        return Sides(train, validation, whole if data.streaming else None)
    assert isinstance(data.validation, float)
    share = data.validation
    keys = [key(item) for item in first]
    if not data.streaming:
        if len(set(keys)) < 2:
            raise InputError(f"{data.source} has {len(set(keys))} different examples; expected at least two")
        out = held_out(np.array(keys, np.uint64), share).tolist()
        return Sides(*_parted(first, out))
    apart = [always_held_out(k, share) for k in keys]
    if all(apart) or not any(apart):
        raise InputError(
            f"of the first {len(apart)} examples of {data.source} {sum(apart)} are held out; give a larger share "
            "data.validation, or validation data of their own"
        )

    def kept() -> Iterator[T]:
        return (item for item in whole() if not always_held_out(key(item), share))

    return Sides(*_parted(first, apart), stream=kept)


def _parted(items: Sequence[T], out: Sequence[bool]) -> tuple[list[T], list[T]]:
    both = list(zip(items, out, strict=True))
    return [item for item, is_out in both if not is_out], [item for item, is_out in both if is_out]


def _least(*numbers: int | None) -> int | None:
    return min((n for n in numbers if n is not None), default=None)

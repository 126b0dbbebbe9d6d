"""What a model is trained on, one example at a time: canonical names, a fixed order for every seed, padded batches.

An example is a dictionary of arrays without a batch axis, named as the fields of `signalprop.data.Batch`: `tokens`,
`keep`, `segments`, `patches`, `frames`, `decoder_tokens`; and `labels`: ids (-100: no loss) or one class id.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Generic, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset

from signalprop.data.batches import Batch
from signalprop.errors import InputError
from signalprop.network.inputs import IntArray
from signalprop_lab.training.stream_offset import TOGETHER, StreamOffset

Example = dict[str, NDArray[Any]]
Metrics = dict[str, float]
IGNORED = -100  # PyTorch's label of positions without loss
BLOCK = 2048  # examples of a stream, at least, that are read and shuffled together
_AHEAD = 4  # steps at most that a loader reads before they are done
T = TypeVar("T")
Make = Callable[[T, np.random.Generator], Example]
# What is measured beside the loss, from the likeliest ids and the labels (-100: none), both (examples, ...).
Score = Callable[[NDArray[Any], NDArray[Any]], Metrics]


@runtime_checkable
class Examples(Protocol):
    """A set of examples."""

    def __len__(self) -> int: ...

    def example(self, i: int, rng: np.random.Generator) -> Example:
        """The i-th one. Masks, crops and the like come from `rng`, so that the same draw gives the same example."""
        ...


@dataclass(frozen=True)
class Prepared:
    """The data of a recipe, ready for a model.

    Attributes:
        train: examples, or a stream of them. validation: fixed examples.
        facts: fields of the Architecture that the data decide.
        pads: value that fills each canonical name up to the longest of a batch.
        counts: how often each label is asked for in training, (labels,).
        source: where the data come from, in words.
        score: further measures on validation data; None: the loss alone.
        tokenizer: what made ids of the text; saved beside checkpoints.
        unit: what is counted as throughput, and how many of them an example has.
    """

    train: Examples | Shuffled[Any]
    validation: Examples
    facts: Mapping[str, Any]
    pads: Mapping[str, float]
    counts: NDArray[np.int64]
    source: str
    score: Score | None = None
    tokenizer: Any = None
    unit: tuple[str, int] = ("tokens", 1)

    def chance(self, labels: NDArray[Any]) -> float:
        """Loss in nats on such labels (-100: none) of the best guess that reads no input.

        It is the cross-entropy of the frequencies of the training labels, with half a count for each more. A run that
        ends above it has learnt nothing of its input. A few examples are easier or harder to guess than all, so it is
        to be asked of those that a loss was measured on.
        """
        asked = labels[labels != IGNORED]
        counts = self.counts + 0.5
        return float(math.log(counts.sum()) - np.log(counts[asked]).mean())


class Ordered(Dataset[Example]):
    """As many examples as a run reads, in an order that the seed fixes: every pass is shuffled anew.

    The i-th example of a run is the same whatever the batch size, the number of processes or of restarts.
    """

    def __init__(self, examples: Examples, n: int, seed: int, *, shuffle: bool = True) -> None:
        self._examples, self._n, self._seed, self._shuffle = examples, n, seed, shuffle
        self._given = 0

    def begin(self, given: int, offset: StreamOffset | None = None) -> None:
        """Leave out those that a run was given before."""
        self._given = given

    def offset(self, given: int) -> None:
        """Its position is how many were given."""

    def __len__(self) -> int:
        return self._n - self._given

    def __getitem__(self, i: int) -> Example:
        i += self._given
        turn, place = divmod(i, len(self._examples))
        if self._shuffle:
            place = int(_order(len(self._examples), self._seed, turn)[place])
        return self._examples.example(place, np.random.default_rng([self._seed, 1, i]))


@lru_cache(maxsize=2)
def _order(n: int, seed: int, turn: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, 0, turn]).permutation(n)


class Streamed(IterableDataset[Example]):
    """The first `n` examples of a stream, which a thread reads, tokenizes and makes ahead of the training."""

    def __init__(self, stream: Shuffled[Any], n: int, seed: int, every: int = 0) -> None:
        """`every`: its offset is kept after as many examples each, for a checkpoint; 0: never."""
        self._stream, self._n, self._seed, self._every = stream, n, seed, every
        self._kept: dict[int, StreamOffset | None] = {}
        self._begins = StreamOffset()

    def begin(self, given: int, offset: StreamOffset | None) -> None:
        """Leave out those that a run was given before. offset: what `offset` was then.

        Raises:
            InputError: it is not known, or of another batch size.
        """
        if offset is None or offset.given != given:
            raise InputError(
                "the checkpoint does not say where the stream was, or is of a run with another budget.batch_size; "
                "start the run anew"
            )
        self._begins = offset

    def offset(self, given: int) -> StreamOffset | None:
        """Where the stream was when so many examples had been given; None: that is not known any more, or never was."""
        return self._kept.get(given)

    def __len__(self) -> int:
        return self._n

    def __iter__(self) -> Iterator[Example]:
        for example, given, offset in ahead(self._read(), _AHEAD * max(self._every, 1)):
            if offset is not None:
                self._kept[given] = offset
                self._kept.pop(given - _AHEAD * self._every, None)
            yield example

    def _read(self) -> Iterator[tuple[Example, int, StreamOffset | None]]:
        """The examples, how many there were with each, and where the stream is then, where that is kept."""
        offset, self._begins = self._begins, StreamOffset()
        while True:
            given = offset.given
            for item, there in self._stream.items(self._seed, offset):
                given = there.given
                example = self._stream.make(item, np.random.default_rng([self._seed, 1, given - 1]))
                yield example, given, there if self._every and given % self._every == 0 else None
                if given == self._n:
                    return
            if given == offset.begun:  # there is nothing
                return
            offset = StreamOffset(given=given, begun=given)


def ahead(found: Iterator[T], n: int) -> Iterator[T]:
    """The same, in their order; a thread gets up to `n` of them before they are asked for."""
    end = object()
    pool = ThreadPoolExecutor(1, "reading ahead")
    waiting = deque(pool.submit(next, found, end) for _ in range(n))
    try:
        while (item := waiting.popleft().result()) is not end:
            waiting.append(pool.submit(next, found, end))
            yield cast(T, item)
    finally:
        for item in waiting:
            item.cancel()
        pool.shutdown(wait=False)


def collate(examples: Sequence[Example], pads: Mapping[str, float]) -> dict[str, Tensor]:
    """A batch: every name stacked, shorter arrays filled up at the end along their first axis."""
    out = {}
    for name in examples[0]:
        rows = [torch.as_tensor(example[name]) for example in examples]
        out[name] = pad_sequence(rows, True, pads.get(name, 0)) if rows[0].ndim else torch.stack(rows)
    return out


def as_batch(tensors: Mapping[str, Tensor], source: str = "") -> Batch:
    """A collated batch as `measure` and `predict` read it."""
    arrays = {name: tensor.cpu().numpy() for name, tensor in tensors.items()}
    labels = arrays.pop("labels")
    targets = np.where(labels == IGNORED, -1, labels).astype(np.int64)
    if "frames" in arrays:
        arrays.pop("keep", None)
    arrays = {k: value.astype(np.float64) if k in ("patches", "frames") else value for k, value in arrays.items()}
    arrays.setdefault("tokens", None)  # type: ignore[arg-type]
    return Batch(**arrays, targets=targets, source=source)


# --- sets of examples ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listed(Generic[T]):
    """Examples from items in memory.

    Attributes:
        fixed: the i-th is always the same: its chance does not come from who asks.
    """

    items: Sequence[T]
    make: Make[T]
    fixed: bool = False

    def __len__(self) -> int:
        return len(self.items)

    def example(self, i: int, rng: np.random.Generator) -> Example:
        """The result of `make` for the i-th item."""
        return self.make(self.items[i], np.random.default_rng([i, 2]) if self.fixed else rng)


@dataclass(frozen=True)
class Shuffled(Generic[T]):
    """A stream of examples, which are shuffled block by block.

    Attributes:
        read: gives the items from an offset on, chunk by chunk, and moves the offset past each.
        sample: those at its beginning.
    """

    read: Callable[[StreamOffset], Iterator[list[T]]]
    make: Make[T]
    sample: Listed[T]

    def items(self, seed: int, offset: StreamOffset) -> Iterator[tuple[T, StreamOffset]]:
        """Every item of a pass once, from an offset on, and where the stream is after each."""
        for block, start in self._blocks(replace(offset, given=offset.given - offset.drawn, drawn=0)):
            order = np.random.default_rng([seed, 0, start.begun, start.given]).permutation(len(block))
            for drawn, place in enumerate(order[offset.drawn :], offset.drawn + 1):
                yield block[place], replace(start, given=start.given + drawn, drawn=drawn)
            offset = StreamOffset()

    def _blocks(self, start: StreamOffset) -> Iterator[tuple[list[T], StreamOffset]]:
        """Blocks, and where the stream was when they were begun; the next one is read while one is given out."""
        here, block = replace(start), list[T]()
        chunks = ((chunk, replace(here)) for chunk in self.read(here))
        for chunk, behind in ahead(chunks, max(1, BLOCK // TOGETHER)):
            block += chunk
            if len(block) >= BLOCK:
                yield block, start
                start, block = replace(behind, given=start.given + len(block)), []
        if block:
            yield block, start


@dataclass(frozen=True, eq=False)
class Windows(Sequence[IntArray]):
    """Stretches of `width` consecutive ids, one every `step`."""

    ids: NDArray[Any]
    width: int
    step: int

    def __len__(self) -> int:
        return max(0, (self.ids.size - self.width) // self.step + 1)

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

"""Where a stream of examples is: what a run needs to go on there, without reading and tokenizing it again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import chain, islice
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

TOGETHER = 64  # rows of a stream that are read and tokenized at once
T = TypeVar("T")


@dataclass
class Position:
    """Filled in by those who read as they give out an example; they begin where it says.

    Attributes:
        given: examples of the run so far. begun: those before the present pass over the stream.
        documents: rows of this pass before the chunk that is being read. taken: what has been taken of that chunk.
        rows: the state, before that chunk, of the set of `datasets` that rows come from; None: it has none, and the
            rows before are read over, not tokenized. table: that set, once it is being read.
        rest: ids that wait for a whole window, (n,). waiting: the `leaves` of items among which the next one is drawn.
        ending: there are no more; the items are in their order. random: state of the generator that draws.
    """

    given: int = 0
    begun: int = 0
    documents: int = 0
    taken: int = 0
    rows: dict[str, Any] | None = None
    table: Any = None
    rest: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    waiting: list[list[Any]] = field(default_factory=list)
    ending: bool = False
    random: Any = None

    def kept(self, given: int, begun: int) -> Position | None:
        """What it says now, apart from what is read on; None: nothing has been drawn."""
        if self.random is None:
            return None
        now: dict[str, Any] = {"given": given, "begun": begun, "table": None, "waiting": list(self.waiting)}
        return Position(**{f.name: getattr(self, f.name) for f in fields(self)} | now | {"random": self._state()})

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.random.bit_generator.state
        return state

    def arrays(self) -> dict[str, NDArray[Any]]:
        """What of it is arrays: those that wait by their place in an item, end to end, and how long each one is."""
        found: dict[str, NDArray[Any]] = {"rest": np.array(self.rest, np.int64)}
        for i, column in enumerate(zip(*self.waiting, strict=True)):
            if isinstance(column[0], np.ndarray):
                found[f"{i}"] = np.concatenate(column)
                found[f"{i}/lengths"] = np.array([len(x) for x in column], np.int64)
        return found

    def values(self) -> dict[str, Any]:
        """The rest of it, JSON-ready."""
        columns = enumerate(zip(*self.waiting, strict=True))
        return {
            "given": self.given, "begun": self.begun, "documents": self.documents, "taken": self.taken,
            "rows": self.rows, "ending": self.ending, "random": self.random,
            "waiting": {f"{i}": list(column) for i, column in columns if not isinstance(column[0], np.ndarray)},
        }  # fmt: skip

    @classmethod
    def restored(cls, values: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> Position:
        """Of what `values` and `arrays` gave.

        Raises:
            ValueError, LookupError, TypeError: of something else.
        """
        counts = {name: values[name] for name in ("given", "begun", "documents", "taken")}
        if not all(type(n) is int and n >= 0 for n in counts.values()):
            raise ValueError(f"a stream after {counts} examples")
        columns: dict[str, list[Any]] = dict(values["waiting"])
        for name in arrays:
            if name.isdecimal():
                columns[name] = np.split(arrays[name], np.cumsum(arrays[f"{name}/lengths"])[:-1])
        waiting = [list(item) for item in zip(*(columns[f"{i}"] for i in range(len(columns))), strict=True)]
        ending = bool(values["ending"])
        return cls(**counts, rows=values["rows"], rest=arrays["rest"], waiting=waiting, ending=ending,
                   random=values["random"])  # fmt: skip

    def generator(self, seed: int) -> np.random.Generator:
        """What draws, from here on."""
        made = np.random.default_rng([seed, 3])
        if self.random is not None:
            made.bit_generator.state = self.random
        self.random = made
        return made


def together(found: Iterator[T]) -> Iterator[list[T]]:
    """The same, `TOGETHER` at a time. Whoever reads ahead of what it gives out reads these chunks, and no further."""
    while chunk := list(islice(found, TOGETHER)):
        yield chunk


def in_chunks(read: Callable[[Position], Iterator[T]], position: Position, most: int | None) -> Iterator[list[T]]:
    """What is read from a position on, `TOGETHER` at a time; the position is kept up to date. most: of a pass."""
    found = read(position)
    if position.rows is None:
        found = islice(found, position.documents, None)
    found = islice(found, None if most is None else max(0, most - position.documents))
    for chunk in together(found):
        yield chunk
        position.documents, position.taken = position.documents + len(chunk), 0
        if position.table is not None:
            position.rows = copy.deepcopy(position.table.state_dict())


def one_by_one(chunks: Callable[[Position], Iterator[list[T]]], position: Position) -> Iterator[T]:
    """The items of chunks, from the position on, which is kept up to date."""
    for chunk in chunks(position):
        for item in chunk[position.taken :]:
            position.taken += 1
            yield item


def leaves(item: Any) -> list[Any]:
    """What an item holds that is neither a dataclass nor a tuple, in order."""
    if is_dataclass(item):
        item = tuple(getattr(item, f.name) for f in fields(item))
    return list(chain.from_iterable(map(leaves, item))) if isinstance(item, tuple) else [item]


def of_leaves(like: Any, found: Iterator[Any]) -> Any:
    """An item of the same shape as another one, of its leaves."""
    if is_dataclass(like):
        kind: Any = type(like)
        return kind(*(of_leaves(getattr(like, f.name), found) for f in fields(like)))
    return tuple(of_leaves(part, found) for part in like) if isinstance(like, tuple) else next(found)

"""Where a stream of examples is: what a run needs to go on there, without reading and tokenizing it again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

TOGETHER = 64  # rows of a stream that are read and tokenized at once
T = TypeVar("T")


@dataclass
class StreamOffset:
    """Where a stream was when the block was read that examples are being given of, and how many were; JSON-ready.

    Who reads moves the rest of it on, and begins where it says.

    Attributes:
        given: examples of the run so far. begun: those before the present pass over the stream. drawn: of the block.
        documents: rows of this pass that were read. rows: the state then of the set of `datasets` that they come from;
            None: it has none, and the rows before are read over, not tokenized. table: that set, once it is being read.
        rest: ids that wait for a whole window.
    """

    given: int = 0
    begun: int = 0
    drawn: int = 0
    documents: int = 0
    rows: dict[str, Any] | None = None
    rest: Sequence[int] | NDArray[np.int64] = ()
    table: Any = None

    def to_json(self) -> dict[str, Any]:
        """As a checkpoint has it."""
        return {**vars(self), "table": None}


def together(found: Iterator[T]) -> Iterator[list[T]]:
    """The same, `TOGETHER` at a time. Whoever reads ahead of what it gives out reads these chunks, and no further."""
    while chunk := list(islice(found, TOGETHER)):
        yield chunk


def in_chunks(read: Callable[[StreamOffset], Iterator[T]], offset: StreamOffset, most: int | None) -> Iterator[list[T]]:
    """What is read from an offset on, `TOGETHER` at a time; the offset is past each. most: of a pass."""
    found = read(offset)
    if offset.rows is None:
        found = islice(found, offset.documents, None)
    found = islice(found, None if most is None else max(0, most - offset.documents))
    for chunk in together(found):
        offset.documents += len(chunk)
        if offset.table is not None:
            offset.rows = copy.deepcopy(offset.table.state_dict())
        yield chunk

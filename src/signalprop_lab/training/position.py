"""Where a stream of text is: what a run needs to go on there, without reading and tokenizing it again."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass
class Position:
    """Filled in by those who read as they give out an example; they begin where it says.

    Attributes:
        given: examples of the run so far. begun: those before the present pass over the stream.
        documents: of this pass so far. rows: the state of the set of `datasets` that they come from; None: it has none,
            and the documents before are read over, not tokenized. table: that set, once it is being read.
        rest: ids that wait for a whole window, (n,). waiting: windows among which the next one is drawn.
        ending: there are no more; the windows are in their order. random: state of the generator that draws.
    """

    given: int = 0
    begun: int = 0
    documents: int = 0
    rows: dict[str, Any] | None = None
    table: Any = None
    rest: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    waiting: list[Any] = field(default_factory=list)
    ending: bool = False
    random: Any = None

    def kept(self, given: int, begun: int) -> Position | None:
        """What it says now, apart from what is read on; None: what waits is not windows of ids."""
        if self.random is None or not all(isinstance(x, np.ndarray) for x in self.waiting):
            return None
        rows = None if self.table is None else copy.deepcopy(self.table.state_dict())
        state = self.random.bit_generator.state
        return Position(given, begun, self.documents, rows, None, self.rest, list(self.waiting), self.ending, state)

    def arrays(self) -> dict[str, NDArray[np.int64]]:
        """What of it is ids."""
        waiting = np.stack(self.waiting) if self.waiting else np.zeros((0, 0), np.int64)
        return {"rest": np.array(self.rest, np.int64), "waiting": waiting.astype(np.int64)}

    def values(self) -> dict[str, Any]:
        """The rest of it, JSON-ready."""
        return {
            "given": self.given, "begun": self.begun, "documents": self.documents, "rows": self.rows,
            "ending": self.ending, "random": self.random,
        }  # fmt: skip

    def generator(self, seed: int) -> np.random.Generator:
        """What draws, from here on."""
        made = np.random.default_rng([seed, 3])
        if self.random is not None:
            made.bit_generator.state = self.random
        self.random = made
        return made

"""Where the tokens of a batch stand in their sequences."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Positions:
    """Where queries and keys stand in their sequences, from 0.

    Attributes:
        query: of every query, (b, q). key: of every key as each query sees it, (b, q or 1, k).
        seen: True where a query may look, (b, 1, q, k); None: everywhere that the shape allows.
        count: tokens in the sequence of every query, (b, q or 1). Only shapes without a mask read it.
        start: where queries are start, start + 1, ... and keys 0, 1, ... up to the last query, which has short cuts.
    """

    query: Tensor
    key: Tensor
    seen: Tensor | None
    count: Tensor
    start: int | None = None

    @property
    def whole(self) -> bool:
        """Whether one sequence stands in order, from its first key to its last query."""
        return self.start is not None

    @property
    def n_keys(self) -> int:
        """Columns of a row of scores."""
        return self.key.shape[-1]

    @cached_property
    def lengths(self) -> tuple[list[int], Tensor]:
        """(the different counts, rising; which of them every query's is, (b, q or 1)). Waits for the device."""
        counts, which = torch.unique(self.count, return_inverse=True)
        return counts.tolist(), which

    @staticmethod
    def of_length(n: int, device: torch.device | str | None = None) -> Positions:
        """One sequence of n tokens, for a batch of any size."""
        index = torch.arange(n, device=device)[None]
        return Positions(index, index[:, None], None, torch.full((1, 1), n, device=device), start=0)

    def rows(self, first: int, last: int) -> Positions:
        """Some queries of one whole causal sequence, and the keys that they see."""
        return Positions(self.query[:, first:last], self.key[..., :last], None, self.count, start=first)

    @staticmethod
    def of_tokens(keep: Tensor, *, causal: bool) -> Positions:
        """Sequences with padding anywhere: `keep` is True at real tokens, (b, n). A padding token sees itself."""
        n = keep.shape[1]
        place = (keep.cumsum(1) - 1).clamp_(min=0)
        own = torch.eye(n, dtype=torch.bool, device=keep.device)
        seen = keep[:, None, None, :] | own
        return Positions(place, place[:, None], seen.tril() if causal else seen, keep.sum(1, keepdim=True).clamp(min=1))

    @staticmethod
    def of_mask(seen: Tensor, *, causal: bool) -> Positions:
        """From a mask alone, True where a query may look, (b, 1, q, k): padding, packed sequences, caches, chunks.

        Keys are counted from the first one that a query sees. In a causal row the last of them is its own; without a
        causal mask query i's own key is key i. Windows that hide the start of a sequence have no right answer here.
        """
        place = seen[:, 0].cumsum(-1, dtype=torch.int32) - 1
        last = place[..., -1]
        query = last if causal else place.diagonal(dim1=1, dim2=2)
        return Positions(query.clamp(min=0), place.clamp_(min=0), seen, (last + 1).clamp_(min=1))

"""What was seen of a pass through a model, for who makes a Profile of it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from signalprop.attachment.anatomy import Anatomy
from signalprop.watching.reduction import Rows, Sums

Result = Rows | Sums


class Pass:
    """A measured pass.

    Attributes:
        forward, gradient: moments by site index; of the sums of parallel layers by -1 - sublayer index.
        calls: how often the model ran. recorded: which of these was recorded, in words.
        shapes: (batch, tokens) of the stream by stack. between: products of several streams by site of `stream_out`.
        mask_ignored: a mask of padding had another shape. folded: in words, how tokens stand in the stream, where that
            is not (batch, tokens, features).
    """

    recorded = "the first pass was"

    def __init__(self, attached: Anatomy, *, backward: bool) -> None:
        self.attached, self.backward = attached, backward
        self.model, self.mapping, self.plan = attached.model, attached.mapping, attached.plan
        self.forward: dict[int, Result] = {}
        self.gradient: dict[int, Result] = {}
        self.between: dict[int, Tensor] = {}
        self.shapes: dict[int, tuple[int, int]] = {}
        self.calls = 0
        self.mask_ignored = False
        self.folded = ""

    def finish(self) -> None:
        """Bring what was seen together, before it is read; with several processes all of them."""

    def read(self) -> dict[str, Any]:
        """Arguments of the pass by name, where nobody could look at them while it ran."""
        return {}

    def notes(self) -> list[str]:
        """What the reader of the Profile should know about the pass."""
        out = [f"measured in {'training' if self.model.training else 'evaluation'} mode", *self.mapping.notes]
        if self.calls > 1:
            out.append(f"the model ran {self.calls} times in this step; {self.recorded} recorded")
        if self.mask_ignored:
            out.append("the attention mask is not of shape (batch, tokens); every position was counted")
        return [*out, self.folded] if self.folded else out


def in_tokens(tensor: Tensor, shape: tuple[int, int] | None, *, tokens_first: bool = False) -> Tensor:
    """A tensor as (batch, tokens, features), where a model has put its tokens otherwise.

    All in one row (OPT), before the sequences, or in rows and columns (batch, height, width, features).

    Args:
        shape: (batch, tokens) of the stream, where it is known. tokens_first: the model has (tokens, batch, features).
    """
    if tensor.ndim == 2 and shape is not None and tensor.shape[0] == shape[0] * shape[1]:
        return tensor.reshape(*shape, tensor.shape[1])
    if tensor.ndim == 4:
        return tensor.flatten(1, 2)
    return tensor.transpose(0, 1) if tokens_first and tensor.ndim == 3 else tensor

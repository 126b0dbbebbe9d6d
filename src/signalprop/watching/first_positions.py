"""The first positions of a sequence, where trained decoders park activations thousands of times larger than all others.

Sun et al. 2024 (Massive Activations in Large Language Models), section 2; Xiao et al. 2024 (StreamingLLM), section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping as Dictionary
from typing import Any, Self

import torch
from torch import Tensor

from signalprop.attachment.anatomy import Anatomy
from signalprop.attachment.mapping import Mapping, masks_of
from signalprop.errors import InputError
from signalprop.hooks import Hooks
from signalprop.network.layout import STACKS, layer_ends
from signalprop.watching.passes import in_tokens

FIRST = 4  # positions that statistics leave out where these are unlike the others
# Times the variance of the others, from which on they are. SmolLM2 7,210, Qwen2.5 4,220; Gemma 3 67, Whisper 8.
MASSIVE = 100.0
DECODER = STACKS.index("decoder")


def later(real: Tensor, skip_first: int) -> Tensor:
    """Real tokens (batch, tokens; True, False at padding) without the first `skip_first` of each sequence."""
    return real & (real.cumsum(1) > skip_first)


def check_length(length: int, skip_first: int) -> None:
    """Refuse sequences that would have no token left."""
    if length <= skip_first:
        raise InputError(
            f"sequences of {length} tokens have none after the first {skip_first}, which statistics leave out; give "
            "longer sequences, or a smaller skip_first"
        )


class Positions:
    """Which positions of a pass count, by stack: real tokens after the first `skip_first` of their sequence.

    Args:
        arguments: the model's, with the masks that the mapping names.
    """

    def __init__(self, mapping: Mapping, arguments: Dictionary[str, Any], skip_first: int) -> None:
        self._masks, _ = masks_of(arguments, mapping)
        self._skip_first = skip_first
        self._known: dict[tuple[int, tuple[int, ...]], tuple[Tensor, Tensor]] = {}

    def of(self, stack: int, shape: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
        """(those that count, the first ones, which are left out), each (batch, tokens); padding is in neither."""
        if (stack, shape) not in self._known:
            mask = self._masks.get(stack)
            real = torch.ones(shape, dtype=torch.bool, device=device)
            if mask is not None and mask.shape == shape:
                real = mask.to(device) != 0
            keep = later(real, self._skip_first)
            self._known[stack, shape] = (keep, real & ~keep)
        keep, first = self._known[stack, shape]
        return keep.to(device), first.to(device)


class Streams:
    """The stream at every probe point of the passes that follow, in a `with` block; `begin` before each of them.

    Args:
        see: called with the site's index, what passes there (batch, tokens, features), which of its positions count,
            and which are the first ones, as `Positions` has them.

    Attributes:
        hooks: which are on in the block; others may join. keep, shape: by stack, as seen last in this pass.
    """

    def __init__(self, attached: Anatomy, skip_first: int, see: Callable[[int, Tensor, Tensor, Tensor], None]) -> None:
        self._mapping, self._sites, self._see = attached.mapping, attached.plan.sites, see
        self._skip_first = skip_first
        self._positions: Positions | None = None
        self.keep: dict[int, Tensor] = {}
        self.shape: dict[int, tuple[int, int]] = {}
        self.hooks = Hooks()
        self.hooks.sites(self._sites, self._meets, first=True)

    def begin(self, arguments: Dictionary[str, Any]) -> None:
        """A pass with these arguments is about to begin."""
        self._positions = Positions(self._mapping, arguments, self._skip_first)
        self.keep.clear()
        self.shape.clear()
        self.hooks.begin()

    def __enter__(self) -> Self:
        self.hooks.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self.hooks.detach()
        self._see = _unseen  # or a method of this, which leads to the model, would hold both until they are collected

    def _meets(self, index: int, given: Tensor | None) -> None:
        stack = self._sites[index].stack
        x = (
            None
            if given is None
            else in_tokens(given.detach(), self.shape.get(stack), tokens_first=self._mapping.tokens_first)
        )
        if x is None or x.ndim != 3 or self._positions is None:
            return
        self.shape[stack] = x.shape[0], x.shape[1]
        keep, first = self._positions.of(stack, self.shape[stack], x.device)
        self.keep[stack] = keep
        self._see(index, x, keep, first)


def _unseen(*_: object) -> None:
    pass


class FirstPositions(Streams):
    """How a decoder's first positions stand out in a pass, as `with FirstPositions(attached, arguments) as seen`.

    Attributes:
        ratio: largest variance after a layer, over the first positions, as a multiple of that over the others; 0 where
            no decoder is there, or its sequences are at most twice as long as what would be left out.
    """

    def __init__(self, attached: Anatomy, arguments: Dictionary[str, Any]) -> None:
        super().__init__(attached, FIRST, self._compare)
        rows, plan = attached.layout, attached.plan
        self._ends = {plan.stream_out[i] for i in layer_ends(rows) if rows.stack[i] == DECODER}
        self.ratio = 0.0
        self.begin(arguments)

    def _compare(self, index: int, x: Tensor, others: Tensor, first: Tensor) -> None:
        if index in self._ends and x.shape[1] > 2 * FIRST:
            variance = x.float().var(-1, correction=0)
            massive, rest = (float(variance[where].mean()) for where in (first, others))
            self.ratio = max(self.ratio, massive / rest if rest > 0 else 0.0)

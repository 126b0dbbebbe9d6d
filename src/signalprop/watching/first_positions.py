"""The first positions of a sequence, where trained decoders park activations thousands of times larger than all others.

Sun et al. 2024 (Massive Activations in Large Language Models), section 2; Xiao et al. 2024 (StreamingLLM), section 3.
"""

from __future__ import annotations

from collections.abc import Mapping as Dictionary
from typing import Any

import torch
from torch import Tensor

from signalprop.attachment.attached import Attached
from signalprop.attachment.mapping import masks_of
from signalprop.errors import InputError
from signalprop.hooks import Hooks, in_tokens
from signalprop.network.layout import STACKS, layer_starts

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


class FirstPositions:
    """How a decoder's first positions stand out in a pass, as `with FirstPositions(attached, arguments) as seen`.

    Attributes:
        ratio: largest variance after a layer, over the first positions, as a multiple of that over the others; 0 where
            there is no decoder, or its sequences are at most twice as long as what would be left out.
    """

    def __init__(self, attached: Attached, arguments: Dictionary[str, Any]) -> None:
        self._mask = masks_of(arguments, attached.mapping)[0].get(DECODER)
        self._shape: tuple[int, int] | None = None
        rows, plan = attached.layout, attached.plan
        starts = layer_starts(rows).tolist()
        ends = [i - 1 for i in [*starts[1:], len(rows.kind)] if rows.stack[i - 1] == DECODER]
        self._ends = {plan.stream_out[i] for i in ends}
        self._stacks = [site.stack for site in plan.sites]
        self._hooks = Hooks(attached.outer)
        self._hooks.sites(plan.sites, self._see)
        self.ratio = 0.0

    def __enter__(self) -> FirstPositions:
        self._hooks.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.detach()

    def _see(self, index: int, given: Tensor | None) -> None:
        x = None if given is None else in_tokens(given.detach(), self._shape)
        if x is None or x.ndim != 3 or x.shape[1] <= 2 * FIRST or self._stacks[index] != DECODER:
            return
        self._shape = x.shape[0], x.shape[1]
        if index in self._ends:
            real = x.new_ones(self._shape, dtype=torch.bool)
            if self._mask is not None and self._mask.shape == real.shape:
                real = self._mask.to(x.device) != 0
            others = later(real, FIRST)
            variance = x.float().var(-1, correction=0)
            first, rest = (float(variance[keep].mean()) for keep in (real & ~others, others))
            self.ratio = max(self.ratio, first / rest if rest > 0 else 0.0)

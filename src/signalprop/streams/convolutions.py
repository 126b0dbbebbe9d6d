"""Branches that mix tokens by a gated short convolution (LFM2), computed again in float64 from their weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from signalprop.streams.replay import Map, Replayed, Rows

_ROLES = ("conv_before", "conv_after", "conv_value")
# before and value play the same part, so that their order is as it is stored
_ORDERS = ((0, 1, 2), (1, 0, 2), (0, 2, 1))


def gated_convolution(
    maps: Sequence[Map], taps: Sequence[tuple[str, Tensor, Tensor | None]], last: Map, limit: float
) -> Replayed | float:
    """The roles of a branch's weights, where its last map reads after * convolution(before * value).

    Args:
        maps: that read what enters the branch. taps: path and weight of a convolution over tokens, (channels, 1,
            width), with its bias (channels) or None.

    Returns:
        The smallest error where none does.
    """
    target, best = last.read, math.inf
    width, size = target.shape[-1], float(target.abs().max()) or 1.0
    for m, (path, weight, bias), order in product(maps, taps, _ORDERS):
        if m.gave.shape[-1] != 3 * width or len(weight) != width:
            continue
        before, after, value = (torch.split(m.gave, width, -1)[i] for i in order)
        error = float((after * _convolved(before * value, weight, bias) - target).abs().max()) / size
        best = min(best, error)
        if error > limit or not bool(target.any()):
            continue
        alone = weight * (torch.arange(weight.shape[-1]) == weight.shape[-1] - 1)  # the token itself
        blind = after * _convolved(before * value, alone, bias)
        if float((blind - target).abs().max()) / size > 64 * error:  # else any filter would fit
            rows: dict[str, tuple[str, Rows]] = {
                role: (m.path, slice(i * width, (i + 1) * width)) for role, i in zip(_ROLES, order, strict=True)
            }
            return Replayed({**rows, "conv_filter": (path, None), "conv_out": (last.path, None)}, error)
    return best


def _convolved(x: Tensor, taps: Tensor, bias: Tensor | None) -> Tensor:
    """A causal filter per channel over (tokens, channels)."""
    padded = F.pad(x.mT[None], (taps.shape[-1] - 1, 0))
    return F.conv1d(padded, taps, bias, groups=len(taps))[0].mT

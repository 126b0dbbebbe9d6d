"""Multipliers: plain numbers, or parameters that start at them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from signalprop.network.parametrization import Trainable

Multiplier = float | nn.Parameter


def trainable(value: float, kind: Trainable, d_model: int, dtype: torch.dtype) -> Multiplier:
    """The number itself, or a parameter that starts at it: of shape (1,) or, per channel, (d_model,)."""
    if kind == "fixed":
        return value
    return nn.Parameter(torch.full((1 if kind == "scalar" else d_model,), value, dtype=dtype))


def is_fixed(multiplier: Multiplier, value: float) -> bool:
    """Whether a multiplier is, and stays, this number."""
    return not isinstance(multiplier, Tensor) and multiplier == value


def times(multiplier: Multiplier, x: Tensor) -> Tensor:
    """multiplier * x, and x itself where the multiplier is a fixed 1."""
    return x if is_fixed(multiplier, 1.0) else multiplier * x

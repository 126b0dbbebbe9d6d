"""What the sublayers of a stack read besides the stream: masks, rotations, the encoder's output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from signalprop.models.shaping import Positions
from signalprop.network.architecture import Architecture


@dataclass(frozen=True)
class Surroundings:
    """What the sublayers of a stack read besides the stream.

    Attributes:
        causal: self-attention sees no later token.
        mask: True where self-attention may look, broadcastable to (batch, heads, queries, keys), or a float bias
            that is added to the scores; the causal part is in it. None: everywhere (that `causal` allows).
        rotation: cosines and sines of rotary positions, each (tokens, rotated features); None: no rotation.
        memory: the encoder's output, (batch, source tokens, features), that cross-attention reads.
        memory_mask: True at the memory's real tokens, (batch, 1, 1, source tokens); None: all.
        positions: where the tokens of padded sequences stand; shaped attention reads them, and of `mask` only what is
            added to scores.
    """

    causal: bool = False
    mask: Tensor | None = None
    rotation: tuple[Tensor, Tensor] | None = None
    memory: Tensor | None = None
    memory_mask: Tensor | None = None
    positions: Positions | None = None


def rotation_table(
    architecture: Architecture,
    length: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    base: float | None = None,
    features: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions 0..length-1, each (length, features); base, features: others.

    Su et al. 2021, section 3.4.2, in the half-split order of Llama and GPT-NeoX: feature i turns with feature
    i + rotated / 2.
    """
    a = architecture
    rotated = (int(a.d_head * a.rotary_fraction) if features is None else features) // 2 * 2
    exponent = torch.arange(0, rotated, 2, device=device, dtype=torch.float32) / max(rotated, 1)
    frequency = 1.0 / (base or a.rotary_base) ** exponent
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * frequency
    angle = torch.cat([angle, angle], -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the first features of every head, x of shape (batch, heads, tokens, d_head)."""
    cos, sin = rotation
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat([-second, first], -1) * sin
    return torch.cat([turned, rest], -1) if rest.shape[-1] else turned

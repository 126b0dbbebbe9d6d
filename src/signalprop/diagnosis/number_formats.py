"""Number formats of few bits, each as a cast there and back: one scale per tensor, per row, or per block.

Rows and blocks lie along the last axis, which a linear map sums over: a row is an output channel of a weight, or a
token of activations. Sources: OCP Microscaling specification 1.0, sections 5.3 and 6.3 (MXFP4, MXFP8); NVIDIA's
recipe of NVFP4 (Transformer Engine); integers are symmetric, as in weight-only and W8A8 kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from signalprop.diagnosis.result import ONE_SCALE


class Grid(NamedTuple):
    """How a format's numbers and scales are stored.

    Attributes:
        element: int8, int4, e2m1, or a type of torch. top: its largest number. scale: `free` (float32), `power` (of
            two, E8M0), or `e4m3` (float8 times a float32 scale of the tensor). block: numbers that share a scale; 0:
            a row; None: the tensor.
    """

    element: str
    top: float
    scale: Literal["free", "power", "e4m3"] = "free"
    block: int | None = None


def _top(name: str) -> float:
    return 127.0 if name == "int8" else float(torch.finfo(getattr(torch, name)).max)


PER_TENSOR = {name: Grid(name, _top(name)) for name in ONE_SCALE}
# Scales are part of these.
SCALED = {
    "nvfp4": Grid("e2m1", 6.0, "e4m3", 16),
    "mxfp4": Grid("e2m1", 6.0, "power", 32),
    "mxfp8": Grid("float8_e4m3fn", 448.0, "power", 32),
    "int8_channel": Grid("int8", 127.0, block=0),
    "int8_block": Grid("int8", 127.0, block=128),
    "int4_channel": Grid("int4", 7.0, block=0),
    "int4_block": Grid("int4", 7.0, block=128),
}
GRIDS = PER_TENSOR | SCALED
FORMATS = tuple(GRIDS)
_LEAST_POWER, _MOST_POWER = -127, 127  # of E8M0


@dataclass(frozen=True)
class Format:
    """A cast there and back.

    Attributes:
        name: of `FORMATS`. scaled: of those in `PER_TENSOR`, the tensor is divided by its largest |number| over the
            largest of the format first. The others always have their scales.
    """

    name: str
    scaled: bool

    def __call__(self, x: Tensor) -> Tensor:
        """The tensor as the format holds it; beyond its range numbers are held at its ends, in float16 infinite.

        torch's cast makes NaN of those in float8_e4m3fn and infinity in float8_e5m2; kernels saturate. Where one
        number of a tensor, row or block is not finite, its scale is 1. Of three or more axes the last two are a matrix
        with a separate scale (an expert's).
        """
        grid = GRIDS[self.name]
        if not x.numel():
            return x.clone()
        if grid.block is None:
            largest = float(x.abs().amax())
            scale = largest / grid.top if self.scaled and largest > 0 and math.isfinite(largest) else 1.0
            return (_held(x.float() / scale, grid) * scale).to(x.dtype)
        rows = x.float()
        width = rows.shape[-1]
        block = grid.block or width
        short = -width % block
        parts = torch.nn.functional.pad(rows, (0, short)).reshape(*rows.shape[:-1], -1, block)
        scale_of = _scales(parts, grid)
        cast = torch.where(scale_of > 0, _held(parts / scale_of.clamp_min(1e-45), grid) * scale_of, 0.0)
        return cast.flatten(-2)[..., :width].to(x.dtype)


def _scales(parts: Tensor, grid: Grid) -> Tensor:
    """One scale per block, (..., blocks, 1); 0 where all of a block is too small to be held."""
    largest = parts.abs().amax(-1, keepdim=True)
    largest = torch.where(largest.isfinite(), largest, grid.top)
    if grid.scale == "power":
        power = torch.frexp(largest).exponent - math.frexp(grid.top)[1]
        return torch.where(largest > 0, torch.exp2(power.clamp(_LEAST_POWER, _MOST_POWER).float()), 0.0)
    if grid.scale == "free":
        return largest / grid.top
    ends = tuple(range(max(parts.ndim - 3, 0), parts.ndim))  # of the last matrix
    whole = largest.amax(ends, keepdim=True) / (grid.top * _top("float8_e4m3fn"))
    held = (largest / grid.top / whole.clamp_min(1e-45)).clamp_max(_top("float8_e4m3fn"))
    return torch.where(whole > 0, held.to(torch.float8_e4m3fn).float() * whole, 0.0)


def _held(x: Tensor, grid: Grid) -> Tensor:
    """To the nearest number of the element type, ties to even; beyond its range, its ends (float16: infinity)."""
    if grid.element == "float16":
        return x.half().float()
    x = x.clamp(-grid.top, grid.top)
    if grid.element.startswith("int"):
        return x.round()
    if grid.element == "e2m1":
        step = torch.exp2((torch.frexp(x).exponent - 1).clamp(0, 2).float() - 1)
        return (x / step).round() * step
    return x.to(getattr(torch, grid.element)).float()

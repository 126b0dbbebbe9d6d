"""Token kernels through global attention: those of attention, with its own heads."""

from __future__ import annotations

from collections.abc import Sequence

from signalprop.kernels.grid import Grid
from signalprop.kernels.shaping import Shapes
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.attention.kernel import AttentionKernel
from signalprop.sublayers.global_attention.roles import Settings, as_usual


def of(p: Parametrization, stack: int, shapes: Sequence[Shapes]) -> AttentionKernel:
    """The global attention of a table in one stack (index into STACKS)."""
    made = AttentionKernel(as_usual(p), stack, shapes)
    made.shared = Settings.of(p.architecture).shared
    return made


def on_grid(p: Parametrization, stack: int, shapes: Sequence[Shapes], grid: Grid) -> AttentionKernel:
    """The same on a grid of positions."""
    return AttentionKernel(as_usual(p), stack, shapes, grid)

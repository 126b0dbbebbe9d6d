"""Token kernels through global attention: those of attention, with its own heads."""

from __future__ import annotations

from collections.abc import Sequence

from signalprop.kernels.grid import Grid
from signalprop.kernels.shaping import Shapes
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.attention.kernel import AttentionKernel
from signalprop.sublayers.global_attention.roles import Settings, as_usual


def of(p: Parametrization, stack: int, shapes: Sequence[Shapes], grid: Grid | None = None) -> AttentionKernel:
    """The global attention of a table in one stack (index into STACKS), on a grid of positions or at all of them."""
    made = AttentionKernel(as_usual(p), stack, shapes, grid)
    made.shared = Settings.of(p.architecture).shared
    return made


on_grid = of

"""Where the tokens of a stack stand, and how a signal of n nodes lies in one matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from signalprop.kernels.causal_shaping import Shapes
from signalprop.kernels.position_grid import Averages, Grid
from signalprop.network.moments import FloatArray
from signalprop.network.products import product
from signalprop.theory.signals import Signal


@dataclass
class Nodes:
    """The n positions that are followed.

    Attributes:
        shapes: what the attention of every sublayer is shaped to. grid: None: all positions are followed.
        memory: the grid of an encoder's output that is read. caches: whether attentions are stored for the way back.
    """

    shapes: Sequence[Shapes]
    grid: Grid | None = None
    memory: Grid | None = None
    caches: bool = False

    @property
    def is_one(self) -> bool:
        """Whether one node stands for all tokens, whose signals are floats."""
        return isinstance(self.grid, Averages)

    def signal(self, kernel: FloatArray) -> Signal:
        """Of a token kernel."""
        return Signal(float(kernel[0, 0]), float(kernel[0, 1])) if self.is_one else _signal(kernel, self.grid)

    def matrix(self, x: Signal) -> FloatArray:
        """The token kernel of a signal."""
        return _matrix(x, self.grid)

    def moved(self, x: Signal, by: int) -> Signal:
        """What stood so many positions before every node, or after it (below 0); 0 where nothing did."""
        n = len(np.asarray(x.per_token))
        move = np.eye(n, k=-by) if self.grid is None else self.grid.moved(-by)
        return Signal(move @ np.asarray(x.per_token), product(product(move, np.asarray(x.shared)), move.T))

    def memory_signal(self, kernel: FloatArray) -> Signal:
        """As `signal`, of an encoder's output."""
        return _signal(kernel, self.memory)

    def memory_matrix(self, x: Signal) -> FloatArray:
        """As `matrix`, of an encoder's output."""
        return _matrix(x, self.memory)


def _signal(kernel: FloatArray, grid: Grid | None) -> Signal:
    if grid is None:
        return Signal.of(kernel)
    off, per_token = grid.split(kernel)
    return Signal(per_token.copy(), off.copy())  # not views, which would hold the whole kernel


def _matrix(x: Signal, grid: Grid | None) -> FloatArray:
    return x.matrix() if grid is None else grid.joined(np.atleast_2d(x.shared), np.atleast_1d(x.per_token))

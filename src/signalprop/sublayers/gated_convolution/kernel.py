"""Token kernels through a short causal convolution between two gates: the moments, position by position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from signalprop.kernels.grid import Grid
from signalprop.kernels.stack import BranchKernel
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.network.products import product
from signalprop.sublayers.gated_convolution.moments import of as moments_of
from signalprop.sublayers.gated_convolution.roles import Settings
from signalprop.sublayers.mamba2.scan import taken


class GatedConvolutionKernel(BranchKernel):
    """The convolutions of one stack.

    On a grid the last width - 1 positions send gradients back as if more tokens came.
    """

    def __init__(self, p: Parametrization, stack: int, shapes: Sequence[Any], grid: Grid | None = None) -> None:
        self.made, self.grid = moments_of(p, stack), grid
        self.width = Settings.of(p.architecture).width

    def forward(self, i: int, kernel: FloatArray) -> FloatArray:
        _, _, after, filtered = self._factors(i, kernel)
        return self._map("conv_out", i, filtered * after)

    def backward(self, i: int, kernel: FloatArray, gradient: FloatArray) -> FloatArray:
        before, value, after, filtered = self._factors(i, kernel)
        gain = {
            role: float(self.made.gain(role, i)) for role in ("conv_before", "conv_after", "conv_value", "conv_out")
        }
        g = gradient * gain["conv_out"]
        at_taps = self._taken(i, g * after, ahead=False)
        return np.asarray(
            g * filtered * gain["conv_after"] + at_taps * (value * gain["conv_before"] + before * gain["conv_value"])
        )

    def _factors(self, i: int, kernel: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        before, value, after = (self._map(role, i, kernel) for role in ("conv_before", "conv_value", "conv_after"))
        filtered = self._taken(i, before * value, ahead=True) + float(self.made.bias("conv_filter", i))
        return before, value, after, filtered

    def _map(self, role: str, i: int, kernel: FloatArray) -> FloatArray:
        return np.asarray(kernel * float(self.made.gain(role, i)) + float(self.made.bias(role, i)))

    def _taken(self, i: int, kernel: FloatArray, *, ahead: bool) -> FloatArray:
        """Sum over the taps of the kernel, moved by so many tokens each: ahead, or back as gradients go."""
        gain = float(self.made.gain("conv_filter", i))
        if self.grid is None:
            return taken(kernel, self.width, ahead=ahead) * gain
        off, own = self.grid.split(kernel)
        moves = [self.grid.moved(-k if ahead else k) for k in range(self.width)]
        pairs = sum(product(product(move, off), move.T) for move in moves)
        alone = sum(move @ own for move in moves)
        return self.grid.joined(np.asarray(pairs), np.asarray(alone)) * gain


of = on_grid = GatedConvolutionKernel

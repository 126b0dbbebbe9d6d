"""Token kernels through self-attention: by softmax of random scores, or by matrices that it is shaped to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from signalprop.kernels.attention import ShapedAttention, TokenAttention, rotation
from signalprop.kernels.grid import Grid, GridAttention
from signalprop.kernels.shaping import Shapes
from signalprop.kernels.windows import windowed
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.attention import roles
from signalprop.sublayers.attention.moments import seeing, sights_of
from signalprop.sublayers.attention.roles import Sight


class AttentionKernel:
    """The self-attention sublayers of one stack.

    Attributes:
        shapes: of every sublayer of the table. grid: on which kernels stand; None: every position has its row.
    """

    def __init__(self, p: Parametrization, stack: int, shapes: Sequence[Shapes], grid: Grid | None = None) -> None:
        self.made, self.a, self.shapes, self.grid = seeing(p, stack, Sight()), p.architecture, shapes, grid
        self.sights = sights_of(p, stack)
        self.kept: dict[int, TokenAttention] = {}  # small enough on a grid to serve the way back too

    def silent(self, i: int) -> bool:
        """Always worked out."""
        return False

    def forward(self, i: int, kernel: FloatArray) -> FloatArray:
        """Kernel of the branch before its dropout, (T, T), from the one that it reads."""
        row = self.made.at(i)
        if self.shapes[i]:  # rows of D A do not sum to 1: a bias is mixed as values are
            values = self._shaped(i, kernel * row.value + row.value_bias).forward()
        else:
            attention, size = self._by_scores(i, kernel)
            if self.grid is not None:
                self.kept[i] = attention
            bias = row.value_bias * (row.value_skip + row.attention_gain) ** 2
            values = attention.forward()
            values *= size * row.value
            values += bias
        out = values * row.output
        out += row.output_bias
        return out

    def backward(self, i: int, kernel: FloatArray, gradient: FloatArray) -> FloatArray:
        """Gradient kernel at what the branch reads, from the one before its dropout."""
        attention = self._shaped(i, kernel) if self.shapes[i] else self.kept.pop(i, None)
        return (attention or self._by_scores(i, kernel)[0]).backward(gradient) * float(self.made.at(i).back)

    def _by_scores(self, i: int, kernel: FloatArray) -> tuple[TokenAttention, float]:
        """A sublayer's attention, and the factor on its forward kernel.

        QK-norm takes the size of the stream out of the scores (here one size for all tokens), not out of the values. On
        the way back the two cancel: scores change by 1 / size with the input, what they weigh is of that size.
        """
        row = self.made.at(i)
        size = float(np.diagonal(kernel).mean()) if self.a.qk_norm else 1.0
        size = size if size > 0 else 1.0
        kernel = kernel if size == 1 else kernel / size
        fields: dict[str, Any] = {
            "qk": float(self.made.scores(row, size, size)[0] if self.a.qk_norm else row.qk),
            "d_model": self.a.d_model,
            "causal": self.made.causal,
            "dropout": self.a.attention_dropout or 0.0,
            "query_bias": float(row.query_bias),
            "value_skip": float(row.value_skip),
            "gain": float(row.attention_gain),
            "d_head": self.a.d_head,
        }
        (window, base), a = self.sights.at(i), self.a
        rho, omega = None, None
        if base:
            causal = self.made.causal or window > 0
            rho, omega = rotation(self.made.n_keys, a.d_head, base, a.rotary_fraction, causal)
        if window:
            return windowed(kernel, window, rho, omega, **fields), size
        if self.grid is None:
            return TokenAttention(kernel=kernel, rho=rho, omega=omega, **fields), size
        off, own = self.grid.split(kernel)
        if omega is not None:
            turned = self.grid.rotated(a.d_head, base, a.rotary_fraction)
            fields |= {"turn": turned, "omega": omega[self.grid.positions]}
        return GridAttention(kernel=off, own=own, grid=self.grid, **fields), size

    def _shaped(self, i: int, kernel: FloatArray) -> ShapedAttention:
        row = self.made.at(i)
        return ShapedAttention(
            kernel=kernel,
            shapes=self.shapes[i],
            dropout=self.a.attention_dropout or 0.0,
            value_skip=float(row.value_skip),
            gain=float(row.attention_gain),
        )


def of(p: Parametrization, stack: int, shapes: Sequence[Shapes]) -> AttentionKernel:
    """The self-attention sublayers of a table in one stack (index into STACKS)."""
    return AttentionKernel(p, stack, shapes)


def on_grid(p: Parametrization, stack: int, shapes: Sequence[Shapes], grid: Grid) -> AttentionKernel:
    """The same on a grid of positions."""
    return AttentionKernel(p, stack, shapes, grid)


def has_window(p: Parametrization) -> bool:
    """Whether some layer of a table sees less than what came before."""
    return roles.has_window(p.architecture)

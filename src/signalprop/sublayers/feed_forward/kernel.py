"""Token kernels through feed-forward sublayers: every entry by itself, through the activation's dual."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from signalprop.kernels.duals import dual_of_kernel, one_variance, slope_of_kernel
from signalprop.kernels.stack import BranchKernel
from signalprop.kernels.state import inverse_roots, on_both_sides
from signalprop.network.activations import activation
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.feed_forward.moments import FeedForwardMoments
from signalprop.sublayers.feed_forward.moments import of as moments_of

_Z = np.linspace(-9.0, 9.0, 181)
_DENSITY = np.exp(-_Z * _Z / 2) / np.exp(-_Z * _Z / 2).sum()
_NODES = 33  # of what overlaps by chance add, where positions differ in size


class FeedForwardKernel(BranchKernel):
    """The feed-forward sublayers of one stack."""

    def __init__(self, made: FeedForwardMoments) -> None:
        self.made = made

    def silent(self, i: int) -> bool:
        row = self.made.at(i)
        return row.down == 0 and row.down_bias == 0

    def forward(self, i: int, kernel: FloatArray) -> FloatArray:
        row = self.made.at(i)
        r, s, up = self._pre_activation(i, kernel)
        self.uneven = (kurtosis(self.made.activation, float(s.mean()), self.made.gated) - 1) / self.made.width
        out = dual_of_kernel(self.made.activation, s, r, out=r)
        if up is not None:
            out *= up
            out += self._by_chance(i, kernel)
        out *= row.down
        if row.down_bias:
            out += row.down_bias
        return out

    def _by_chance(self, i: int, kernel: FloatArray) -> FloatArray:
        """What gate times up share of two tokens by the scatter of their overlap."""
        own = np.diagonal(kernel)
        if one_variance(own) is not None:
            root = np.full(len(own), float(self.made.chance(i, float(own.mean()))))
        else:  # smooth in ln own: within 1 % of itself over five decades (tanh; silu, gelu, relu: exact)
            nodes = np.geomspace(max(own.min(), 1e-12 * own.max()), own.max(), _NODES)
            at_nodes = self.made.chance(i, nodes) / nodes
            root = own * np.interp(np.log(np.maximum(own, nodes[0])), np.log(nodes), at_nodes)
        size = inverse_roots(own)
        r = kernel * np.outer(size, size)
        out: FloatArray = np.maximum(1 - r * r, 0.0) ** 2 * np.outer(root, root)
        np.fill_diagonal(out, 0.0)
        return out

    def backward(self, i: int, kernel: FloatArray, gradient: FloatArray) -> FloatArray:
        row, activation = self.made.at(i), self.made.activation
        r, s, up = self._pre_activation(i, kernel)
        slope = slope_of_kernel(activation, s, r)
        if up is None:
            return np.asarray(gradient * (row.down_back * row.up_back * slope))
        q = dual_of_kernel(activation, s, r)
        return np.asarray(gradient * (row.down_back * (row.up_back * q + row.gate_back * up * slope)))

    def _pre_activation(self, i: int, kernel: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray | None]:
        """(correlation, variances of the non-linear pre-activation, kernel of the linear one of a gated block)."""
        row, gated = self.made.at(i), self.made.gated
        weight, bias = (row.gate, row.gate_bias) if gated else (row.up, row.up_bias)
        pre = kernel * weight + bias if bias else kernel
        own = np.diagonal(pre).copy()
        r = on_both_sides(pre, 1 / np.sqrt(np.maximum(own, 1e-150)))
        np.fill_diagonal(r, 1.0)
        if not gated:
            return r, own if bias else own * weight, None
        up = kernel * row.up
        return r, own if bias else own * weight, up + row.up_bias if row.up_bias else up


def kurtosis(name: str, variance: float, gated: bool) -> float:
    """E h^4/(E h^2)^2 of a hidden feature, of a pre-activation of that variance."""
    squares = activation(name).function(_Z * math.sqrt(variance)) ** 2
    mean = float(squares @ _DENSITY)
    if mean <= 1e-300:
        return 1.0
    return float(squares**2 @ _DENSITY) / mean**2 * (3.0 if gated else 1.0)


def of(p: Parametrization, stack: int, shapes: Sequence[Any], grid: Any = None) -> FeedForwardKernel:
    """The feed-forward sublayers of a table in one stack: nothing shapes them, and entries need not know of a grid."""
    return FeedForwardKernel(moments_of(p, stack))


on_grid = of

"""Token kernels through feed-forward sublayers: every entry by itself, through the activation's dual."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from signalprop.kernels.buffers import empty
from signalprop.kernels.duals import Places, dual_of, entry_by_entry, one_variance
from signalprop.kernels.stack import BranchKernel
from signalprop.kernels.state import inverse_roots
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.feed_forward.moments import FeedForwardMoments
from signalprop.sublayers.feed_forward.moments import of as moments_of

_NODES = 33  # of what overlaps by chance add, where positions differ in size


class FeedForwardKernel(BranchKernel):
    """The feed-forward sublayers of one stack.

    Both ways take `own`, the variances of what is read, where the kernel is that up to factors of tokens.
    """

    by_entries = True

    def __init__(self, made: FeedForwardMoments) -> None:
        self.made = made

    def silent(self, i: int) -> bool:
        row = self.made.at(i)
        return row.down == 0 and row.down_bias == 0

    def forward(self, i: int, kernel: FloatArray, own: FloatArray | None = None) -> FloatArray:
        row, read = self.made.at(i), self._read(i, kernel, own)
        value = dual_of(self.made.activation, 0, read.variance)
        root = self._chance(i, read.own) if self.made.gated else read.own

        def block(a: Places, b: Places, r: FloatArray) -> FloatArray:
            if self.made.gated:
                out = value(a, b, read.before_activation(a, b, r.copy()))
                out *= read.beside_gate(a, b, r)
                r *= r
                out += np.square(1 - r, out=r) * root[a] * root[b]
            else:
                out = value(a, b, read.before_activation(a, b, r))
            out *= row.down
            if row.down_bias:
                out += row.down_bias
            return out

        return entry_by_entry(block, kernel, read.own, empty(len(kernel)), read.root)

    def _chance(self, i: int, own: FloatArray) -> FloatArray:
        """Root of what gate times up share of two tokens by the scatter of their overlap, (T,), as `made.chance`."""
        if one_variance(own) is not None:
            return np.full(len(own), float(self.made.chance(i, float(own.mean()))))
        # smooth in ln own: within 1 % of itself over five decades (tanh; silu, gelu, relu: exact)
        nodes = np.geomspace(max(own.min(), 1e-12 * own.max()), own.max(), _NODES)
        at_nodes = self.made.chance(i, nodes) / nodes
        return np.asarray(own * np.interp(np.log(np.maximum(own, nodes[0])), np.log(nodes), at_nodes))

    def backward(self, i: int, kernel: FloatArray, gradient: FloatArray, own: FloatArray | None = None) -> FloatArray:
        row, read = self.made.at(i), self._read(i, kernel, own)
        value, slope = (dual_of(self.made.activation, derivative, read.variance) for derivative in (0, 1))

        def block(a: Places, b: Places, r: FloatArray) -> FloatArray:
            if not self.made.gated:
                out = slope(a, b, read.before_activation(a, b, r))
                out *= row.down_back * row.up_back
                return out
            at_gate = read.before_activation(a, b, r.copy())
            out = slope(a, b, at_gate.copy())
            out *= read.beside_gate(a, b, r)
            out *= row.gate_back
            out += value(a, b, at_gate) * row.up_back
            out *= row.down_back
            return out

        out = entry_by_entry(block, kernel, read.own, empty(len(kernel)), read.root)
        out *= gradient
        return out

    def _read(self, i: int, kernel: FloatArray, own: FloatArray | None) -> _Read:
        """What sublayer i reads, by its correlations."""
        row, found = self.made.at(i), np.diagonal(kernel)
        weight, bias = (row.gate, row.gate_bias) if self.made.gated else (row.up, row.up_bias)
        own = found.copy() if own is None else own
        return _Read(own, inverse_roots(found), float(weight), float(bias), float(row.up), float(row.up_bias))


@dataclass(frozen=True)
class _Read:
    """A Gaussian stream, and maps of it: the one before the activation, and `up` beside it in a gated block.

    Attributes:
        own: variance of every token, (T,). root: what makes correlations of its kernel, on both sides.
        weight, bias, up, up_bias: products of widths and variances.
    """

    own: FloatArray
    root: FloatArray
    weight: float
    bias: float
    up: float
    up_bias: float

    @cached_property
    def variance(self) -> FloatArray:
        """Of pre-activations, (T,)."""
        return self.own * self.weight + self.bias

    @cached_property
    def beside(self) -> FloatArray:
        """Root of the variance of what a gate is multiplied with, but for its bias, (T,)."""
        return np.sqrt(self.own * self.up)

    @cached_property
    def shares(self) -> tuple[FloatArray, FloatArray]:
        """Roots of what the stream and the bias have in `variance`, (T,) each."""
        size = inverse_roots(self.variance)
        return np.sqrt(self.own * self.weight) * size, math.sqrt(self.bias) * size

    def before_activation(self, a: Places, b: Places, r: FloatArray) -> FloatArray:
        """Correlations of pre-activations, of those of the stream, which they replace."""
        if self.bias:
            stream, bias = self.shares
            same = (r == 1) & (stream[a] == stream[b])
            r *= stream[a] * stream[b]
            r += bias[a] * bias[b]
            np.copyto(np.minimum(r, 1.0, out=r), 1.0, where=same)
        return r

    def beside_gate(self, a: Places, b: Places, r: FloatArray) -> FloatArray:
        """Kernel of what a gate is multiplied with."""
        out = self.beside[a] * self.beside[b]
        out *= r
        if self.up_bias:
            out += self.up_bias
        return out


def of(p: Parametrization, stack: int, shapes: Sequence[Any], grid: Any = None) -> FeedForwardKernel:
    """The feed-forward sublayers of a table in one stack: nothing shapes them, and entries need not know of a grid."""
    return FeedForwardKernel(moments_of(p, stack))


on_grid = of

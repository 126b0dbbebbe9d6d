"""Attention with given matrices on token kernels, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from signalprop.kernels.causal_shaping import AttentionShape
from signalprop.network.moments import FloatArray

Product = Callable[[FloatArray], FloatArray]


@dataclass(frozen=True)
class ShapedAttention:
    """What an attention with given matrices does to kernels: K -> mean over heads of A_h K A_h^T (SPA section 2).

    Units as in `signalprop.kernels.causal_attention.TokenAttention`. Exact for infinite width at zero scores (a query
    or key matrix of zeros); scores of other weights are left out.

    Attributes:
        kernel: of the input of values, (T, T). shapes: the matrices, one per kind of head.
        dropout: on attention weights. value_skip, gain: the heads output value_skip V + gain A V.
    """

    kernel: FloatArray
    shapes: tuple[AttentionShape, ...]
    dropout: float = 0.0
    value_skip: float = 0.0
    gain: float = 1.0

    def forward(self) -> FloatArray:
        """Kernel of the heads' output."""
        shapes = self.shapes
        return self._mixed(self.kernel, [s.step for s in shapes], [s.apply for s in shapes], self._squares)

    def backward(self, gradient: FloatArray) -> FloatArray:
        """Gradient kernel at the input from the one at the heads' output: values only, scores send nothing at zero."""
        both, one = [s.step_back for s in self.shapes], [s.apply_transposed for s in self.shapes]
        return self._mixed(gradient, both, one, lambda: self._squares().T)

    def _mixed(
        self, k: FloatArray, both: Sequence[Product], one: Sequence[Product], squares: Callable[[], FloatArray]
    ) -> FloatArray:
        """A kernel through the heads and the value skip, by products from both sides and from one."""
        out = self.gain**2 * _mean(k, both)
        if self.value_skip:
            mixed = _mean(k, one)
            out = out + self.value_skip**2 * k + self.value_skip * self.gain * (mixed + mixed.T)
        if self.dropout:
            dropped = self.gain**2 * self.dropout / (1 - self.dropout)
            np.fill_diagonal(out, np.diagonal(out) + dropped * (squares() @ np.diagonal(k)))
        return np.asarray(out)

    def _squares(self) -> FloatArray:
        """A^2 entry by entry, averaged over heads, (T, T)."""
        n = len(self.kernel)
        return np.asarray(sum((s.matrix(n) ** 2 for s in self.shapes), np.zeros((n, n))) / len(self.shapes))


def _mean(k: FloatArray, products: Sequence[Product]) -> FloatArray:
    return np.asarray(sum((product(k) for product in products), np.zeros_like(k)) / len(products))

"""Attention with given matrices on token kernels, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from signalprop.kernels.shaping import AttentionShape, gradient_step, kernel_step
from signalprop.network.moments import FloatArray


@dataclass(frozen=True)
class ShapedAttention:
    """What an attention with given matrices does to kernels: K -> mean over heads of A_h K A_h^T (SPA section 2).

    Units as in `signalprop.kernels.attention.TokenAttention`. Exact for infinite width at zero scores (a query or key
    matrix of zeros); scores of other weights are left out.

    Attributes:
        kernel: of what the values are made of, (T, T). shapes: the matrices, one per kind of head.
        dropout: on attention weights. value_skip, gain: the heads output value_skip V + gain A V.
    """

    kernel: FloatArray
    shapes: tuple[AttentionShape, ...]
    dropout: float = 0.0
    value_skip: float = 0.0
    gain: float = 1.0

    def forward(self) -> FloatArray:
        """Kernel of the heads' output."""
        k, heads = self.kernel, len(self.shapes)
        out = self.gain**2 / heads * sum((kernel_step(shape, k) for shape in self.shapes), np.zeros_like(k))
        if self.value_skip:
            mixed = sum((shape.apply(k) for shape in self.shapes), np.zeros_like(k)) / heads
            out = out + self.value_skip**2 * k + self.value_skip * self.gain * (mixed + mixed.T)
        if self.dropout:
            own = self._squares() @ np.diagonal(k)
            np.fill_diagonal(out, np.diagonal(out) + self._dropped() * own)
        return np.asarray(out)

    def backward(self, gradient: FloatArray) -> FloatArray:
        """Gradient kernel at the input from the one at the heads' output: values only, scores send nothing at zero."""
        g, heads = gradient, len(self.shapes)
        out = self.gain**2 / heads * sum((gradient_step(shape, g) for shape in self.shapes), np.zeros_like(g))
        if self.value_skip:
            mixed = sum((shape.apply_transposed(g) for shape in self.shapes), np.zeros_like(g)) / heads
            out = out + self.value_skip**2 * g + self.value_skip * self.gain * (mixed + mixed.T)
        if self.dropout:
            own = np.diagonal(g) @ self._squares()
            np.fill_diagonal(out, np.diagonal(out) + self._dropped() * own)
        return np.asarray(out)

    def _dropped(self) -> float:
        return float(self.gain**2 * self.dropout / (1 - self.dropout))

    def _squares(self) -> FloatArray:
        """A^2 entry by entry, averaged over heads, (T, T)."""
        n = len(self.kernel)
        return np.asarray(sum((s.matrix(n) ** 2 for s in self.shapes), np.zeros((n, n))) / len(self.shapes))

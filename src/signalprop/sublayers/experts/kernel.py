"""Token kernels through a mixture of experts: every entry by itself, times the averages of the experts' weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from signalprop.kernels.duals import activated
from signalprop.kernels.latest import Latest
from signalprop.kernels.stack import BranchKernel
from signalprop.kernels.state import normalised
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.experts.moments import held
from signalprop.sublayers.experts.moments import of as moments_of
from signalprop.sublayers.feed_forward.kernel import FeedForwardKernel
from signalprop.theory.routing import Weights, weights


class ExpertsKernel(BranchKernel):
    """The experts of one stack.

    Where the logits of two tokens differ in variance, their weights are those of the geometric mean.
    """

    def __init__(self, p: Parametrization, stack: int, shapes: Sequence[Any], grid: Any = None) -> None:
        self.made = made = moments_of(p, stack)
        self.routed = Latest(self._routed)
        self.expert = FeedForwardKernel(made.expert)
        self.shared = None if made.shared is None else FeedForwardKernel(made.shared)

    def silent(self, i: int) -> bool:
        return self.expert.silent(i) and (self.shared is None or self.shared.silent(i))

    def _routed(self, i: int, kernel: FloatArray) -> Weights:
        logits = np.asarray(self.made.logits(i, (kernel, kernel))[0])
        v = np.diagonal(logits).copy()
        r = np.clip(normalised(logits), -1.0, 1.0) if (v > 0).all() else np.ones_like(logits)
        size = np.sqrt(np.outer(v, v)) if np.ptp(v) > 1e-9 * v.max() else v[:1, None]
        return held(weights(self.made.router, size, r), self.made.by_table(i), self.made.router)

    def shared_experts(self, i: int, kernel: FloatArray) -> FloatArray:
        """How many experts two tokens both choose, (T, T)."""
        return np.asarray(self.routed(i, kernel).shared)

    def _gate(self, i: int, kernel: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(products of the shared feed-forward's gates, of their slopes)."""
        return activated("sigmoid", np.asarray(self.made.logits(i, (kernel, kernel), "shared_router")[0]))

    def forward(self, i: int, kernel: FloatArray) -> FloatArray:
        out = self.expert.forward(i, kernel) * (self.made.scale**2 * np.asarray(self.routed(i, kernel).product))
        if self.shared is None:
            return out
        own = self.shared.forward(i, kernel)
        return out + (own * self._gate(i, kernel)[0] if self.made.gated else own)

    def backward(self, i: int, kernel: FloatArray, gradient: FloatArray) -> FloatArray:
        found, g = self.routed(i, kernel), gradient * self.made.scale**2
        out = self.expert.backward(i, kernel, g * found.product)
        out += g * found.slope * self.expert.forward(i, kernel) * float(self.made.gain("router", i))
        if self.shared is None:
            return out
        if not self.made.gated:
            return np.asarray(out + self.shared.backward(i, kernel, gradient))
        gate, slope = self._gate(i, kernel)
        out += self.shared.backward(i, kernel, gradient * gate)
        out += gradient * slope * self.shared.forward(i, kernel) * float(self.made.gain("shared_router", i))
        return out


of = on_grid = ExpertsKernel

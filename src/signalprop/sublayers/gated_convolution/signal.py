"""What a short causal convolution between two gates does to a signal: `docs/theory/components.md`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.gated_convolution.roles import Settings
from signalprop.theory.signals import Rows, Sent, Signal, Sublayers, linear


@dataclass(frozen=True)
class GatedConvolution(Sublayers):
    """out(after (filter * (before value))) with independent weights of infinite width.

    On a grid the last width - 1 positions send gradients back as if more tokens came.

    Attributes:
        nodes: the positions that are followed (`kernels.nodes.Nodes`); None: one node, of which a token has the taps
            that all have on average.
    """

    p: Parametrization
    nodes: Any = None

    def silent(self, i: int) -> bool:
        return bool(self.p.weights["conv_out"][..., i] == 0) and bool(self.p.biases["conv_out"][..., i] == 0)

    def forward(self, i: Rows, x: Signal, memory: Signal | None = None) -> Signal:
        before, value, after = (self._map(role, i, x) for role in ("conv_before", "conv_value", "conv_after"))
        return self._map("conv_out", i, self._filtered(i, before.times(value)).times(after))

    def backward(self, i: Rows, x: Signal, g: Signal, memory: Signal | None = None) -> Sent:
        before, value, after = (self._map(role, i, x) for role in ("conv_before", "conv_value", "conv_after"))
        g = self._map_back("conv_out", i, g)
        at_taps = self._through_taps(i, g.times(after), ahead=False)
        at_after = self._map_back("conv_after", i, g.times(self._filtered(i, before.times(value))))
        at_before = self._map_back("conv_before", i, at_taps.times(value))
        return Sent(at_after.plus(at_before).plus(self._map_back("conv_value", i, at_taps.times(before))))

    def _gain(self, role: str, i: Rows) -> Any:
        return self.p.architecture.d_model * self.p.weights[role][..., i] ** 2

    def _map(self, role: str, i: Rows, x: Signal) -> Signal:
        return linear(x, self._gain(role, i), self.p.biases[role][..., i] ** 2)

    def _map_back(self, role: str, i: Rows, g: Signal) -> Signal:
        return linear(g, self._gain(role, i))

    def _filtered(self, i: Rows, x: Signal) -> Signal:
        return linear(self._through_taps(i, x, ahead=True), 1.0, self.p.biases["conv_filter"][..., i] ** 2)

    def _through_taps(self, i: Rows, x: Signal, *, ahead: bool) -> Signal:
        """The sum over the taps of what stood so many tokens before, or comes back from so many after."""
        a = self.p.architecture
        width, gain = Settings.of(a).width, self.p.weights["conv_filter"][..., i] ** 2
        if self.nodes is None:
            taps = np.minimum(np.arange(a.seq_len) + 1, width)
            pairs = (np.minimum.outer(taps, taps).sum() - taps.sum()) / max(a.seq_len * (a.seq_len - 1), 1)
            return Signal(float(taps.mean()) * gain * x.per_token, float(pairs) * gain * x.shared)
        moved = [self.nodes.moved(x, k if ahead else -k) for k in range(width)]
        per_token, shared = (np.sum([m[part] for m in moved], axis=0) for part in (0, 1))
        return linear(Signal(per_token, shared), gain)


def of(p: Parametrization, stack: int, nodes: Any = None) -> GatedConvolution:
    """The convolutions of a table; all stacks have the same."""
    return GatedConvolution(p, nodes)

"""Moments through a short causal convolution between two gates: `docs/theory/components.md`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from signalprop.network.moments import Array
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.gated_convolution.roles import Settings
from signalprop.theory.elements import Branch, BranchMoments, Pair, Rowset, Sent, dropped, linear
from signalprop.theory.logs import plain


class Factors(NamedTuple):
    """What is multiplied: the maps of the stream, and what the filter gives; (variance, covariance) each."""

    before: Pair
    value: Pair
    after: Pair
    filtered: Pair


@dataclass(frozen=True)
class GatedConvolution(BranchMoments):
    """out(after (filter * (before value))) with independent weights.

    Attributes:
        reach: taps that a token has on average, and those that two tokens both have.
    """

    p: Parametrization
    reach: tuple[float, float]

    def gain(self, role: str, i: Any) -> Array:
        """d sigma^2 of a square map; sigma^2 of the filter's taps."""
        width = 1 if role == "conv_filter" else self.p.architecture.d_model
        return width * self.p.weights[role][..., i] ** 2

    def bias(self, role: str, i: Any) -> Array:
        """Variance of a bias."""
        return self.p.biases[role][..., i] ** 2

    def factors(self, i: Any, read: Pair) -> Factors:
        """Of sublayer i, from the second moment of what it reads and its correlation."""
        x = (read[0], read[0] * read[1])
        before, value, after = (
            linear(x, self.gain(role, i), self.bias(role, i)) for role in ("conv_before", "conv_value", "conv_after")
        )
        filtered = self.through_taps(i, (before[0] * value[0], before[1] * value[1]))
        bias = self.bias("conv_filter", i)
        return Factors(before, value, after, (filtered[0] + bias, filtered[1] + bias))

    def through_taps(self, i: Any, x: Pair) -> Pair:
        """Forward and back alike: so many taps on average."""
        taps = self.gain("conv_filter", i)
        return self.reach[0] * taps * x[0], self.reach[1] * taps * x[1]

    def forward(self, i: int | Rowset, read: Pair, memory: Pair | None = None) -> Branch:
        f = self.factors(i, read)
        product = (f.filtered[0] * f.after[0], f.filtered[1] * f.after[1])
        out = linear(product, self.gain("conv_out", i), self.bias("conv_out", i))
        variance, covariance = dropped(out, self.p.architecture.dropout)
        return Branch(plain(variance), plain(covariance))

    def backward(self, i: Rowset, read: Pair, memory: Pair | None = None) -> Sent:
        f = self.factors(i, read)
        one = np.ones_like(f.after[0])
        g = linear(dropped((one, one), self.p.architecture.dropout), self.gain("conv_out", i))
        at_taps = self.through_taps(i, (g[0] * f.after[0], g[1] * f.after[1]))
        sent = [
            (self.gain("conv_after", i), g, f.filtered),
            (self.gain("conv_before", i), at_taps, f.value),
            (self.gain("conv_value", i), at_taps, f.before),
        ]
        variance, covariance = (sum(gain * arrived[k] * times[k] for gain, arrived, times in sent) for k in (0, 1))
        return Sent.apart(variance, covariance)


def of(p: Parametrization, stack: int) -> GatedConvolution:
    """The convolutions of a table."""
    taps = np.minimum(np.arange(p.architecture.seq_len) + 1, Settings.of(p.architecture).width)
    pairs = (np.minimum.outer(taps, taps).sum() - taps.sum()) / max(len(taps) * (len(taps) - 1), 1)
    return GatedConvolution(p, (float(taps.mean()), float(pairs)))

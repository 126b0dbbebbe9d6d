"""Moments through gated DeltaNets: those of the rule at equally correlated tokens, `docs/theory/components.md`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.polynomial import chebyshev

from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.gated_delta_net.roles import Settings, settings
from signalprop.sublayers.gated_delta_net.rule import Gains, rule
from signalprop.sublayers.mamba2.moments import each, means
from signalprop.theory.elements import Branch, BranchBackward, Pair, Rowset, Sent, dropped

LONGEST = 64  # tokens that the rule is worked out for here: later tokens count as the mean of these
_NODES, _PER_E = 5, 64  # correlations between which it is interpolated; gains are rounded to e^(1/64)


@dataclass(frozen=True)
class GatedDeltaNet:
    """The gated DeltaNets of a table."""

    p: Parametrization

    def gains(self, i: int, *, back: bool = False) -> Gains:
        """fan_in sigma^2 of every map of sublayer i, `back`: fan_out sigma^2; sigma^2 of the taps."""
        s, d = settings(self.p.architecture), self.p.architecture.d_model
        heads = (s.n_heads, s.n_heads)
        sizes = (s.inner, s.inner, s.shared, s.shared, *heads, 1, d) if back else (d, d, d, d, d, d, 1, s.inner)
        stds = (float(self.p.weights[f"delta_{name}"][i]) for name in Gains._fields)
        return Gains(*(n * std**2 for n, std in zip(sizes, stds, strict=True)))

    def biases(self, i: int) -> Gains:
        """Variance of every bias."""
        return Gains(*(float(self.p.biases[f"delta_{name}"][i]) ** 2 for name in Gains._fields))

    @property
    def uniform(self) -> bool:
        """Whether the taps are drawn so."""
        return self.p.distribution["delta_filter"] == "uniform"

    def through(self, i: int, second: float, r: float) -> FloatArray:
        """(variance, covariance of what the output map reads; vv, vc, cv, cc back to the stream) of sublayer i."""
        read, back = self.gains(i), self.gains(i, back=True)._replace(out=1.0)
        scaled = Gains(*(x * second for x in read))._replace(filter=read.filter, out=1.0)
        length = min(self.p.architecture.seq_len, LONGEST)
        rounded = (_rounded(x) for x in (scaled, self.biases(i)._replace(out=0.0), back))
        coefficients = _table(settings(self.p.architecture), length, self.uniform, *rounded)
        return np.asarray(chebyshev.chebval(1 - 2 * min(max(r, 0.0), 1.0), coefficients))

    def forward(self, i: int | Rowset, read: Pair, memory: Pair | None = None) -> Branch:
        """As `BranchMoments.forward`."""
        p = self.p.architecture.dropout
        made = [self.gains(n).out * self.through(n, v, r)[:2] + self.biases(n).out for n, v, r in each(i, read)]
        variance, covariance = dropped((np.array(made)[:, 0], np.array(made)[:, 1]), p)
        if np.ndim(i) == 0:
            return Branch(float(np.asarray(variance)[0]), float(np.asarray(covariance)[0]))
        return Branch(np.asarray(variance), np.asarray(covariance))

    def backward(self, i: Rowset, read: Pair, memory: Pair | None = None) -> Sent:
        """As `BranchMoments.backward`."""
        kept = 1 / (1 - self.p.architecture.dropout)
        maps = [self.gains(n, back=True).out * self.through(n, v, r)[2:] for n, v, r in each(i, read)]
        vv, vc, cv, cc = np.transpose(maps)
        return Sent(BranchBackward(kept * vv, vc, kept * cv, cc))


def _rounded(gains: Gains) -> Gains:
    return Gains(*(math.exp(round(_PER_E * math.log(x)) / _PER_E) if x > 0 else 0.0 for x in gains))


@lru_cache(maxsize=64)
def _table(s: Settings, length: int, uniform: bool, gains: Gains, biases: Gains, back: Gains) -> FloatArray:
    """Chebyshev coefficients in 1 - 2 r of variance, covariance, vv, vc, cv, cc; (nodes, 6)."""
    nodes = chebyshev.chebpts2(_NODES)
    values = [_at((1 - x) / 2, s, length, uniform, gains, biases, back) for x in nodes]
    return np.asarray(np.linalg.solve(chebyshev.chebvander(nodes, _NODES - 1), np.array(values)))


def _at(
    r: float, s: Settings, length: int, uniform: bool, gains: Gains, biases: Gains, back: Gains
) -> tuple[float, ...]:
    same, one = np.ones((length, length)), np.eye(length)
    made = rule(s, (1 - r) * one + r * same, gains, biases, uniform=uniform)
    alone, both = (means(made.back(g, back)) for g in (one, same))
    return (*means(made.out), alone[0], both[0] - alone[0], alone[1], both[1] - alone[1])


def of(p: Parametrization, stack: int) -> GatedDeltaNet:
    """The gated DeltaNets of a table."""
    return GatedDeltaNet(p)

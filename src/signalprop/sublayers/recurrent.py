"""Moments and token kernels through sublayers that keep a state: what a pass over a token kernel makes of them.

A kind gives the pass (`mamba2/scan.py`, `gated_delta_net/rule.py`): the kernel of what its output map reads, and the
gradient kernel at the stream. Averages are those of the pass at equally correlated tokens: `docs/theory/components.md`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.polynomial import chebyshev

from signalprop.errors import InputError
from signalprop.kernels.stack import BranchKernel
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization, fan
from signalprop.sublayers.recurrent_settings import Recurrent
from signalprop.theory.elements import Branch, BranchBackward, BranchMoments, Pair, Rowset, Sent, dropped

# Tokens that a pass is worked out for in averages: later tokens count as the mean of these. And in kernels, where
# memory and time grow with the square and the cube.
LONGEST, LONGEST_KERNEL = 64, 256
_NODES = 5  # correlations between which averages are interpolated
_PER_E = 4096  # gains are rounded to e^(1 / this): what layers have in common is worked out once


class Made(Protocol):
    """A pass over a token kernel."""

    @property
    def out(self) -> FloatArray:
        """The kernel of what the output map reads, (T, T)."""

    def back(self, g: FloatArray, gains: Any) -> FloatArray:
        """Gradient kernel at the stream, from that at what the output map reads; `gains` with fan_out."""


class Pass(Protocol):
    """Makes a pass over `kernel`, (T, T), of what sublayer `layer` reads. uniform: taps are, else normal."""

    def __call__(
        self, s: Any, kernel: FloatArray, gains: Any, biases: Any, *, uniform: bool, layer: int = 0
    ) -> Made: ...


@dataclass(frozen=True)
class Several:
    """The mean of passes that differ in what is drawn."""

    made: Sequence[Made]

    @property
    def out(self) -> FloatArray:
        return np.asarray(np.mean([one.out for one in self.made], 0))

    def back(self, g: FloatArray, gains: Any) -> FloatArray:
        return np.asarray(np.mean([one.back(g, gains) for one in self.made], 0))


class RecurrentKind(NamedTuple):
    """What is particular to a kind.

    Attributes:
        words: its sublayers, in an error. settings: of the kind. gains: names of its maps, as a NamedTuple.
        run: makes the pass (a `Pass`). per_e: of averages, mean squares that are read are rounded to
            e^(1 / per_e), by the settings.
        draws: passes of which averages are the mean; and token kernels. Small ones are quicker than one large one.
    """

    words: str
    settings: type[Recurrent]
    gains: Any
    run: Any
    per_e: Any = lambda _: 64
    draws: tuple[int, int] = (4, 1)

    def moments(self, p: Parametrization, stack: int) -> RecurrentMoments:
        """The sublayers of a table: `of` of the kind's moments."""
        return RecurrentMoments(p, self)

    def kernels(self, p: Parametrization, stack: int, shapes: Sequence[Any]) -> RecurrentKernel:
        """The same on token kernels: `of` of the kind's kernel."""
        return RecurrentKernel(RecurrentMoments(p, self))


@dataclass(frozen=True)
class RecurrentMoments(BranchMoments):
    """The sublayers of a table of one of these kinds."""

    p: Parametrization
    kind: RecurrentKind

    @property
    def s(self) -> Recurrent:
        """The settings."""
        return self.kind.settings.of(self.p.architecture)

    def gains(self, i: int, *, back: bool = False) -> Any:
        """fan_in sigma^2 of every map of sublayer i, `back`: fan_out sigma^2; sigma^2 of the taps."""
        names = {name: f"{self.s.prefix}_{name}" for name in self.kind.gains._fields}
        sizes = {name: 1 if name == "filter" else fan(self.p.architecture, role)[back] for name, role in names.items()}
        return self.kind.gains(*(sizes[k] * float(self.p.weights[role][i]) ** 2 for k, role in names.items()))

    def biases(self, i: int) -> Any:
        """Variance of every bias."""
        return self.kind.gains(*(float(self.p.biases[f"{self.s.prefix}_{k}"][i]) ** 2 for k in self.kind.gains._fields))

    @property
    def uniform(self) -> bool:
        """Whether the taps are drawn so."""
        return self.p.distribution[f"{self.s.prefix}_filter"] == "uniform"

    def through(self, i: int, second: float, r: float) -> FloatArray:
        """(variance, covariance of what the output map reads; vv, vc, cv, cc back to the stream) of sublayer i."""
        read, back = self.gains(i), self.gains(i, back=True)._replace(out=1.0)
        second = _rounded(second, self.kind.per_e(self.s))
        scaled = self.kind.gains(*(x * second for x in read))._replace(filter=read.filter, out=1.0)
        length, given = min(self.p.architecture.seq_len, LONGEST), (scaled, self.biases(i)._replace(out=0.0), back)
        rounded = (self.kind.gains(*(_rounded(x, _PER_E) for x in gains)) for gains in given)
        coefficients = _table(self.kind.run, self.kind.draws[0], self.s, length, self.uniform, *rounded)
        return np.asarray(chebyshev.chebval(1 - 2 * min(max(r, 0.0), 1.0), coefficients))

    def forward(self, i: int | Rowset, read: Pair, memory: Pair | None = None) -> Branch:
        made = [self.gains(n).out * self.through(n, v, r)[:2] + self.biases(n).out for n, v, r in _each(i, read)]
        variance, covariance = dropped((np.array(made)[:, 0], np.array(made)[:, 1]), self.p.architecture.dropout)
        if np.ndim(i) == 0:
            return Branch(float(np.asarray(variance)[0]), float(np.asarray(covariance)[0]))
        return Branch(np.asarray(variance), np.asarray(covariance))

    def backward(self, i: Rowset, read: Pair, memory: Pair | None = None) -> Sent:
        kept = 1 / (1 - self.p.architecture.dropout)
        maps = [self.gains(n, back=True).out * self.through(n, v, r)[2:] for n, v, r in _each(i, read)]
        vv, vc, cv, cc = np.transpose(maps)
        return Sent(BranchBackward(kept * vv, vc, kept * cv, cc))


@dataclass
class RecurrentKernel(BranchKernel):
    """The same on token kernels."""

    made: RecurrentMoments

    def forward(self, i: int, kernel: FloatArray) -> FloatArray:
        return np.asarray(self.made.gains(i).out * self._pass(i, kernel).out + self.made.biases(i).out)

    def backward(self, i: int, kernel: FloatArray, gradient: FloatArray) -> FloatArray:
        gains = self.made.gains(i, back=True)
        return self._pass(i, kernel).back(gains.out * gradient, gains)

    def _pass(self, i: int, kernel: FloatArray) -> Made:
        made = self.made
        if len(kernel) > LONGEST_KERNEL:
            raise InputError(
                f"token kernels through {made.kind.words} are worked out up to {LONGEST_KERNEL} tokens, these are "
                f"{len(kernel)}; give a smaller seq_len, or predict moments"
            )
        run, n = made.kind.run, made.kind.draws[1]
        given = (made.s, kernel, made.gains(i), made.biases(i))
        return Several([run(*given, uniform=made.uniform, layer=layer) for layer in range(n * i, n * i + n)])


def _each(i: int | Rowset, read: Pair) -> list[tuple[int, float, float]]:
    """(sublayer, mean square, correlation) of so many sublayers."""
    rows = np.atleast_1d(i)
    values = (np.broadcast_to(np.asarray(x, np.float64), rows.shape) for x in read)
    return [(int(n), float(v), float(r)) for n, v, r in zip(rows, *values, strict=True)]


def _rounded(x: float, per_e: int) -> float:
    return math.exp(round(per_e * math.log(x)) / per_e) if x > 0 else 0.0


@lru_cache(maxsize=64)
def _table(
    run: Any, draws: int, s: Recurrent, length: int, uniform: bool, gains: Any, biases: Any, back: Any
) -> FloatArray:
    """Chebyshev coefficients in 1 - 2 r of variance, covariance, vv, vc, cv, cc; (nodes, 6): of that many draws."""
    same, one = np.ones((length, length)), np.eye(length)

    def at(r: float, draw: int) -> tuple[float, ...]:
        made = run(s, (1 - r) * one + r * same, gains, biases, uniform=uniform, layer=draw)
        alone, both = (_means(made.back(g, back)) for g in (one, same))
        return (*_means(made.out), alone[0], both[0] - alone[0], alone[1], both[1] - alone[1])

    nodes = chebyshev.chebpts2(_NODES)
    values = np.mean([[at((1 - x) / 2, draw) for x in nodes] for draw in range(draws)], 0)
    return np.asarray(np.linalg.solve(chebyshev.chebvander(nodes, _NODES - 1), values))


def _means(kernel: FloatArray) -> tuple[float, float]:
    """Of the diagonal, and of the rest."""
    n, trace = len(kernel), float(np.trace(kernel))
    return trace / n, (float(kernel.sum()) - trace) / max(n * (n - 1), 1)

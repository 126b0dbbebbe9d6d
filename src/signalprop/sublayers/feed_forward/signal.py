"""What a feed-forward sublayer does to a signal (TGS Table 2, v1 appendix C; `docs/theory/network.md`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from signalprop.network.moments import Array, FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.theory.log_arithmetic import plain, rows_of
from signalprop.theory.signals import (
    Rows,
    Sent,
    Signal,
    Sublayers,
    activated,
    activated_back,
    linear,
    slope_of_unlike,
)


class Row(NamedTuple):
    """Products of widths and weight variances: of one sublayer, or of several."""

    up: Array  # d_model sigma_up^2
    up_bias: Array
    gate: Array
    gate_bias: Array
    down: Array  # d_ff sigma_down^2
    down_bias: Array
    up_back: Array  # d_ff sigma_up^2
    gate_back: Array
    down_back: Array  # d_model sigma_down^2


@dataclass(frozen=True)
class FeedForward(Sublayers):
    """W_1 -> f -> W_2, or gated (f(x W_g) * (x W_u)) W_d, on Gaussian pre-activations.

    Attributes:
        table: the fields of Row, (9, ..., sublayers). d_model: features that are read.
    """

    table: FloatArray
    gated: bool
    activation: str
    d_model: int

    @cached_property
    def _rows(self) -> list[Row]:
        return rows_of(self.table, Row)

    def at(self, i: Rows) -> Row:
        """The products of sublayer i, or of several."""
        return Row(*self.table[..., i]) if isinstance(i, np.ndarray) else self._rows[i]

    def silent(self, i: int) -> bool:
        row = self.at(i)
        return not (np.any(row.down) or np.any(row.down_bias))

    def forward(self, i: Rows, x: Signal, memory: Signal | None = None) -> Signal:
        row = self.at(i)
        up = linear(x, row.up, row.up_bias)
        if self.gated:
            gate = linear(x, row.gate, row.gate_bias)
            hidden = activated(gate, self.activation).times(up)
            hidden = Signal(hidden.per_token, hidden.shared + self._by_chance(row, x, gate))
        else:
            hidden = activated(up, self.activation)
        return linear(hidden, row.down, row.down_bias)

    def _by_chance(self, row: Row, x: Signal, gate: Signal) -> Array:
        """What two tokens share after a gate by the chance overlap of their vectors, of order 1/d."""
        slope = slope_of_unlike(gate, self.activation)
        width = row.gate * row.up
        if x.has_nodes and np.ndim(slope) == 2:  # of members
            width = np.reshape(width, (-1, 1))
        root = x.per_token * np.sqrt(width * np.maximum(slope, 0.0) / self.d_model)
        return plain(x.of_pairs(root) * (1 - x.cosine() ** 2) ** 2)

    def backward(self, i: Rows, x: Signal, g: Signal, memory: Signal | None = None) -> Sent:
        row = self.at(i)
        at_hidden, up = linear(g, row.down_back), linear(x, row.up, row.up_bias)
        if not self.gated:
            return Sent(linear(activated_back(at_hidden, up, self.activation), row.up_back))
        gate = linear(x, row.gate, row.gate_bias)
        through_up = linear(at_hidden.times(activated(gate, self.activation)), row.up_back)
        through_gate = linear(activated_back(at_hidden.times(up), gate, self.activation), row.gate_back)
        return Sent(through_up.plus(through_gate))


def of(p: Parametrization, stack: int, nodes: Any = None) -> FeedForward:
    """The feed-forward sublayers of a table; they are equal in all stacks."""
    return of_roles(p, ("gate", "up", "down"), p.architecture.d_ff)


def of_roles(p: Parametrization, roles: tuple[str, str, str], width: int) -> FeedForward:
    """Feed-forwards of so many hidden features, whose maps are these `roles`: gate, up, down."""
    a, d = p.architecture, p.architecture.d_model
    (gate, gate_bias), (up, up_bias), (down, down_bias) = ((p.weights[r] ** 2, p.biases[r] ** 2) for r in roles)
    columns = [d * up, up_bias, d * gate, gate_bias, width * down, down_bias, width * up, width * gate, d * down]
    return FeedForward(np.stack(columns), a.gated, a.activation, d)

"""Moments through feed-forward sublayers (TGS Table 2, v1 appendix C; generalised in `docs/theory/network.md`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from signalprop.network.moments import Array, FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.theory.elements import (
    Branch,
    BranchMoments,
    Pair,
    Rowset,
    Sent,
    activated,
    activated_back,
    dropped,
    linear,
)
from signalprop.theory.logs import plain, rows_of


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
class FeedForwardMoments(BranchMoments):
    """W_1 -> f -> W_2 -> dropout, or gated (f(x W_g) * (x W_u)) W_d, on Gaussian pre-activations.

    Attributes:
        table: the fields of Row, (9, ..., sublayers). d_model: features that are read. width: hidden ones.
    """

    table: FloatArray
    gated: bool
    activation: str
    dropout: float
    d_model: int
    width: int

    @cached_property
    def _rows(self) -> list[Row]:
        return rows_of(self.table, Row)

    def at(self, i: int | Rowset) -> Row:
        """The products of sublayer i, or of several."""
        return Row(*self.table[..., i]) if isinstance(i, np.ndarray) else self._rows[i]

    def forward(self, i: int | Rowset, read: Pair, memory: Pair | None = None) -> Branch:
        row, x = self.at(i), (read[0], read[0] * read[1])
        if self.gated:
            one, shared = activated(linear(x, row.gate, row.gate_bias), self.activation)
            up, up_shared = linear(x, row.up, row.up_bias)
            by_chance = plain(self.chance(i, x[0]) ** 2 * (1 - np.minimum(read[1], 1.0) ** 2) ** 2)
            hidden = (one * up, shared * up_shared + by_chance)
        else:
            hidden = activated(linear(x, row.up, row.up_bias), self.activation)
        # a bias is the same for all tokens, and is dropped out as the rest is
        return Branch(*dropped(linear(hidden, row.down, row.down_bias), self.dropout))

    def chance(self, i: int | Rowset, own: Array) -> Array:
        """Root of what two tokens of correlation 0 share in gate times up by their chance overlap, of order 1/d.

        Per token; products of two are to be multiplied with (1 - r^2)^2. docs/theory/network.md.

        Args:
            own: mean square of what is read.
        """
        row = self.at(i)
        gate = linear((own, own), row.gate, row.gate_bias)[0]
        slope = activated_back((1.0, 1.0), (gate, gate * 0.0), self.activation)[1]
        return plain(own * np.sqrt(row.gate * row.up * np.maximum(slope, 0.0) / self.d_model))

    def backward(self, i: Rowset, read: Pair, memory: Pair | None = None) -> Sent:
        row, x = self.at(i), (read[0], read[0] * read[1])
        one = np.ones_like(np.asarray(x[0], float))
        g = linear(dropped((one, one), self.dropout), row.down_back)
        up = linear(x, row.up, row.up_bias)
        if self.gated:
            gate = linear(x, row.gate, row.gate_bias)
            act = activated(gate, self.activation)
            through_up = linear((g[0] * act[0], g[1] * act[1]), row.up_back)
            through_gate = linear(activated_back((g[0] * up[0], g[1] * up[1]), gate, self.activation), row.gate_back)
            v, c = through_up[0] + through_gate[0], through_up[1] + through_gate[1]
        else:
            v, c = linear(activated_back(g, up, self.activation), row.up_back)
        return Sent.apart(v, c)


def of(p: Parametrization, stack: int) -> FeedForwardMoments:
    """The feed-forward sublayers of a table; those of all stacks are alike."""
    return of_roles(p, ("gate", "up", "down"), p.architecture.d_ff, p.architecture.dropout)


def of_roles(p: Parametrization, roles: tuple[str, str, str], width: int, dropout: float) -> FeedForwardMoments:
    """Feed-forwards of so many hidden features, whose maps are these `roles`: gate, up, down."""
    a, d = p.architecture, p.architecture.d_model
    (gate, gate_bias), (up, up_bias), (down, down_bias) = ((p.weights[r] ** 2, p.biases[r] ** 2) for r in roles)
    columns = [d * up, up_bias, d * gate, gate_bias, width * down, down_bias, width * up, width * gate, d * down]
    return FeedForwardMoments(np.stack(columns), a.gated, a.activation, dropout, d, width)

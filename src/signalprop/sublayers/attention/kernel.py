"""Token kernels through self-attention: by softmax of random scores, or by matrices that it is shaped to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from signalprop.kernels.attention import TokenAttention
from signalprop.kernels.duals import activated
from signalprop.kernels.grid import AlikeAttention, Grid, GridAttention
from signalprop.kernels.rows import rotation
from signalprop.kernels.shaped_attention import ShapedAttention
from signalprop.kernels.shaping import Shapes
from signalprop.kernels.stack import BranchKernel
from signalprop.kernels.unmasked import UnmaskedAttention
from signalprop.kernels.windows import windowed
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.attention import roles
from signalprop.sublayers.attention.heads import Row
from signalprop.sublayers.attention.moments import seeing, sights_of
from signalprop.sublayers.attention.roles import FirstValues, Sight, has_gate
from signalprop.theory.attention_variants import capped

Averaging = TokenAttention | ShapedAttention
_EVEN = 1e-4  # how far sizes of tokens may lie apart, over their mean, to count as one


class AttentionKernel(BranchKernel):
    """The self-attention sublayers of one stack.

    Attributes:
        shapes: of every sublayer of the table. grid: on which kernels stand; None: every position has its row.
    """

    def __init__(self, p: Parametrization, stack: int, shapes: Sequence[Shapes], grid: Grid | None = None) -> None:
        self.made, self.a, self.shapes, self.grid = seeing(p, stack, Sight()), p.architecture, shapes, grid
        self.sights = sights_of(p, stack)
        self.has_gate = has_gate(p.architecture)
        self.kept: dict[int, TokenAttention] = {}  # they serve the way back too
        self.first_read: FloatArray = np.zeros(0)  # the kernel that the first of them reads
        self.sent: FloatArray = np.zeros(0)  # what sublayer i sends back to it

    @property
    def values(self) -> FirstValues | None:
        """How they add the values of the first one."""
        return self.made.values

    @property
    def first(self) -> int | None:
        """The row of that one."""
        return self.made.first

    def forward(self, i: int, kernel: FloatArray) -> FloatArray:
        row = self.made.at(i)
        if i == self.first:
            self.first_read = kernel
        out = self._values(i, kernel)[1]
        if self.has_gate:
            out *= self._gate(i, kernel)[0]
        out *= row.output
        if row.output_bias:
            out += row.output_bias
        return out

    def backward(self, i: int, kernel: FloatArray, gradient: FloatArray) -> FloatArray:
        if self.has_gate:
            attention, values = self._values(i, kernel)
            self.kept.pop(i, None)
        elif self.shapes[i]:
            attention = self._shaped(i, kernel)
        else:
            attention = self.kept.pop(i, None) or self._by_scores(i, kernel)[0]
        arrived = gradient
        if self.sink is not None and isinstance(attention, TokenAttention):
            arrived = arrived * _pairs(attention.kept(self.sink))
        if not self.has_gate:
            return self._by_heads(i, attention, arrived, kernel)
        opened, slope = self._gate(i, kernel)
        out = self._by_heads(i, attention, arrived * opened, kernel)
        return np.asarray(out + gradient * values * slope * float(self.made.gate(i).back))

    @property
    def sink(self) -> float | None:
        """The logit of one, where there is one."""
        return self.made.given.sink

    def _by_heads(self, i: int, attention: Averaging, arrived: FloatArray, kernel: FloatArray) -> FloatArray:
        """What the heads send back of a gradient at what they give."""
        row = self.made.at(i)
        divided = self.made.value_size(row, size_of(kernel))
        size = 1.0 if divided is None else float(divided)
        if not isinstance(attention, TokenAttention) or attention.values is None:
            return attention.backward(arrived) * (float(row.back) / size)
        value, scores = attention.backward_apart(arrived)
        own, weight = 1.0, row.back
        if self.values is not None:
            own, weight = float(self.values.own[i]) ** 2, row.output
            begun = self.made.at(self.values.row).value
            self.sent = value * float(row.output * begun * self.values.first[i] ** 2)
        if self.a.qk_norm:
            norms = self._norms(row, kernel)
            scores = scores * _pairs(norms**-0.5) * norms.mean()
        return np.asarray((value * float(row.back * own) + scores * float(weight)) / size)

    def _values(self, i: int, kernel: FloatArray) -> tuple[Averaging, FloatArray]:
        """A sublayer's attention, and the kernel of what its heads give before a gate."""
        row = self.made.at(i)
        if self.shapes[i]:  # rows of D A do not sum to 1: a bias is mixed as values are
            shaped = self._shaped(i, kernel * row.value + row.value_bias)
            return shaped, shaped.forward()
        attention, size = self._by_scores(i, kernel)
        if self.keeps:
            self.kept[i] = attention
        values = attention.forward()
        if self.values is None:
            values *= size * row.value
            if row.value_bias:
                values += row.value_bias * (row.value_skip + row.attention_gain) ** 2
        else:
            values *= size
            values += row.value_bias * self.values.own[i] ** 2
            values += self.made.at(self.values.row).value_bias * self.values.first[i] ** 2
        divided = self.made.value_size(row, size_of(kernel))
        if divided is not None:
            values /= divided
        if self.sink is not None and isinstance(attention, TokenAttention):
            values *= _pairs(attention.kept(self.sink))
        return attention, values

    def _gate(self, i: int, kernel: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Kernels of a gate and of its slope."""
        gate = self.made.gate(i)
        return activated("sigmoid", kernel * float(gate.weight) + float(gate.bias))

    def _by_scores(self, i: int, kernel: FloatArray) -> tuple[TokenAttention, float]:
        """A sublayer's attention, and the factor on its forward kernel.

        QK-norm takes the size of every token out of the scores, not out of the values.
        """
        row, size, read = self.made.at(i), 1.0, kernel
        if self.a.qk_norm:
            norms = self._norms(row, kernel)
            size = float(norms.mean())
            read = kernel / size
            kernel = kernel * _pairs(norms**-0.5) if np.ptp(norms) > _EVEN * size else read
        fields: dict[str, Any] = {
            "qk": self._qk(row, kernel),
            "d_model": self.a.d_model,
            "dropout": self.a.attention_dropout or 0.0,
            "query_bias": float(row.query_bias) / size,
            "value_skip": float(row.value_skip),
            "gain": float(row.attention_gain),
            "d_head": self.a.d_head,
            "one_length": self.made.one_length,
            "norms": self.made.norms,
        }
        if self.values is not None:
            begun = self.made.at(self.values.row).value * self.values.first[i] ** 2 / size
            fields["values"] = read * (row.value * self.values.own[i] ** 2) + self.first_read * begun
        elif kernel is not read:
            fields["values"] = read
        (window, base), a = self.sights.at(i), self.a
        rho, omega = None, None
        if base:
            causal = self.made.causal or window > 0
            rho, omega = rotation(self.made.n_keys, a.d_head, base, a.rotary_fraction, causal)
        if window:
            return windowed(kernel, window, rho, omega, causal=self.made.causal, **fields), size
        turn = self.grid.rotated(a.d_head, base, a.rotary_fraction) if self.grid and base else None
        return self._placed(kernel, rho, omega, turn, fields), size

    def _placed(
        self,
        kernel: FloatArray,
        rho: FloatArray | None,
        omega: FloatArray | None,
        turn: FloatArray | None,
        fields: dict[str, Any],
    ) -> TokenAttention:
        """Attention of all positions, by `rho`, or of those of the grid, by `turn`."""
        if self.grid is None:
            made = TokenAttention if self.made.causal else UnmaskedAttention
            return made(kernel=kernel, rho=rho, omega=omega, **fields)
        off, own = self.grid.split(kernel)
        if "values" in fields:
            fields["values"], fields["value_own"] = self.grid.split(fields["values"])
        if omega is not None:
            fields |= {"turn": turn, "omega": omega[self.grid.positions]}
        on_grid = GridAttention if self.made.causal else AlikeAttention
        return on_grid(kernel=off, own=own, grid=self.grid, **fields)

    def _norms(self, row: Row, kernel: FloatArray) -> FloatArray:
        """What QK-norm divides every token's kernel by, epsilon and all: the geometric mean of queries and keys."""
        own, eps = np.diagonal(kernel), self.made.norm_eps
        query, key = (own + float(x) for x in (row.query_bias + _over(eps, row.query), _over(eps, row.key)))
        return np.asarray(np.maximum(np.sqrt(query * key), 1e-150))

    def _qk(self, row: Row, kernel: FloatArray) -> float:
        """Score variance on an input of second moment 1; capped as it is on this one."""
        qk, cap = float(row.qk), self.made.given.score_cap
        if cap is None or qk == 0:
            return qk
        own = max(size_of(kernel), 1e-150)
        raw = qk * (own + float(row.query_bias)) * own
        return qk * float(capped(raw, cap)) / raw

    def _shaped(self, i: int, kernel: FloatArray) -> ShapedAttention:
        row = self.made.at(i)
        return ShapedAttention(
            kernel=kernel,
            shapes=self.shapes[i],
            dropout=self.a.attention_dropout or 0.0,
            value_skip=float(row.value_skip),
            gain=float(row.attention_gain),
        )


def _over(eps: float, gain: Any) -> float:
    """Epsilon in units of what a token has; of a map of zeros, nothing passes."""
    return eps / float(gain) if gain > 0 else 1e150


def size_of(kernel: FloatArray) -> float:
    return float(np.diagonal(kernel).mean())


def _pairs(per_row: FloatArray) -> FloatArray:
    return np.outer(per_row, per_row)


of = on_grid = AttentionKernel


def has_window(p: Parametrization) -> bool:
    """Whether some layer of a table sees less than what came before."""
    return roles.has_window(p.architecture)

"""The heads of self-attention on n nodes: by softmax of random scores, or by matrices that it is shaped to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from signalprop.kernels.bidirectional_attention import UnmaskedAttention
from signalprop.kernels.causal_attention import TokenAttention
from signalprop.kernels.nodes import Nodes
from signalprop.kernels.position_grid import AlikeAttention, GridAttention
from signalprop.kernels.shaped_attention import ShapedAttention
from signalprop.network.moments import Array, FloatArray
from signalprop.sublayers.attention.heads import Row
from signalprop.theory.attention_variants import capped
from signalprop.theory.signals import Signal, linear

_EVEN = 1e-4  # how far sizes of tokens may lie from their mean, over it, to count as one
Turned = tuple[FloatArray | None, FloatArray | None, FloatArray | None]


@dataclass
class Softmax:
    """`Averages` by scores of random queries and keys.

    Attributes:
        attention: of a kernel divided by `size`, which QK-norm takes out of the scores, not out of the values.
        passes: what is left of a value that all tokens share. norms: by which QK-norm divides each token's kernel,
            where sizes differ; else None.
    """

    attention: TokenAttention
    nodes: Nodes
    size: float
    passes: float
    norms: FloatArray | None = None

    def forward(self, gain: Array, bias: Array) -> Signal:
        return linear(self.nodes.signal(self.attention.forward()), self.size * gain, bias * self.passes**2)

    def backward(self, g: Signal) -> Signal:
        arrived = self.nodes.matrix(g)
        if self.norms is None:
            return self.nodes.signal(self.attention.backward(arrived))
        value, scores = self.attention.backward_apart(arrived)
        return self.nodes.signal(value + scores * np.outer(self.norms**-0.5, self.norms**-0.5) * self.norms.mean())

    def beside_sink(self, sink: float) -> Signal:
        share = self.attention.share_beside_sink(sink)
        return self.nodes.signal(np.outer(share, share))


@dataclass
class Shaped:
    """`Averages` by given matrices, whose rows do not sum to 1: a bias is mixed as values are."""

    x: Signal
    nodes: Nodes
    fields: dict[str, Any]

    def forward(self, gain: Array, bias: Array) -> Signal:
        values = self.nodes.matrix(linear(self.x, gain, bias))
        return self.nodes.signal(ShapedAttention(kernel=values, **self.fields).forward())

    def backward(self, g: Signal) -> Signal:
        kernel = self.nodes.matrix(self.x)
        return self.nodes.signal(ShapedAttention(kernel=kernel, **self.fields).backward(self.nodes.matrix(g)))

    def beside_sink(self, sink: float) -> None:
        return None


def placed(nodes: Nodes, kernel: FloatArray, turned: Turned, fields: dict[str, Any], *, causal: bool) -> Any:
    """Attention of all positions, by rho and omega of `rotation`; or of a grid's, by omega and mean cosines."""
    rho, omega, turn = turned
    grid = nodes.grid
    if grid is None:
        return (TokenAttention if causal else UnmaskedAttention)(kernel=kernel, rho=rho, omega=omega, **fields)
    off, per_token = grid.split(kernel)
    if "values" in fields:
        fields["values"], fields["value_per_token"] = grid.split(fields["values"])
    if omega is not None:
        fields |= {"turn": turn, "omega": omega[grid.positions]}
    return (GridAttention if causal else AlikeAttention)(kernel=off, per_token=per_token, grid=grid, **fields)


class Normed(NamedTuple):
    """The input of scores where QK-norm divides each token's kernel.

    Attributes:
        size: mean divisor. kernel: divided token by token. values: divided by `size` alone. norms: divisors; None where
            all tokens have the same.
    """

    size: float
    kernel: FloatArray
    values: FloatArray
    norms: FloatArray | None


def normed(row: Row, kernel: FloatArray, eps: float) -> Normed:
    """By the geometric mean of what queries and keys are divided by, epsilon and all."""
    per_token = np.diagonal(kernel)
    query, key = (per_token + float(x) for x in (row.query_bias + _over(eps, row.query), _over(eps, row.key)))
    norms = np.asarray(np.maximum(np.sqrt(query * key), 1e-150))
    size = float(norms.mean())
    if np.allclose(norms, size, rtol=_EVEN, atol=0.0):
        return Normed(size, kernel / size, kernel / size, None)
    return Normed(size, kernel * np.outer(norms**-0.5, norms**-0.5), kernel / size, norms)


def of_tokens(column: Array) -> Array:
    """A number, or one for each member as it multiplies their tokens, (members, 1)."""
    return column[:, None] if isinstance(column, np.ndarray) else float(column)


def score_variance(row: Row, kernel: FloatArray, cap: float | None) -> Array:
    """Score variance on an input of second moment 1; capped as it is on this one."""
    if cap is None:
        return of_tokens(row.qk)
    qk = float(row.qk)
    if qk == 0:
        return qk
    per_token = max(float(np.diagonal(kernel).mean()), 1e-150)
    raw = qk * (per_token + float(row.query_bias)) * per_token
    return qk * float(capped(raw, cap)) / raw


def _over(eps: float, gain: Any) -> float:
    """Epsilon in units of what a token has; of a map of zeros, nothing passes."""
    return eps / float(gain) if gain > 0 else 1e150

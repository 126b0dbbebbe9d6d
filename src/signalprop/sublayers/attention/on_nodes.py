"""The heads of self-attention on n nodes: by softmax of random scores, or by matrices that it is shaped to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from signalprop.kernels.causal_attention import TokenAttention
from signalprop.kernels.nodes import Nodes
from signalprop.kernels.position_grid import AlikeAttention, GridAttention
from signalprop.network.moments import Array, FloatArray
from signalprop.network.products import pairs
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
    size: float
    passes: float
    norms: FloatArray | None = None

    def forward(self, gain: Array, bias: Array) -> Signal:
        return linear(self.attention.output(), self.size * gain, bias * self.passes**2)

    def backward(self, g: Signal) -> Signal:
        if self.norms is None:
            return self.attention.sent(g)
        value, scores = self.attention.sent_apart(g)
        return value.plus(scores.times(_of_factors(self.norms**-0.5 * self.norms.mean() ** 0.5)))

    def beside_sink(self, sink: float) -> Signal:
        return _of_factors(self.attention.share_beside_sink(sink))


@dataclass
class Shaped:
    """`Averages` by given matrices, whose rows do not sum to 1: a bias is mixed as values are."""

    x: Signal
    nodes: Nodes
    fields: dict[str, Any]

    def _of(self, read: Signal) -> Any:
        from signalprop.kernels.shaped_attention import ShapedAttention

        return ShapedAttention(kernel=self.nodes.matrix(read), **self.fields)

    def forward(self, gain: Array, bias: Array) -> Signal:
        return self.nodes.signal(self._of(linear(self.x, gain, bias)).forward())

    def backward(self, g: Signal) -> Signal:
        return self.nodes.signal(self._of(self.x).backward(self.nodes.matrix(g)))

    def beside_sink(self, sink: float) -> None:
        return None


def _of_factors(per_token: FloatArray) -> Signal:
    """What a factor for every token multiplies a kernel by."""
    return Signal(per_token**2, pairs(per_token, per_token))


def placed(nodes: Nodes, read: Signal, turned: Turned, fields: dict[str, Any], *, causal: bool) -> Any:
    """Attention of all positions, by rho and omega of `rotation`; or of a grid's, by omega and mean cosines."""
    rho, omega, turn = turned
    grid = nodes.grid
    if grid is None:
        from signalprop.kernels.bidirectional_attention import UnmaskedAttention

        return (TokenAttention if causal else UnmaskedAttention)(kernel=read.matrix(), rho=rho, omega=omega, **fields)
    if omega is not None:
        fields |= {"turn": turn, "omega": omega[grid.positions]}
    made = GridAttention if causal else AlikeAttention
    return made(kernel=np.atleast_2d(read.shared), per_token=np.atleast_1d(read.per_token), grid=grid, **fields)


class Normed(NamedTuple):
    """The input of scores where QK-norm divides each token's kernel.

    Attributes:
        size: mean divisor. read: divided token by token. values: divided by `size` alone. norms: divisors; None where
            all tokens have the same.
    """

    size: float
    read: Signal
    values: Signal
    norms: FloatArray | None


def normed(row: Row, x: Signal, eps: float) -> Normed:
    """By the geometric mean of what queries and keys are divided by, epsilon and all."""
    query, key = (x.per_token + float(y) for y in (row.query_bias + _over(eps, row.query), _over(eps, row.key)))
    norms = np.asarray(np.maximum(np.sqrt(query * key), 1e-150))
    size = float(norms.mean())
    values = linear(x, 1 / size)
    if np.abs(norms - size).max() <= _EVEN * size:
        return Normed(size, values, values, None)
    return Normed(size, x.times(_of_factors(norms**-0.5)), values, norms)


def of_tokens(column: Array) -> Array:
    """A number, or one for each member as it multiplies their tokens, (members, 1)."""
    return column[:, None] if isinstance(column, np.ndarray) else float(column)


def score_variance(row: Row, per_token: Array, cap: float | None) -> Array:
    """Score variance on an input of second moment 1; capped as it is on this one."""
    if cap is None:
        return of_tokens(row.qk)
    qk = float(row.qk)
    if qk == 0:
        return qk
    mean = max(float(np.mean(per_token)), 1e-150)
    raw = qk * (mean + float(row.query_bias)) * mean
    return qk * float(capped(raw, cap)) / raw


def _over(eps: float, gain: Any) -> float:
    """Epsilon in units of what a token has; of a map of zeros, nothing passes."""
    return eps / float(gain) if gain > 0 else 1e150

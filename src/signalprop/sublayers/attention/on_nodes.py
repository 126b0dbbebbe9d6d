"""The heads of self-attention on n nodes: by softmax of random scores, or by matrices that it is shaped to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from signalprop.kernels.attention import TokenAttention
from signalprop.kernels.grid import AlikeAttention, GridAttention
from signalprop.kernels.nodes import Nodes
from signalprop.kernels.rows import rotation
from signalprop.kernels.shaped_attention import ShapedAttention
from signalprop.kernels.unmasked import UnmaskedAttention
from signalprop.kernels.windows import windowed
from signalprop.network.moments import Array, FloatArray
from signalprop.sublayers.attention.heads import Row
from signalprop.sublayers.attention.roles import Sight
from signalprop.theory.attention_variants import capped
from signalprop.theory.elements import Signal, linear

if TYPE_CHECKING:
    from signalprop.sublayers.attention.signal import SelfAttention

_EVEN = 1e-4  # how far sizes of tokens may lie apart, over their mean, to count as one


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
        share = self.attention.kept(sink)
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


def heads_of(made: SelfAttention, i: int, row: Row, x: Signal) -> Softmax | Shaped:
    """Those of sublayer i, which reads x."""
    nodes = made.nodes
    assert isinstance(nodes, Nodes)
    skip, gain = float(row.value_skip), float(row.attention_gain)
    if nodes.shapes[i]:
        fields = {"shapes": nodes.shapes[i], "dropout": made.attention_dropout, "value_skip": skip, "gain": gain}
        return Shaped(x, nodes, fields)
    return _by_scores(made, nodes, i, row, x)


def _by_scores(made: SelfAttention, nodes: Nodes, i: int, row: Row, x: Signal) -> Softmax:
    read = kernel = nodes.matrix(x)
    size, norms = 1.0, None
    if made.qk_norm:
        norms = _norms(made, row, kernel)
        size = float(norms.mean())
        read = kernel / size
        uneven = np.ptp(norms) > _EVEN * size
        kernel = kernel * np.outer(norms**-0.5, norms**-0.5) if uneven else read
        norms = norms if uneven else None
    fields: dict[str, Any] = {
        "qk": _score(made, row, kernel),
        "d_model": made.d_model,
        "dropout": made.attention_dropout,
        "query_bias": float(row.query_bias) / size,
        "value_skip": float(row.value_skip),
        "gain": float(row.attention_gain),
        "d_head": made.d_head,
        "one_length": made.one_length,
        "norms": made.norms,
    }
    if kernel is not read:
        fields["values"] = read
    passes = float(row.value_skip + row.attention_gain)
    return Softmax(_seeing(made, nodes, made.sights.at(i), kernel, fields), nodes, size, passes, norms)


def _seeing(made: SelfAttention, nodes: Nodes, seen: Sight, kernel: FloatArray, fields: dict[str, Any]) -> Any:
    window, base = seen
    share, n = made.rotary_fraction, made.n_keys
    rho, omega = rotation(n, made.d_head, base, share, bool(made.causal) or window > 0) if base else (None, None)
    if window:
        return windowed(kernel, window, rho, omega, causal=bool(made.causal), **fields)
    turn = nodes.grid.rotated(made.d_head, base, share) if nodes.grid and base else None
    return placed(made, nodes, kernel, (rho, omega, turn), fields)


Turned = tuple[FloatArray | None, FloatArray | None, FloatArray | None]


def placed(made: SelfAttention, nodes: Nodes, kernel: FloatArray, turned: Turned, fields: dict[str, Any]) -> Any:
    """Attention of all positions, by rho and omega of `rotation`; or of a grid's, by omega and mean cosines."""
    rho, omega, turn = turned
    grid = nodes.grid
    if grid is None:
        return (TokenAttention if made.causal else UnmaskedAttention)(kernel=kernel, rho=rho, omega=omega, **fields)
    off, own = grid.split(kernel)
    if "values" in fields:
        fields["values"], fields["value_own"] = grid.split(fields["values"])
    if omega is not None:
        fields |= {"turn": turn, "omega": omega[grid.positions]}
    return (GridAttention if made.causal else AlikeAttention)(kernel=off, own=own, grid=grid, **fields)


def _norms(made: SelfAttention, row: Row, kernel: FloatArray) -> FloatArray:
    """What QK-norm divides every token's kernel by, epsilon and all: the geometric mean of queries and keys."""
    own, eps = np.diagonal(kernel), made.norm_eps
    query, key = (own + float(x) for x in (row.query_bias + _over(eps, row.query), _over(eps, row.key)))
    return np.asarray(np.maximum(np.sqrt(query * key), 1e-150))


def _score(made: SelfAttention, row: Row, kernel: FloatArray) -> float:
    """Score variance on an input of second moment 1; capped as it is on this one."""
    qk, cap = float(row.qk), made.given.score_cap
    if cap is None or qk == 0:
        return qk
    own = max(float(np.diagonal(kernel).mean()), 1e-150)
    raw = qk * (own + float(row.query_bias)) * own
    return qk * float(capped(raw, cap)) / raw


def _over(eps: float, gain: Any) -> float:
    """Epsilon in units of what a token has; of a map of zeros, nothing passes."""
    return eps / float(gain) if gain > 0 else 1e150

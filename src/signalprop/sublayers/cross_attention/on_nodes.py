"""The heads of cross-attention on n nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from signalprop.kernels.cross_attention import GridCrossAttention, TokenCrossAttention
from signalprop.kernels.nodes import Nodes
from signalprop.sublayers.attention.heads import Row
from signalprop.sublayers.attention.signal import size_of
from signalprop.theory.elements import Signal, linear

if TYPE_CHECKING:
    from signalprop.sublayers.cross_attention.signal import CrossAttention


class Scaled(NamedTuple):
    """Heads, and the sizes by which QK-norm divided what their queries and keys are made of."""

    attention: TokenCrossAttention | GridCrossAttention
    nodes: Nodes
    asks: float
    memory: float

    def forward(self) -> Signal:
        """In units of values' d_model sigma_v^2."""
        return linear(self.nodes.signal(self.attention.forward()), self.memory)

    def backward(self, g: Signal) -> tuple[Signal, Signal]:
        """At the queries' stream, and at the encoder's output."""
        to_queries, to_keys = self.attention.backward_to_both(self.nodes.matrix(g))
        return linear(self.nodes.signal(to_queries), self.memory / self.asks), self.nodes.memory_signal(to_keys)


def heads_of(made: CrossAttention, row: Row, x: Signal, memory: Signal) -> Scaled:
    """Of queries that read x, and an encoder's output."""
    nodes = made.nodes
    assert isinstance(nodes, Nodes)
    sizes = [float(size_of(y)) or 1.0 if made.qk_norm else 1.0 for y in (x, memory)]
    asks, keys = (linear(y, 1 / size) if size != 1 else y for y, size in zip((x, memory), sizes, strict=True))
    fields: dict[str, Any] = {
        "qk": float(made.scores(row, *sizes)[0] if made.qk_norm else row.qk),
        "d_model": made.d_model,
        "dropout": made.attention_dropout,
        "query_bias": float(row.query_bias),
        "d_head": made.d_head,
        "one_length": made.one_length,
        "norms": made.norms,
    }
    if nodes.grid is None:
        found = TokenCrossAttention(kernel=nodes.memory_matrix(keys), asks=nodes.matrix(asks), **fields)
        return Scaled(found, nodes, *sizes)
    assert nodes.memory is not None
    on: dict[str, Any] = {"kernel": keys.shared, "own": keys.own, "asks": asks.shared, "asks_own": asks.own}
    return Scaled(GridCrossAttention(grid=nodes.memory, queries=nodes.grid, **on, **fields), nodes, *sizes)

"""What attention to the encoder's output does to a signal, forward, and back to both streams."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from signalprop.errors import InputError
from signalprop.network.kinds import rows_where
from signalprop.network.moments import Array
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.attention.heads import Heads, Row, mixes, settings, table_of
from signalprop.sublayers.attention.signal import size_of
from signalprop.theory import attention
from signalprop.theory.signals import Rows, Sent, Signal, linear


class OneNode(NamedTuple):
    """Heads between equivalent tokens.

    Attributes:
        read: the input of queries and keys, of second moment 1. ratio: second moment of the latter over the former.
    """

    read: attention.Attention
    ratio: Array

    def forward(self) -> Signal:
        """In units of the encoder's second moment."""
        return Signal(*attention.forward(self.read))

    def backward(self, g: Signal) -> tuple[Signal, Signal]:
        """At the queries' stream, and at the encoder's output."""
        query, key = attention.backward_apart(self.read._replace(r_g=g.shared / np.maximum(g.per_token, 1e-300)))
        return linear((query[0] * g.per_token, query[1] * g.per_token), self.ratio), Signal(
            key[0] * g.per_token, key[1] * g.per_token
        )


@dataclass(frozen=True)
class CrossAttention(Heads):
    """Attention of a stream to the encoder's output."""

    sizes: attention.Sizes = field(kw_only=True)

    def forward(self, i: Rows, x: Signal, memory: Signal | None = None) -> Signal:
        assert memory is not None
        row, squared = self.at(i), self.at(i).attention_gain ** 2
        averaged = linear(self._heads(i, row, x, memory).forward(), size_of(memory) if self.nodes is None else 1.0)
        values = linear(averaged, row.value * squared, row.value_bias * squared)
        return linear(values, row.output, row.output_bias)

    def backward(self, i: Rows, x: Signal, g: Signal, memory: Signal | None = None) -> Sent:
        """To the query stream and to the encoder's output."""
        assert memory is not None
        row = self.at(i)
        averages = self.attentions.pop(i, None) if isinstance(i, int) else None
        to_queries, to_keys = (averages or self._heads(i, row, x, memory)).backward(g)
        back = row.back * row.attention_gain**2
        return Sent(linear(to_queries, back), linear(to_keys, back))

    def _heads(self, i: Rows, row: Row, x: Signal, memory: Signal) -> Any:
        if self.nodes is None:
            s0, bias = self.scores(row, x.per_token, memory.per_token)
            # the paths fall with the query's second moment: 0 stays 0
            read = self.sizes.across(x.cosine(), memory.cosine(), s0, query_bias=bias)
            return OneNode(read, memory.per_token / np.maximum(x.per_token, 1e-200))
        heads = self._on_nodes(row, x, memory)
        if self.nodes.caches:
            self.attentions[int(i)] = heads
        return heads

    def _on_nodes(self, row: Row, x: Signal, memory: Signal) -> Any:
        from signalprop.kernels.cross_attention import GridCrossAttention, TokenCrossAttention
        from signalprop.sublayers.cross_attention.on_nodes import Scaled

        nodes = self.nodes
        sizes = [float(size_of(y)) or 1.0 if self.qk_norm else 1.0 for y in (x, memory)]
        asks, keys = (linear(y, 1 / size) if size != 1 else y for y, size in zip((x, memory), sizes, strict=True))
        fields: dict[str, Any] = {
            "qk": float(self.scores(row, *sizes)[0] if self.qk_norm else row.qk),
            "d_model": self.d_model,
            "dropout": self.attention_dropout,
            "query_bias": float(row.query_bias),
        }
        if nodes.grid is None:
            found = TokenCrossAttention(kernel=nodes.memory_matrix(keys), asks=nodes.matrix(asks), **fields)
            return Scaled(found, nodes, *sizes)
        on: dict[str, Any] = {
            "kernel": keys.shared,
            "per_token": keys.per_token,
            "asks": asks.shared,
            "asks_per_token": asks.per_token,
        }
        return Scaled(GridCrossAttention(grid=nodes.memory, queries=nodes.grid, **on, **fields), nodes, *sizes)


def of(p: Parametrization, stack: int, nodes: Any = None) -> CrossAttention:
    """The cross-attention sublayers of a table."""
    a = p.architecture
    if (p.value_skip[..., rows_where(p, lambda kind: kind.reads_memory)] != 0).any():
        raise InputError("value_skip of a cross-attention is not 0; expected 0 there, where a query has no value")
    fields = settings(a, stack) | {"n_keys": a.seq_len, "causal": False}
    sizes = attention.Sizes(fields["n_queries"], a.seq_len, a.d_model, fields["attention_dropout"])
    return CrossAttention(table_of(p), mixes(p), **fields, nodes=nodes, sizes=sizes)

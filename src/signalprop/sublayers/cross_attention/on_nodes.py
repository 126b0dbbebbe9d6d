"""The heads of cross-attention on n nodes."""

from __future__ import annotations

from typing import NamedTuple

from signalprop.kernels.cross_attention import GridCrossAttention, TokenCrossAttention
from signalprop.kernels.nodes import Nodes
from signalprop.theory.signals import Signal, linear


class Scaled(NamedTuple):
    """Heads, and the sizes by which QK-norm divided the input of their queries and keys."""

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

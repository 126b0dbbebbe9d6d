"""Moments through attention to the encoder's output, forward and back to both streams."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from signalprop.errors import InputError
from signalprop.network.kinds import rows_where
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.attention.heads import Heads, Row, mixes, settings, table_of
from signalprop.theory import attention
from signalprop.theory.elements import Branch, BranchBackward, Pair, Rowset, Sent


class CrossAttention(Heads):
    """Attention of a stream to the encoder's output."""

    def forward(self, i: int | Rowset, read: Pair, memory: Pair | None = None) -> Branch:
        assert memory is not None
        row = self.at(i)
        averaged = attention.forward(self._read(row, read, memory))
        squared = row.attention_gain**2
        return self.output(row, self.averages(row, memory[0], (squared * averaged[0], squared * averaged[1])))

    def backward(self, i: Rowset, read: Pair, memory: Pair | None = None) -> Sent:
        """To the query stream and to the encoder's output."""
        assert memory is not None
        row = self.at(i)
        x = self._read(row, read, memory)
        ends = [attention.backward_apart(x._replace(r_g=r_g)) for r_g in (0.0, 1.0)]
        # both paths are in units of d_v sigma_v^2 on inputs of second moment 1: dS/dx carries the other stream's scale
        to_query = self.from_ends(row, ends[0][0], ends[1][0])
        to_key = self.from_ends(row, ends[0][1], ends[1][1])
        scale = memory[0] / np.maximum(read[0], 1e-200)  # the paths fall with the query's second moment: 0 stays 0
        squared = row.attention_gain**2
        return Sent(
            BranchBackward(*(np.asarray(column * scale * squared) for column in to_query)),
            BranchBackward(*(np.asarray(column * squared) for column in to_key)),
        )

    @cached_property
    def sizes(self) -> attention.Sizes:
        """What the formulas of one set of heads take of them."""
        sizes = self.n_queries, self.n_keys, self.d_model, self.d_head, self.attention_dropout
        return attention.Sizes(*sizes, one_length=self.one_length, norms=self.norms)

    def _read(self, row: Row, read: Pair, memory: Pair) -> attention.Attention:
        s0, bias = self.scores(row, read[0], memory[0])
        return self.sizes.across(read[1], memory[1], s0, query_bias=bias)


def of(p: Parametrization, stack: int) -> CrossAttention:
    """The cross-attention sublayers of a table."""
    a = p.architecture
    if (p.value_skip[..., rows_where(p, lambda kind: kind.reads_memory)] != 0).any():
        raise InputError(
            "value_skip of a cross-attention is not 0; expected 0 there, where a query has no value of its own"
        )
    fields = settings(a, stack) | {"n_keys": a.seq_len, "causal": False}
    return CrossAttention(table_of(p), mixes(p), **fields)

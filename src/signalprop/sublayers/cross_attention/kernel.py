"""Token kernels through attention to the encoder's output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from signalprop.kernels.cross_attention import GridCrossAttention, TokenCrossAttention
from signalprop.kernels.grid import Grid
from signalprop.kernels.shaping import Shapes
from signalprop.kernels.stack import BranchKernel
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.cross_attention.moments import of as moments_of


class _Scaled(NamedTuple):
    """An attention, and the sizes by which QK-norm divided what its queries and keys are made of."""

    attention: TokenCrossAttention | GridCrossAttention
    asks: float
    memory: float


class CrossAttentionKernel(BranchKernel):
    """The cross-attention sublayers of a decoder.

    Attributes:
        memory: kernel of the encoder's output, (S, S). alike: its grid, where the decoder has one, `grid`.
        sent: gradient kernel at the memory, of the last `backward`.
    """

    def __init__(self, p: Parametrization, stack: int, shapes: Sequence[Shapes], grid: Grid | None = None) -> None:
        self.made, self.grid = moments_of(p, stack), grid
        self.alike: Grid | None = None
        self.memory: FloatArray = np.empty((0, 0))
        self.kept: dict[int, _Scaled] = {}  # as in self-attention
        self.sent: FloatArray = np.empty((0, 0))

    def forward(self, i: int, kernel: FloatArray) -> FloatArray:
        row, at = self.made.at(i), self._at(i, kernel)
        if self.keeps:
            self.kept[i] = at
        values = at.attention.forward() * (at.memory * row.value) + row.value_bias * row.attention_gain**2
        return np.asarray(values * row.output + row.output_bias)

    def backward(self, i: int, kernel: FloatArray, gradient: FloatArray) -> FloatArray:
        """What goes to the memory is left in `sent`."""
        row, at = self.made.at(i), self.kept.pop(i, None) or self._at(i, kernel)
        to_queries, to_keys = at.attention.backward_to_both(gradient)
        self.sent = to_keys * float(row.back)
        return to_queries * (float(row.back) * at.memory / at.asks)

    def _at(self, i: int, kernel: FloatArray) -> _Scaled:
        made, row = self.made, self.made.at(i)
        sizes = [float(np.diagonal(k).mean()) or 1.0 if made.qk_norm else 1.0 for k in (kernel, self.memory)]
        fields: dict[str, Any] = {"kernel": self.memory / sizes[1], "asks": kernel / sizes[0]}
        made_as: type[TokenCrossAttention | GridCrossAttention] = TokenCrossAttention
        if self.grid is not None and self.alike is not None:
            made_as = GridCrossAttention
            fields["kernel"], fields["own"] = self.alike.split(fields["kernel"])
            fields["asks"], fields["asks_own"] = self.grid.split(fields["asks"])
            fields |= {"grid": self.alike, "queries": self.grid}
        attention = made_as(
            qk=float(made.scores(row, *sizes)[0] if made.qk_norm else row.qk),
            d_model=made.d_model,
            dropout=made.attention_dropout,
            query_bias=float(row.query_bias),
            gain=float(row.attention_gain),
            d_head=made.d_head,
            one_length=made.one_length,
            norms=made.norms,
            **fields,
        )
        return _Scaled(attention, *sizes)


of = on_grid = CrossAttentionKernel

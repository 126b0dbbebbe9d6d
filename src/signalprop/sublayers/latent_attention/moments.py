"""Moments through latent attention: ordinary attention with other score variances, values and rotations.

docs/theory/attention.md, "Latent attention".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from signalprop.errors import InputError
from signalprop.network.moments import Array, FloatArray, ratio
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.attention.heads import Row, mixes, settings
from signalprop.sublayers.attention.moments import SelfAttention
from signalprop.sublayers.latent_attention.roles import Settings
from signalprop.theory import attention_scores
from signalprop.theory.elements import (
    Branch,
    BranchBackward,
    Pair,
    Rowset,
    Sent,
    inner_correlation,
    through_inner_norm,
)
from signalprop.theory.one_length import NO_NORMS


class Scores(NamedTuple):
    """What scores are made of, of an input of second moment 1."""

    query: Array  # of a query's entry, before what a norm leaves of it
    query_latent: Array  # before its norm; 0 without one
    key: Array  # d_nope scale^2 times the variance of a key's own entries
    shared: Array  # d_rotary scale^2 d_model sigma_down^2, of the entries that all heads share
    latent: Array  # of the latent, before its norm


@dataclass(frozen=True)
class LatentAttention(SelfAttention):
    """The latent attention of one stack.

    Attributes:
        parts: the fields of Scores, (5, ..., sublayers). coherence: `rotary` and `rotary_rows` of what rotates.
        widths: of the stream, and of the latent.
    """

    parts: FloatArray | None = None
    coherence: tuple[float, float] = (1.0, 1.0)
    widths: tuple[int, int] = (1, 1)

    def aligned(self, r: Array) -> Array:
        """Correlation of two latents after their norm, over r, that of the tokens they are mapped from."""
        return inner_correlation(r, self.widths[1])

    def sent_back(self, r: Array) -> Array:
        """What the norm on latents does to the gradient at two tokens of correlation r, of one token where r = 1."""
        return through_inner_norm(r, *self.widths)

    def of_scores(self, i: Any, second: Array) -> tuple[Array, Array]:
        """(variance of a score, the share of it that rotates)."""
        assert self.parts is not None
        x = Scores(*self.parts[..., i])
        latent = ratio(x.latent * second, x.latent * second + self.norm_eps)
        before = ratio(x.query_latent * second, x.query_latent * second + self.norm_eps)
        query = x.query * np.where(np.asarray(x.query_latent) > 0, before, second)
        own, shared = query * x.key * latent, query * x.shared * second
        return own + shared, ratio(shared, own + shared)

    def scores(self, row: Row, second_query: Array, second_key: Array) -> tuple[Array, Array]:
        """As `Heads.scores`; `at_row` has put the variance where it is read."""
        return row.qk, 0.0

    def value_size(self, row: Row, second: Array) -> Array:
        """What the norm divides the latent by, in units of the input's second moment."""
        return second + row.key

    def turned(self, i: int | Rowset, second: Array) -> LatentAttention:
        """Sublayers i alone, in rows 0, 1, ..., with score variances, and rotations, of that second moment."""
        s0, share = self.of_scores(i, second)
        rows = np.atleast_1d(i)
        table = self.table[..., rows]
        table[0] = np.reshape(s0, table[0].shape)
        kept = tuple(1 - share * (1 - one) for one in self.coherence)
        turned: dict[str, Any] = {"rotary": kept[0], "rotary_rows": kept[1]}
        return replace(self, table=table, **turned)

    def forward(self, i: int | Rowset, read: Pair, memory: Pair | None = None) -> Branch:
        rows = np.arange(len(i)) if isinstance(i, np.ndarray) else 0
        return SelfAttention.forward(self.turned(i, read[0]), rows, (read[0], read[1] * self.aligned(read[1])))

    def backward(self, i: Rowset, read: Pair, memory: Pair | None = None) -> Sent:
        aligned, rows = (read[0], read[1] * self.aligned(read[1])), np.arange(len(i))
        back = SelfAttention.backward(self.turned(i, read[0]), rows, aligned).stream
        own, both = self.sent_back(np.ones_like(back.vv)), self.sent_back(read[1])
        return Sent(BranchBackward(back.vv * own, back.vc * own, back.cv * both, back.cc * both))


def of(p: Parametrization, stack: int) -> LatentAttention:
    """The latent attention of a table."""
    a, s = p.architecture, Settings.of(p.architecture)
    if p.shaping.kind != "none" or a.positions == "alibi" or mixes(p):
        raise InputError("latent attention is not shaped, and has no value_skip or attention_gain; leave them out")
    w = {role: x**2 for role, x in p.weights.items()}
    d, zero, own = a.d_model, np.zeros_like(p.score_scale), a.d_head - s.d_rotary
    scale, latent, inner = p.score_scale**2, d * w["latent_down"], a.n_heads * s.d_value
    value = s.rank * w["latent_up"]
    added = np.divide(s.eps_in(a), latent, out=zero.copy(), where=latent > 0)
    rows = Row(
        zero, zero, value, zero, inner * w["latent_output"], zero,
        inner * w["latent_output"] * value, zero, zero + 1.0, zero, added,
    )  # fmt: skip
    query = (s.query_rank or d) * w["latent_query"]
    before = d * w["latent_query_down"] if s.query_rank else zero
    parts = Scores(query, before, own * scale * value, s.d_rotary * scale * latent, latent)
    fields = settings(a, stack) | {"d_model": 1 / (1 / d + 1 / s.rank), "norm_eps": s.eps_in(a)}
    fields |= {"one_length": False, "norms": NO_NORMS}
    coherence = (1.0, 1.0)
    if a.positions == "rotary":
        turned = (fields["n_queries"], s.d_rotary, a.rotary_base, 1.0)
        plain = attention_scores.rotary_coherence(*turned)
        by = [attention_scores.rotary_coherence(*turned, causal=how) for how in ("pairs", "rows")]
        coherence = (by[0], by[1]) if fields["causal"] else (plain, plain)
    return LatentAttention(
        np.stack(rows), False, **fields, parts=np.stack(parts), coherence=coherence, widths=(d, s.rank)
    )

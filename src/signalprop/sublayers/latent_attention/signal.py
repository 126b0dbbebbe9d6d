"""What latent attention does to a signal: ordinary attention with other score variances, values and rotations.

docs/theory/attention.md, "Latent attention".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from signalprop.errors import InputError
from signalprop.network.moments import Array, FloatArray, ratio
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.attention.heads import Row, mixes, settings
from signalprop.sublayers.attention.roles import Sight, Sights
from signalprop.sublayers.attention.signal import OneNode, SelfAttention, size_of
from signalprop.sublayers.latent_attention.roles import Settings
from signalprop.theory import attention, attention_scores
from signalprop.theory.log_arithmetic import plain
from signalprop.theory.signals import Rows, Sent, Signal, inner_correlation, linear, through_inner_norm


class Scores(NamedTuple):
    """The input of scores, for an input of second moment 1."""

    query: Array  # of a query's entry, before what a norm leaves of it
    query_latent: Array  # before its norm; 0 without one
    key: Array  # d_nope scale^2 times the variance of the entries of a key
    shared: Array  # d_rotary scale^2 d_model sigma_down^2, of the entries that all heads share
    latent: Array  # of the latent, before its norm


@dataclass(frozen=True)
class LatentAttention(SelfAttention):
    """The latent attention of one stack: scores of one size, of which a share rotates.

    Attributes:
        parts: the fields of Scores, (5, ..., sublayers). rotation: features of a head that rotate, and the base of
            their frequencies; base 0: none. widths: of the stream, and of the latent.
    """

    parts: FloatArray = field(kw_only=True)
    rotation: tuple[int, float] = (1, 0.0)
    widths: tuple[int, int] = (1, 1)

    def aligned(self, x: Signal) -> Signal:
        """What latents are after their norm, of the tokens that they are mapped from; values count in its units."""
        return Signal(x.per_token, x.shared * inner_correlation(x.cosine(), self.widths[1]))

    def forward(self, i: Rows, x: Signal, memory: Signal | None = None) -> Signal:
        return super().forward(i, self.aligned(x))

    def backward(self, i: Rows, x: Signal, g: Signal, memory: Signal | None = None) -> Sent:
        sent = super().backward(i, self.aligned(x), g).stream
        per_token, shared = (through_inner_norm(r, *self.widths) for r in (np.ones_like(x.per_token), x.cosine()))
        return Sent(Signal(sent.per_token * per_token, sent.shared * shared))

    def of_scores(self, i: Rows, second: Array) -> tuple[Array, Array]:
        """(variance of a score, the share of it that rotates)."""
        x = Scores(*(plain(column) for column in self.parts[..., i]))
        latent = ratio(x.latent * second, x.latent * second + self.norm_eps)
        before = ratio(x.query_latent * second, x.query_latent * second + self.norm_eps)
        query = x.query * np.where(np.asarray(x.query_latent) > 0, before, second)
        per_token, shared = query * x.key * latent, query * x.shared * second
        return per_token + shared, ratio(shared, per_token + shared)

    def _normed(self, row: Row, x: Signal) -> Array:
        """What the norm on latents multiplies, in units of the input's second moment."""
        return ratio(1.0, size_of(x) + row.key)

    def _on_one_node(self, i: Rows, row: Row, x: Signal) -> OneNode:
        s0, share = self.of_scores(i, x.per_token)
        (sizes,) = self.sizes.values()
        omega, omega_rows = (1 - share * (1 - one) for one in (sizes.omega, sizes.omega_rows))
        turned = attention.Sizes(
            sizes.n_queries, sizes.n_keys, sizes.d, sizes.p, causal=sizes.causal, omega=omega, omega_rows=omega_rows
        )  # fmt: skip
        return OneNode(turned.on_itself(x.cosine(), s0), x.per_token, None)

    def _on_nodes(self, i: int, row: Row, x: Signal) -> Any:
        from signalprop.kernels.softmax_rows import rotation
        from signalprop.sublayers.attention.on_nodes import Softmax, placed

        nodes, (rotated, base) = self.nodes, self.rotation
        size = float(size_of(x)) or 1.0
        s0, share = (float(y) for y in self.of_scores(i, size))
        fields: dict[str, Any] = {"qk": s0, "d_model": self.d_model, "dropout": self.attention_dropout}
        rho = omega = turn = None
        if base:
            rho, omega = (1 - share * (1 - y) for y in rotation(self.n_keys, rotated, base, 1.0, bool(self.causal)))
            turn = None if nodes.grid is None else 1 - share * (1 - nodes.grid.rotated(rotated, base, 1.0))
        placing = placed(nodes, linear(x, 1 / size), (rho, omega, turn), fields, causal=bool(self.causal))
        return Softmax(placing, size, 1.0)


def of(p: Parametrization, stack: int, nodes: Any = None) -> LatentAttention:
    """The latent attention of a table."""
    a, s = p.architecture, Settings.of(p.architecture)
    if p.shaping.kind != "none" or a.positions == "alibi" or mixes(p):
        raise InputError("latent attention is not shaped, and has no value_skip or attention_gain; leave them out")
    w = {role: x**2 for role, x in p.weights.items()}
    d, zero, per_token = a.d_model, np.zeros_like(p.score_scale), a.d_head - s.d_rotary
    scale, latent, inner = p.score_scale**2, d * w["latent_down"], a.n_heads * s.d_value
    value = s.rank * w["latent_up"]
    added = np.divide(s.eps_in(a), latent, out=zero.copy(), where=latent > 0)
    rows = Row(
        zero, zero, value, zero, inner * w["latent_output"], zero,
        inner * w["latent_output"] * value, zero, zero + 1.0, zero, added,
    )  # fmt: skip
    query = (s.query_rank or d) * w["latent_query"]
    before = d * w["latent_query_down"] if s.query_rank else zero
    parts = Scores(query, before, per_token * scale * value, s.d_rotary * scale * latent, latent)
    fields = settings(a, stack) | {"d_model": 1 / (1 / d + 1 / s.rank), "norm_eps": s.eps_in(a)}
    n = fields["n_queries"]
    turns: dict[str, Any] = {}
    if a.positions == "rotary":
        by = ("pairs", "rows") if fields["causal"] else (None, None)
        turned = [attention_scores.rotary_coherence(n, s.d_rotary, a.rotary_base, 1.0, causal=how) for how in by]
        turns = dict(zip(("omega", "omega_rows"), turned, strict=True))
    sizes = attention.Sizes(n, n, fields["d_model"], fields["attention_dropout"], causal=fields["causal"], **turns)
    sees = Sight()
    return LatentAttention(
        np.stack(rows), False, **fields, nodes=nodes, sights=Sights((sees,), p.layer), sizes={sees: sizes},
        parts=np.stack(parts), rotation=(s.d_rotary, a.rotary_base if turns else 0.0), widths=(d, s.rank),
    )  # fmt: skip

"""Moments through a mixture of experts (derivations: `docs/theory/experts.md`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from signalprop.network.moments import Array
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.experts.roles import Settings, width
from signalprop.sublayers.feed_forward.moments import FeedForwardMoments, Row, of_roles
from signalprop.theory.elements import (
    Branch,
    BranchMoments,
    Pair,
    Rowset,
    Sent,
    activated,
    activated_back,
    dropped,
    linear,
)
from signalprop.theory.logs import correlation, plain
from signalprop.theory.routing import Router, Weights, load_variation, weights


@dataclass(frozen=True)
class ExpertsMoments(BranchMoments):
    """scale * sum_e w_e(x) f_e(x), plus the feed-forward that all tokens share.

    Attributes:
        expert, shared: one expert; the shared feed-forward, None where there is none. Neither drops anything out.
        router: how tokens choose. scale: factor on what the chosen give. gated: the shared one has a gate of its own.
        hashed: as in the Settings.
    """

    p: Parametrization
    expert: FeedForwardMoments
    shared: FeedForwardMoments | None
    router: Router
    scale: float
    gated: bool
    hashed: int = 0

    def by_table(self, i: Any) -> Any:
        """Whether a table of ids, all zeros, chooses the experts of sublayer i, or of several."""
        return self.p.layer[i] < self.hashed

    def gain(self, role: str, i: Any) -> Array:
        """d sigma^2 of a map that reads the stream."""
        return self.p.architecture.d_model * self.p.weights[role][..., i] ** 2

    def logits(self, i: Any, x: Pair, role: str = "router") -> Pair:
        """The logits of two tokens, or what the shared feed-forward's gate reads (`shared_router`)."""
        return linear(x, self.gain(role, i), self.p.biases[role][..., i] ** 2)

    def routed(self, i: Any, x: Pair) -> tuple[Weights, Weights]:
        """Averages of the weights: of one token, and of two."""
        v, c = self.logits(i, x)
        r = np.where(np.asarray(v) > 0, correlation(c, v), 1.0)  # equal logits choose the same experts
        return tuple(held(weights(self.router, v, x), self.by_table(i), self.router) for x in (1.0, r))  # type: ignore

    def load_variation(self, i: Any, read: Pair) -> Array:
        """Of the loads of experts over their mean, in one sequence."""
        _, two = self.routed(i, (read[0], read[0] * read[1]))
        return load_variation(self.router, two.shared, self.p.architecture.seq_len)

    def forward(self, i: int | Rowset, read: Pair, memory: Pair | None = None) -> Branch:
        x = (read[0], read[0] * read[1])
        one, two = self.routed(i, x)
        f, s2 = self.expert.forward(i, read), self.scale**2
        out: Pair = (s2 * one.product * f.variance, s2 * two.product * f.covariance)
        if self.shared is not None:
            own = self.shared.forward(i, read)
            gate = self.gate(i, x)
            out = (out[0] + gate[0] * own.variance, out[1] + gate[1] * own.covariance)
        return Branch(*dropped(out, self.p.architecture.dropout))

    def gate(self, i: Any, x: Pair) -> Pair:
        """Of the shared feed-forward; 1 where it has none."""
        return activated(self.logits(i, x, "shared_router"), "sigmoid") if self.gated else (1.0, 1.0)

    def backward(self, i: Rowset, read: Pair, memory: Pair | None = None) -> Sent:
        """Through the chosen experts, and through the weights that they have."""
        x = (read[0], read[0] * read[1])
        one, two = self.routed(i, x)
        ones = np.ones_like(np.asarray(x[0], float))
        g = dropped((ones, ones), self.p.architecture.dropout)
        s2, f, inside = self.scale**2, self.expert.forward(i, read), self.expert.backward(i, read).stream
        slope = self.gain("router", i)
        v = g[0] * s2 * (one.product * inside.vv + slope * one.slope * f.variance)
        c = g[1] * s2 * (two.product * inside.cc + slope * two.slope * f.covariance)
        if self.shared is not None:
            own, inside, gate = self.shared.forward(i, read), self.shared.backward(i, read).stream, self.gate(i, x)
            v, c = v + g[0] * gate[0] * inside.vv, c + g[1] * gate[1] * inside.cc
            if self.gated:
                at_gate = (g[0] * own.variance, g[1] * own.covariance)
                sent = activated_back(at_gate, self.logits(i, x, "shared_router"), "sigmoid")
                back = self.gain("shared_router", i)
                v, c = v + back * sent[0], c + back * sent[1]
        return Sent.apart(v, c)


def held(found: Weights, by_table: Any, router: Router) -> Weights:
    """The averages, where a table of zeros chooses those of one expert."""
    if not np.any(by_table):
        return found
    one = (1.0, 0.0, float(router.top_k**2))  # both tokens choose it so many times
    return Weights(*(plain(np.where(by_table, x, y)) for x, y in zip(one, found, strict=True)))


def of(p: Parametrization, stack: int) -> ExpertsMoments:
    """The experts of a table; those of all stacks are alike."""
    a, s = p.architecture, Settings.of(p.architecture)
    roles = ("shared_gate", "shared_up", "shared_down")
    expert = of_roles(p, ("expert_gate", "expert_up", "expert_down"), width(a), 0.0)
    if a.gated:
        expert.table[Row._fields.index("up_bias")] += s.up_shift**2  # as a bias: the same for all tokens
    return ExpertsMoments(
        p,
        expert,
        of_roles(p, roles, s.shared_width, 0.0) if s.shared_width else None,
        Router(s.n_experts, s.top_k, s.scores, s.normalised, s.n_groups, s.top_groups),
        s.scale,
        s.shared_gated,
        s.hashed,
    )

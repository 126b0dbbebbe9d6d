"""What a mixture of experts does to a signal (derivations: `docs/theory/components.md`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from signalprop.network.moments import Array
from signalprop.network.parametrization import Parametrization
from signalprop.network.products import pairs
from signalprop.sublayers.experts.roles import Settings, width
from signalprop.sublayers.feed_forward.signal import FeedForward, Row, of_roles
from signalprop.theory.log_arithmetic import plain
from signalprop.theory.routing import Router, Weights, load_variation, weights
from signalprop.theory.signals import Rows, Sent, Signal, Sublayers, activated, activated_back, linear

_ONE_SIZE = 1e-9  # how far variances of logits may lie apart, over the largest, to count as one


@dataclass(frozen=True)
class Experts(Sublayers):
    """scale * sum_e w_e(x) f_e(x), plus the feed-forward that all tokens share.

    Where the logits of two tokens differ in variance, their weights are those of the geometric mean.

    Attributes:
        expert, shared: one expert; the shared feed-forward, None if there is none.
        router: how tokens choose. scale: factor on what the chosen give. gated: the shared one has a gate.
        hashed: as in the Settings.
    """

    p: Parametrization
    expert: FeedForward
    shared: FeedForward | None
    router: Router
    scale: float
    gated: bool
    hashed: int = 0

    def silent(self, i: int) -> bool:
        return self.expert.silent(i) and (self.shared is None or self.shared.silent(i))

    def _gain(self, role: str, i: Rows) -> Array:
        """d sigma^2 of a map that reads the stream."""
        return plain(self.p.architecture.d_model * self.p.weights[role][..., i] ** 2)

    def _logits(self, i: Rows, x: Signal, role: str = "router") -> Signal:
        """The router's logits, or what the shared feed-forward's gate reads (`shared_router`)."""
        return linear(x, self._gain(role, i), plain(self.p.biases[role][..., i] ** 2))

    def routed(self, i: Rows, x: Signal) -> tuple[Weights, Weights]:
        """Averages of the weights: of one token, and of two."""
        logits = self._logits(i, x)
        size, per_token = logits.per_token, np.asarray(logits.per_token)
        if logits.has_nodes:
            r = logits.cosine() if (per_token > 0).all() else np.ones_like(logits.shared)
            if np.ptp(per_token) <= _ONE_SIZE * per_token.max():
                size = per_token = per_token[:1]
            else:
                size = pairs(np.sqrt(per_token), np.sqrt(per_token))
        else:
            r = np.where(per_token > 0, logits.cosine(), 1.0)  # equal logits choose the same experts
        found = weights(self.router, per_token, 1.0), weights(self.router, size, r)
        if not self.hashed:
            return found
        return tuple(_by_table(one, self.p.layer[i] < self.hashed, self.router) for one in found)  # type: ignore

    def load_variation(self, i: Rows, x: Signal) -> Array:
        """Of the loads of experts over their mean, in one sequence of equivalent tokens."""
        return load_variation(self.router, self.routed(i, x)[1].shared, self.p.architecture.seq_len)

    def forward(self, i: Rows, x: Signal, memory: Signal | None = None) -> Signal:
        one, two = self.routed(i, x)
        out = linear(self.expert.forward(i, x).times(Signal(one.product, two.product)), self.scale**2)
        if self.shared is None:
            return out
        every = self.shared.forward(i, x)
        return out.plus(every.times(self._gate(i, x)) if self.gated else every)

    def _gate(self, i: Rows, x: Signal) -> Signal:
        """Of the shared feed-forward."""
        return activated(self._logits(i, x, "shared_router"), "sigmoid")

    def backward(self, i: Rows, x: Signal, g: Signal, memory: Signal | None = None) -> Sent:
        """Through the chosen experts, and through the weights that they have."""
        one, two = self.routed(i, x)
        at_experts = linear(g, self.scale**2)
        out = self.expert.backward(i, x, at_experts.times(Signal(one.product, two.product))).stream
        at_logits = at_experts.times(Signal(one.slope, two.slope)).times(self.expert.forward(i, x))
        out = out.plus(linear(at_logits, self._gain("router", i)))
        if self.shared is None:
            return Sent(out)
        if not self.gated:
            return Sent(out.plus(self.shared.backward(i, x, g).stream))
        out = out.plus(self.shared.backward(i, x, g.times(self._gate(i, x))).stream)
        at_gate = activated_back(g.times(self.shared.forward(i, x)), self._logits(i, x, "shared_router"), "sigmoid")
        return Sent(out.plus(linear(at_gate, self._gain("shared_router", i))))


def _by_table(found: Weights, chosen: Any, router: Router) -> Weights:
    """The averages, where a table of zeros chooses those of one expert."""
    if not np.any(chosen):
        return found
    one = (1.0, 0.0, float(router.top_k**2))  # both tokens choose it so many times
    return Weights(*(plain(np.where(chosen, x, y)) for x, y in zip(one, found, strict=True)))


def of(p: Parametrization, stack: int, nodes: Any = None) -> Experts:
    """The experts of a table; they are equal in all stacks."""
    a, s = p.architecture, Settings.of(p.architecture)
    roles = ("shared_gate", "shared_up", "shared_down")
    expert = of_roles(p, ("expert_gate", "expert_up", "expert_down"), width(a))
    if a.gated:
        expert.table[Row._fields.index("up_bias")] += s.up_shift**2  # as a bias: the same for all tokens
    return Experts(
        p,
        expert,
        of_roles(p, roles, s.shared_width) if s.shared_width else None,
        Router(s.n_experts, s.top_k, s.scores, s.normalised, s.n_groups, s.top_groups),
        s.scale,
        s.shared_gated,
        s.hashed,
    )

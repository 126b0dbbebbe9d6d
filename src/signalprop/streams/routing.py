"""Which experts a token has, by the logits of its router: the rule of models that are built and of those replayed."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from signalprop.streams.replay import split_features


class Rule(Protocol):
    """How experts are chosen; `sublayers.experts.roles.Settings` explains each."""

    @property
    def scores(self) -> str: ...
    @property
    def top_k(self) -> int: ...
    @property
    def normalised(self) -> bool: ...
    @property
    def n_groups(self) -> int: ...
    @property
    def top_groups(self) -> int: ...


def choose(logits: Tensor, rule: Rule, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Weights and indices of the experts of every token, each (tokens, k).

    Args:
        logits: (tokens, experts). correction: (experts), added to the scores for the choice alone.
    """
    scores = logits.softmax(-1) if rule.scores == "softmax" else logits.sigmoid()
    allowed = scores.detach() if correction is None else scores.detach() + correction
    if rule.n_groups > 1:
        grouped = split_features(allowed, rule.n_groups)
        good = grouped.topk(2 if rule.scores == "sigmoid" else 1, -1).values.sum(-1)
        closed = good.new_ones(good.shape).scatter(-1, good.topk(rule.top_groups, -1).indices, 0).bool()
        allowed = grouped.masked_fill(closed[..., None], float("-inf")).flatten(-2)
    index = allowed.topk(rule.top_k, -1).indices
    weight = scores.gather(-1, index)
    return weight / weight.sum(-1, keepdim=True) if rule.normalised else weight, index

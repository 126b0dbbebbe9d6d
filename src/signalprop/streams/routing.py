"""Which experts a token has, by the logits of its router: the rule of models that are built and of those replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from signalprop.streams.replay import split_features

_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: nn.functional.softplus(logits).sqrt(),
}


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
    scores = _SCORES[rule.scores](logits)
    allowed = scores.detach() if correction is None else scores.detach() + correction
    if rule.n_groups > 1:
        grouped = split_features(allowed, rule.n_groups)
        good = grouped.topk(1 if rule.scores == "softmax" else 2, -1).values.sum(-1)
        closed = good.new_ones(good.shape).scatter(-1, good.topk(rule.top_groups, -1).indices, 0).bool()
        allowed = grouped.masked_fill(closed[..., None], float("-inf")).flatten(-2)
    index = allowed.topk(rule.top_k, -1).indices
    weight = scores.gather(-1, index)
    return weight / weight.sum(-1, keepdim=True) if rule.normalised else weight, index

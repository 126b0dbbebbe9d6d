"""The optimizer of a recipe, on the parameter groups that the network's scheme asks for; its learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from signalprop_lab.training.recipe import Recipe, Schedule

Group = dict[str, Any]


def make_optimizer(groups: list[Group], recipe: Recipe) -> torch.optim.Optimizer:
    """The optimizer of a recipe on parameter groups."""
    o = recipe.optimizer
    if o.name == "sgd":
        return torch.optim.SGD(groups, lr=o.learning_rate, momentum=o.betas[0])
    plain = all(
        p.device.type in ("cpu", "cuda") and type(p) in (nn.Parameter, Tensor) for g in groups for p in g["params"]
    )
    numbers: dict[str, Any] = {"betas": o.betas, "eps": o.eps, "fused": plain or None}
    if o.name == "muon":
        return MuonWithAdamW(groups, **numbers)
    kind: Any = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[o.name]
    made: torch.optim.Optimizer = kind(groups, lr=o.learning_rate, **numbers)
    return made


class MuonWithAdamW(torch.optim.Optimizer):
    """torch.optim.Muon on the groups with `use_muon` (momentum .95, Nesterov), AdamW on the others: one optimizer.

    Muon is for matrices alone (Jordan et al. 2024), so that vectors, embeddings and the head need another rule beside
    it. Both keep their state in this one's, which is saved, loaded and scheduled as a single optimizer's.
    """

    def __init__(self, groups: Sequence[Group], **adamw: Any) -> None:
        """groups: each with `lr`, `weight_decay` and `use_muon`. adamw: AdamW's `betas`, `eps` and `fused`."""
        kinds: dict[bool, Callable[[list[Group]], torch.optim.Optimizer]] = {
            True: torch.optim.Muon,
            False: lambda mine: torch.optim.AdamW(mine, **adamw),
        }
        self._parts = {by_muon: kind(mine) for by_muon, kind in kinds.items() if (mine := _of(groups, by_muon=by_muon))}
        super().__init__([group for part in self._parts.values() for group in part.param_groups], {})

    def step(self, closure: Any = None) -> Any:
        """Both do a step."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for by_muon, part in self._parts.items():
            part.param_groups, part.state = _of(self.param_groups, by_muon=by_muon), self.state
            part.step()
        return loss


def _of(groups: Sequence[Group], *, by_muon: bool) -> list[Group]:
    return [group for group in groups if group["use_muon"] is by_muon]


def rate_factor(step: int, steps: int, schedule: Schedule) -> float:
    """Share of the peak learning rate at a step (from 0).

    Warm-up is linear and reaches the peak after its last step; cosine, linear and wsd end at `final` after the last
    step, wsd in a straight line over the last `decay` of the steps.
    """
    warmup = schedule.warmup if schedule.warmup >= 1 else round(schedule.warmup * steps)
    if step < warmup:
        return (step + 1) / warmup
    if schedule.kind == "wsd":
        falling = round(schedule.decay * steps)
        return schedule.final + (1 - schedule.final) * min(1.0, max(steps - step, 0) / falling)
    passed = (step - warmup) / max(steps - warmup, 1)
    if schedule.kind == "cosine":
        return schedule.final + (1 - schedule.final) * 0.5 * (1 + math.cos(math.pi * min(passed, 1.0)))
    if schedule.kind == "linear":
        return schedule.final + (1 - schedule.final) * (1 - min(passed, 1.0))
    if schedule.kind == "inverse-sqrt":
        return math.sqrt(max(warmup, 1) / (step + 1))
    return 1.0

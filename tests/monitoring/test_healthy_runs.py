"""Ten healthy runs are told nothing of; docs/monitoring.md's table of them is written by SIGNALPROP_WRITE_DOCS=1."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from monitored import batches, gpt2, llama
from signalprop.errors import InputError
from signalprop.monitoring import SignalMonitor
from signalprop.monitoring.processes import EveryRank

RECORD = Path(__file__).parents[2] / "records" / "healthy-runs.md"


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023 (arXiv:2302.06675), algorithm 2."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                update = (0.9 * momentum + 0.1 * p.grad).sign()
                momentum.mul_(0.99).add_(p.grad, alpha=0.01)
                p.mul_(1 - 0.1 * group["lr"]).add_(update, alpha=-group["lr"])


def optimizers(name: str, model: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    if name == "adamw":
        return [torch.optim.AdamW(model.parameters(), lr=lr)]
    if name == "lion":
        return [Lion(model.parameters(), lr)]
    inner = {n for n, p in model.named_parameters() if p.ndim == 2 and (".h." in n or "layers" in n)}
    parts = [[p for n, p in model.named_parameters() if (n in inner) is matrix] for matrix in (True, False)]
    return [torch.optim.Muon(parts[0], lr=lr), torch.optim.AdamW(parts[1], lr=3e-3)]


def mixtral(n_layers: int) -> nn.Module:
    return llama(n_layers, experts=4)


HEALTHY: dict[str, tuple[Callable[[int], nn.Module], str, float, int]] = {
    "GPT-2, AdamW 1e-3": (gpt2, "adamw", 1e-3, 0),
    "GPT-2, AdamW 3e-3, warm-up": (gpt2, "adamw", 3e-3, 20),
    "Llama, AdamW 1e-3, warm-up": (llama, "adamw", 1e-3, 20),
    "Llama, AdamW 3e-3": (llama, "adamw", 3e-3, 0),
    "GPT-2, Muon 0.02": (gpt2, "muon", 0.02, 0),
    "Llama, Muon 0.02": (llama, "muon", 0.02, 0),
    "Llama, Muon 0.05, warm-up": (llama, "muon", 0.05, 20),
    "GPT-2, Lion 3e-4": (gpt2, "lion", 3e-4, 0),
    "Llama, Lion 3e-4, warm-up": (llama, "lion", 3e-4, 20),
    "Mixtral, AdamW 1e-3, warm-up": (mixtral, "adamw", 1e-3, 20),
}


def row_of(name: str, losses: list[float], seen: list[dict[str, float]], monitor: SignalMonitor) -> str:
    """A row of the page: the extremes over all layers and samples."""

    def extreme(quantity: str, chosen: Callable[[list[float]], float]) -> str:
        found = [v for numbers in seen for key, v in numbers.items() if re.fullmatch(rf".*layer_\d+/{quantity}", key)]
        return f"{chosen(found):.2g}"

    norms = np.sqrt((monitor._movement._table()[1] ** 2).sum(1))
    steep = max(norms[k] / np.median(norms[k - 10 : k]) for k in range(10, len(norms)))
    numbers = [
        f"{np.mean(losses[-5:]):.2f}", extreme("variance", max), extreme("score_std", max),
        extreme("largest_score", max), extreme("attention_entropy", min), extreme("lowest_entropy", min),
        f"{extreme('update', min)} to {extreme('update', max)}", f"{steep:.1f}",
    ]  # fmt: skip
    return f"| {' | '.join([name, *numbers])} |"


def test_the_record_has_these_runs() -> None:
    found = re.findall(r"^\| ((?:GPT-2|Llama|Mixtral), (?:AdamW|Muon|Lion)[^|]*) \|", RECORD.read_text("utf-8"), re.M)
    assert found == list(HEALTHY)


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_are_told_nothing_of(name: str) -> None:
    make, optimizer, lr, warm_up = HEALTHY[name]
    model = make(4)
    chosen = optimizers(optimizer, model, lr)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda k: min(1.0, (k + 1) / max(1, warm_up))) for o in chosen]
    losses, seen = [], []
    with SignalMonitor(model, every=10, ring=150, log=lambda numbers, _: seen.append(numbers)) as monitor:
        for ids in batches(150):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.item())
            monitor.step(loss)  # sees the gradients before they are clipped
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for item in (*chosen, *schedules):
                item.step()
            model.zero_grad()
        row = row_of(name, losses, seen, monitor)
    assert np.mean(losses[-5:]) < 0.8 * losses[0]
    assert [w.text for w in monitor.warnings] == []
    if os.environ.get("SIGNALPROP_WRITE_DOCS"):
        text = RECORD.read_text("utf-8")
        written = re.sub(rf"^\| {re.escape(name)} \|.*$", row, text, count=1, flags=re.M)
        assert row in written
        RECORD.write_text(written, "utf-8")


# --- every process of a run has to make the monitor, and one that has not is named within seconds


SOON = timedelta(milliseconds=50)


def test_all_have_it_or_those_that_do_not_are_named() -> None:
    store = dist.HashStore()
    for one in [EveryRank(rank, 2, store, 0) for rank in (0, 1)]:
        one.check(SOON)

    first = EveryRank(0, 3, store, 1)
    begun = time.monotonic()
    with pytest.raises(InputError, match=r"no SignalMonitor in process 1, 2 of 3 after 0\.05 s; make one in every"):
        first.check(SOON)
    assert time.monotonic() - begun < 2
    first.check(SOON)  # the steps that follow do not wait again

    EveryRank(0, 1, None, 0).check(SOON)  # one process

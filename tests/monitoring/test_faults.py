"""What trainings die of, planted: every fault is told, with its layer; ten healthy runs are told nothing of."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from monitored import batches, gpt2, llama, sequences, train
from signalprop.errors import InputError
from signalprop.monitoring import SignalMonitor
from signalprop.monitoring.bands import limits
from signalprop.monitoring.movement import Movement, first_moved


def sharpen(model: Any) -> None:
    """Queries and keys of layer 1 times 128, each."""
    model.transformer.h[1].attn.c_attn.weight.data[:, :64] *= 128


def starve(model: Any) -> None:
    """Of layer 1, expert 3 stays below either expert 0 or 1."""
    weight = model.model.layers[1].mlp.gate.weight.data
    weight[:] *= 50
    weight[1], weight[3] = -weight[0], 0


def freeze(model: Any) -> None:
    model.transformer.h[2].requires_grad_(False)


FAULTS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], None], set[str], int]] = {
    "one-hot attention": (gpt2, sharpen, {"score_std", "largest_score", "attention_entropy"}, 1),
    "a dead expert": (lambda: llama(experts=4, num_experts_per_tok=1), starve, {"expert_load"}, 1),
    "a frozen layer": (gpt2, freeze, {"update"}, 2),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told_with_its_layer(name: str) -> None:
    make, plant, quantities, layer = FAULTS[name]
    model = make()
    with SignalMonitor(model, every=2) as monitor:
        train(model, 4, monitor)
        assert monitor.warnings == []
        plant(model)
        train(model, 4, monitor)
    assert {w.quantity for w in monitor.warnings} == quantities
    assert {w.layers for w in monitor.warnings} == {(layer,)}
    assert {w.step for w in monitor.warnings} == {6}


def test_a_layer_that_the_optimizer_does_not_know() -> None:
    model: Any = gpt2()
    others = [p for name, p in model.named_parameters() if "h.0." not in name]
    optimizer = torch.optim.AdamW(others, lr=1e-3)
    with SignalMonitor(model, every=3) as monitor:
        for ids in batches(3):
            model(input_ids=ids, labels=ids).loss.backward()
            monitor.step()
            optimizer.step()
    assert [(w.quantity, w.layers, w.value) for w in monitor.warnings] == [("update", (0,), 0.0)]


def test_a_loss_that_jumps_names_who_moved_first(tmp_path: Path) -> None:
    model: Any = gpt2(3, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    path = tmp_path / "signal.jsonl"
    with SignalMonitor(model, every=1000, jsonl=path, ring=16) as monitor:
        train(model, 40, monitor, lr=1e-2)
        assert monitor.warnings == []
        model.transformer.h[1].mlp.c_proj.weight.data *= -100
        train(model, 3, monitor)
    (warning,) = monitor.warnings
    assert (warning.quantity, warning.step, warning.layers) == ("loss", 41, (1,))
    assert "first moved the weights of layer 1, at step 41" in warning.text
    line = json.loads(path.read_text().splitlines()[-1])
    assert line["jump"]["first_layer"] == 1 and line["warnings"] == [warning.text]
    ring = line["jump"]["ring"]
    assert ring["step"] == list(range(26, 42)) and ring["loss"][-1] == pytest.approx(warning.value)
    assert np.shape(ring["update"]) == np.shape(ring["gradient_norm"]) == (16, 3)


def test_what_is_kept_of_a_step() -> None:
    a, b = nn.Parameter(torch.full((3, 4), 2.0)), nn.Parameter(torch.zeros(2))
    movement = Movement([[a], [b]], 4)
    a.grad = torch.full((3, 4), 0.5)
    assert movement.record(1, 1.0) == [] and movement.update() == [None, None]
    a.data += 0.02
    movement.record(2, torch.tensor(1.0))
    assert movement.update() == [pytest.approx(0.01), None]  # weights of 0 have no share
    (_, row) = movement._ring[-1]
    assert row[1:3].tolist() == [pytest.approx(0.5 * 12**0.5), 0.0]


@pytest.mark.parametrize("quantity", ["gradient", "update"])
def test_who_moved_first(quantity: str) -> None:
    noise = np.exp(0.05 * np.random.default_rng(0).standard_normal((2, 30, 5)))
    assert first_moved(*noise)[0] is None
    noise[("gradient", "update").index(quantity), 27:, 3] *= 20
    noise[:, 28:, :] *= 100  # everybody, one step later
    layer, row, what, factor = first_moved(*noise)
    assert (layer, row, what) == (3, 27, quantity) and factor == pytest.approx(20, rel=0.2)


def test_limits_follow_the_number_of_keys_and_what_trained_models_start_with() -> None:
    measured = {"largest_score": [1.0, 500.0], "attention_entropy": [0.5, 0.001]}
    found = limits(measured, 1000, {})
    assert found["largest_score"].high.tolist() == pytest.approx([20 * np.log(1000)] * 2)
    assert found["largest_score"].outside(np.array([100.0, 500.0])).tolist() == [False, True]
    assert found["attention_entropy"].outside(np.array(measured["attention_entropy"])).tolist() == [False, True]
    first = {"largest_score": [400.0, 400.0], "attention_entropy": [0.5, 0.001]}  # of layer 1 it has collapsed
    assert limits(measured, 1000, {}, first)["largest_score"].high.tolist() == pytest.approx([1200, 20 * np.log(1000)])


def test_the_largest_score_is_that_of_the_queries_and_keys() -> None:
    model: Any = gpt2(2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ids, seen = sequences(2), {}
    handle = model.transformer.h[1].attn.c_attn.register_forward_hook(lambda _, __, out: seen.update(x=out.detach()))
    with SignalMonitor(model, skip_first=0) as monitor:
        model(input_ids=ids, labels=ids).loss.backward()
        handle.remove()
        numbers = monitor.step()
    q, k = (part.reshape(2, -1, 2, 16).transpose(1, 2) for part in seen["x"].split(32, -1)[:2])
    scores = (q @ k.transpose(-1, -2) / 4).masked_fill(~torch.ones(24, 24).tril().bool(), -torch.inf)
    largest = scores[:, :, 1:].amax((0, 2, 3))  # a first token has nothing to choose from
    assert numbers is not None
    assert numbers["signal/layer_1/largest_score"] == pytest.approx(float(largest.max()), rel=1e-5)
    assert numbers["signal/layer_1/largest_score_head"] == int(largest.argmax())


def test_bad_ring() -> None:
    with pytest.raises(InputError, match="ring -1"):
        SignalMonitor(gpt2(), ring=-1)


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


HEALTHY = [
    (gpt2, "adamw", 1e-3, 0), (gpt2, "adamw", 3e-3, 20), (llama, "adamw", 1e-3, 20), (llama, "adamw", 3e-3, 0),
    (gpt2, "muon", 0.02, 0), (llama, "muon", 0.02, 0), (llama, "muon", 0.05, 20), (gpt2, "lion", 3e-4, 0),
    (llama, "lion", 3e-4, 20), (lambda n: llama(n, experts=4), "adamw", 1e-3, 20),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("make", "name", "lr", "warm_up"), HEALTHY)
def test_healthy_runs_are_told_nothing_of(make: Callable[[int], nn.Module], name: str, lr: float, warm_up: int) -> None:
    model = make(4)
    chosen = optimizers(name, model, lr)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda k: min(1.0, (k + 1) / max(1, warm_up))) for o in chosen]
    losses = []
    with SignalMonitor(model, every=10) as monitor:
        for ids in batches(150):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            losses.append(loss.item())
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            monitor.step(loss)
            for item in (*chosen, *schedules):
                item.step()
            model.zero_grad()
    assert np.mean(losses[-5:]) < 0.8 * losses[0]
    assert [w.text for w in monitor.warnings] == []

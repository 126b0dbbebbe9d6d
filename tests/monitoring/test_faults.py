"""What trainings die of, planted: every fault is told, with its sublayer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from choice import some
from monitored import batches, gpt2, llama, sequences, train
from signalprop.monitoring import SignalMonitor
from signalprop.monitoring.bands import limits
from signalprop.monitoring.jumps import first_moved
from signalprop.monitoring.movement import Movement
from signalprop.monitoring.places import Place, named


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


def sharpen_one(model: Any) -> None:
    """Queries and keys of head 1 of layer 1 times 128, each; of two heads."""
    weight = model.transformer.h[1].attn.c_attn.weight.data
    weight[:, 16:32] *= 128
    weight[:, 48:64] *= 128


def freeze_attention(model: Any) -> None:
    for part in (model.transformer.h[2].attn, model.transformer.h[2].ln_1):
        part.requires_grad_(False)


ATTENTION, FEED_FORWARD = "attention", "feed-forward"
FAULTS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], None], set[str], set[Place]]] = {
    "one-hot attention": (
        gpt2, sharpen, {"score_std", "largest_score", "attention_entropy", "lowest_entropy"}, {Place(1, ATTENTION)}
    ),
    "one collapsed head": (gpt2, sharpen_one, {"score_std", "largest_score", "lowest_entropy"}, {Place(1, ATTENTION)}),
    "a dead expert": (
        lambda: llama(experts=4, num_experts_per_tok=1), starve, {"expert_load"}, {Place(1, "experts")}
    ),
    "a frozen layer": (gpt2, freeze, {"update"}, {Place(2, ATTENTION), Place(2, FEED_FORWARD)}),
    "a frozen sublayer": (gpt2, freeze_attention, {"update"}, {Place(2, ATTENTION)}),
}  # fmt: skip


@pytest.mark.parametrize("name", some(FAULTS, ("one collapsed head", "a dead expert", "a frozen sublayer")))
def test_a_fault_is_told_with_its_sublayer(name: str) -> None:
    make, plant, quantities, places = FAULTS[name]
    model = make()
    with SignalMonitor(model, every=2) as monitor:
        train(model, 4, monitor)
        assert monitor.warnings == []
        plant(model)
        train(model, 4, monitor)
    assert {w.quantity for w in monitor.warnings} == quantities
    assert all(set(w.places) == places for w in monitor.warnings)
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
    assert (warning.quantity, warning.step, warning.places) == ("loss", 41, (Place(1, FEED_FORWARD),))
    assert "first moved the weights of layer 1, feed-forward, at step 41" in warning.text
    line = json.loads(path.read_text().splitlines()[-1])
    assert line["jump"]["first_layer"] == 1 and line["warnings"] == [warning.text]
    assert line["jump"]["first_sublayer"] == FEED_FORWARD and line["jump"]["what"] == "loss"
    ring = line["jump"]["ring"]
    assert ring["step"] == list(range(26, 42)) and ring["loss"][-1] == pytest.approx(warning.value)
    assert np.shape(ring["update"]) == np.shape(ring["gradient_norm"]) == (16, len(ring["place"])) == (16, 6)


def test_what_is_kept_of_a_step() -> None:
    a, b, c = nn.Parameter(torch.full((3, 4), 2.0)), nn.Parameter(torch.zeros(2)), nn.Parameter(torch.full((3, 4), 2.0))
    movement = Movement([(Place(0, "x"), [a]), (Place(0, "y"), [c]), (Place(1, "x"), [b])], 4)
    a.grad = torch.full((3, 4), 0.5)
    assert movement.record(1, 1.0) == [] and movement.update() == ([None, None], [None] * 3)
    a.data += 0.02
    movement.record(2, torch.tensor(1.0))
    layers, places = movement.update()
    assert layers == [pytest.approx(0.01 / 2**0.5), None]  # weights of 0 have no share
    assert places == [pytest.approx(0.01), None, None]  # the second has no gradient: it may have been skipped
    losses, gradients, _ = movement._table()
    assert losses.tolist() == [1.0, 1.0] and gradients[1].tolist() == [pytest.approx(0.5 * 12**0.5), 0.0, 0.0]


def test_what_was_frozen_from_the_start_beside_what_trains_is_no_fault() -> None:
    """As with adapters on some sublayers; a layer that is frozen as a whole is told."""
    model: Any = gpt2()
    freeze_attention(model)
    model.transformer.h[0].requires_grad_(False)
    with SignalMonitor(model, every=2) as monitor:
        train(model, 4, monitor)
    (warning,) = monitor.warnings
    assert warning.quantity == "update" and warning.layers == (0,)
    assert "update over weights of layer 0 left the band: 0 at layer 0, " in warning.text


def test_places_in_words() -> None:
    both = [Place(k, name) for k in range(4) for name in (ATTENTION, FEED_FORWARD)]
    assert named(both[1:], both) == "layer 0, feed-forward; layers 1-3"
    assert named(both[::2], both[::2]) == "layers 0-3, attention"
    assert named([Place(2)], [Place(k) for k in range(4)]) == "layer 2"
    assert named([both[3], both[0], both[7]], both) == "layer 0, attention; layers 1, 3, feed-forward"


class Loop:
    """A training whose numbers are made up, in which two sublayers have gradients."""

    def __init__(self) -> None:
        self.parts = [nn.Parameter(torch.ones(4)) for _ in range(2)]
        self.movement = Movement([(Place(k, "x"), [p]) for k, p in enumerate(self.parts)], 64)
        self.random, self.n = np.random.default_rng(0), 0

    def run(self, steps: int, loss: float = 1.0, gradients: tuple[float, float] = (1.0, 1.0)) -> list[str]:
        """What is told in so many steps."""
        told = []
        for _ in range(steps):
            self.n += 1
            for p, size in zip(self.parts, gradients, strict=True):
                p.grad = torch.full((4,), float(size * np.exp(0.2 * self.random.standard_normal())))
                p.data *= float(1 + 0.01 * np.exp(0.2 * self.random.standard_normal()))
            told += [jump.text for jump in self.movement.record(self.n, loss * float(1 + 0.01 * self.random.random()))]
        return told


def test_a_gradient_that_jumps_without_the_loss() -> None:
    loop = Loop()
    assert loop.run(30) == []
    (text,) = loop.run(1, gradients=(1.0, 200.0))
    assert "step 31: the norm of the gradients jumped to" in text and "first moved the gradient of layer 1, x" in text
    assert loop.run(20, gradients=(5.0, 5.0)) == []
    assert len(loop.run(3, loss=3.0, gradients=(500.0, 500.0))) == 1  # with the loss it is one


def test_a_second_jump_is_told_once_the_loss_has_come_back() -> None:
    loop = Loop()
    assert loop.run(30) == []
    assert len(loop.run(4, loss=3.0)) == 1
    assert loop.run(3) == []
    assert len(loop.run(40, loss=3.0)) == 1  # and stays
    assert len(loop.run(5, loss=9.0)) == 1


@pytest.mark.parametrize("quantity", ["gradient", "update"])
def test_who_moved_first(quantity: str) -> None:
    noise = np.exp(0.05 * np.random.default_rng(0).standard_normal((2, 30, 5)))
    assert first_moved(*noise)[0] is None
    noise[("gradient", "update").index(quantity), 27:, 3] *= 20
    noise[:, 28:, :] *= 100  # everybody, one step later
    layer, row, what, factor = first_moved(*noise)
    assert (layer, row, what) == (3, 27, quantity) and factor == pytest.approx(20, rel=0.2)


def test_a_head_may_look_at_few_keys_where_it_did_when_the_training_began() -> None:
    measured = {"lowest_entropy": [5e-4, 1e-4]}
    assert limits(measured, 1000, {}, {"lowest_entropy": [0.9, 0.9]})["lowest_entropy"].low.tolist() == [1e-3, 1e-3]
    found = limits(measured, 1000, {}, {"lowest_entropy": [6e-4, 6e-4]})["lowest_entropy"]
    assert found.outside(np.array(measured["lowest_entropy"])).tolist() == [False, True]


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
    assert numbers["signal/layer_1/largest_score"] == pytest.approx(float(largest.max()), rel=1e-5)
    assert numbers["signal/layer_1/largest_score_head"] == int(largest.argmax())

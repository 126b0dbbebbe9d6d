"""SignalMonitor in a bare loop: what it logs is right, training is not changed, faults are named."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import monitored
from monitored import gpt2, hooks, other, sequences, train
from processes import run_ranks
from signalprop import read_parametrization
from signalprop.attachment.anatomy import attach
from signalprop.attachment.families import mapping_of
from signalprop.data.batches import Batch
from signalprop.diagnosis.signal import observe
from signalprop.errors import InputError
from signalprop.measurement import measure
from signalprop.monitoring import SignalMonitor, checks
from signalprop.monitoring.bands import bands
from signalprop.monitoring.movement import Movement
from signalprop.monitoring.places import Place


class Seen(dict[int, dict[str, float]]):
    """What a monitor logs, by step."""

    def __call__(self, numbers: dict[str, float], step: int) -> None:
        self[step] = numbers


def one_step(model: nn.Module, arguments: dict[str, Any], **options: Any) -> dict[str, float]:
    with SignalMonitor(model, **options) as monitor:
        model(**arguments).loss.backward()
        numbers = monitor.step()
    assert numbers is not None
    return numbers


def row(numbers: dict[str, float], quantity: str) -> list[float]:
    """A quantity by layer."""
    return [value for name, value in sorted(numbers.items()) if name.endswith(f"/{quantity}") and "/layer_" in name]


# --- the numbers -------------------------------------------------------------------------------------------------


def test_numbers_are_those_of_measure() -> None:
    model, ids = gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), sequences()
    numbers = one_step(model, {"input_ids": ids, "labels": ids}, skip_first=0)
    profile = measure(model, {"input_ids": ids, "labels": ids})
    ends = [1, 3, 5]
    np.testing.assert_allclose(row(numbers, "variance"), profile.forward["stream_out"].variance[ends])
    np.testing.assert_allclose(row(numbers, "token_correlation"), profile.forward["stream_out"].token_correlation[ends])
    np.testing.assert_allclose(row(numbers, "gradient"), profile.gradient["stream_out"].variance[ends])
    branch, stream = profile.forward["branch"].variance, profile.forward["stream_in"].variance
    np.testing.assert_allclose(row(numbers, "branch_share"), (branch[::2] + branch[1::2]) / stream[::2])
    assert numbers["signal/gradient_ratio"] == pytest.approx(profile.gradient["stream_in"].variance[0])
    assert numbers["signal/sensitivity"] == pytest.approx(profile.sensitivity()["mean"])
    assert numbers["signal/sensitivity"] == pytest.approx(sum(row(numbers, "branch_share")))
    assert numbers["signal/input_variance"] == pytest.approx(stream[0])
    assert numbers["signal/largest_variance"] == max(row(numbers, "variance"))
    assert numbers["signal/outside"] == 0


@pytest.mark.parametrize("padded", ["no", "right", "left"])
def test_first_positions_and_padding_are_left_out(padded: str) -> None:
    model, ids = gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), sequences()
    mask = torch.ones_like(ids)
    if padded == "right":
        mask[1, 15:] = 0
    if padded == "left":
        mask[1, :9] = 0
    kept = {}
    handle = model.transformer.h[1].register_forward_hook(
        lambda _, __, out: kept.update(x=(out[0] if isinstance(out, tuple) else out).detach())
    )
    arguments = {"input_ids": ids, "labels": ids} | ({} if padded == "no" else {"attention_mask": mask})
    numbers = one_step(model, arguments, skip_first=4, scores=False)
    handle.remove()
    parts = [kept["x"][b][mask[b] != 0][4:] for b in range(4)]
    counted = torch.cat(parts).double()
    assert row(numbers, "variance")[1] == pytest.approx(float(counted.var(correction=0)), rel=1e-5)
    centred = [part.double() - counted.mean() for part in parts]
    pairs = sum((x @ x.T).sum() - (x * x).sum() for x in centred) / 32
    n_pairs = sum(len(x) * (len(x) - 1) for x in centred)
    expected = float(pairs / n_pairs / counted.var(correction=0))
    assert row(numbers, "token_correlation")[1] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("family", ["bert", "vit", "t5"])
def test_other_architectures(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model, arguments = other(family)
    with caplog.at_level(logging.WARNING, "signalprop.monitoring"):
        numbers = one_step(model, arguments)
    assert caplog.text == ""
    n = 5 if family == "t5" else 2
    for quantity in ("variance", "token_correlation", "branch_share", "gradient"):
        assert len(row(numbers, quantity)) == n
    assert numbers["signal/outside"] == 0
    assert hooks(model) == 0


def test_scores_are_those_of_a_diagnosis() -> None:
    model, ids = gpt2(), sequences()
    first = ids[:2]  # what a monitor keeps of the step itself
    batch = Batch(tokens=first.numpy(), targets=np.concatenate([first[:, 1:].numpy(), np.full((2, 1), -1)], 1))
    numbers = one_step(model, {"input_ids": ids, "labels": ids}, batch=batch)
    own = one_step(model, {"input_ids": ids, "labels": ids})
    model.eval()
    signal, _ = observe(attach(model, mapping_of(model)), [batch])
    expected = {
        "score_std": [max(s.score_std) for s in signal],
        "attention_entropy": [np.mean(s.entropy) for s in signal],
    }
    for name, values in expected.items():
        np.testing.assert_allclose(row(numbers, name), values, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(row(own, name), values, rtol=1e-5, err_msg=name)
    assert model.training is False


# --- training is not changed -------------------------------------------------------------------------------------


def checkpointed(**options: Any) -> nn.Module:
    model: Any = gpt2()
    model.config.use_cache = False
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)
    return model


CASES: dict[str, Any] = {
    "dropout and accumulation": (gpt2, {"accumulate": 2}),
    "checkpointing": (lambda: checkpointed(use_reentrant=False), {}),
    "reentrant": (lambda: checkpointed(use_reentrant=True), {}),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("case", CASES)
def test_training_is_the_same_to_the_bit(case: str) -> None:
    make, options = CASES[case]
    bare, watched = make(), make()
    losses = train(bare, 7, **options)
    seen, own = Seen(), hooks(watched)
    with SignalMonitor(watched, every=3, log=seen) as monitor:
        assert train(watched, 7, monitor, **options) == losses
    assert list(seen) == [1, 3, 6]
    assert all(torch.equal(p, q) for p, q in zip(bare.parameters(), watched.parameters(), strict=True))
    assert hooks(watched) == own
    assert all(module.training for module in watched.modules())


@pytest.mark.slow  # the graph's own outputs: tests/measurement/test_compiled.py
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.usefixtures("compiles")
def test_compiled_models() -> None:
    """Every step runs compiled; the numbers are those of the uncompiled model."""
    calls: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            calls.append(1)
            return graph.forward(*args)

        return run

    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    bare, watched = gpt2(1, **still), gpt2(1, **still)
    expected, found = Seen(), Seen()
    options: dict[str, Any] = {"every": 3}
    with SignalMonitor(bare, log=expected, **options) as monitor:
        losses = train(bare, 4, monitor)
    compiled = torch.compile(watched, backend=backend)
    with SignalMonitor(compiled, log=found, **options) as monitor:
        for ids, loss in zip(monitored.batches(4), losses, strict=True):
            if monitor.steps == 0:
                optimizer = torch.optim.AdamW(watched.parameters(), lr=1e-3)
            calls.clear()
            own = compiled(input_ids=ids, labels=ids).loss
            own.backward()
            assert calls and own.item() == pytest.approx(loss, rel=1e-6)
            monitor.step()
            optimizer.step()
            optimizer.zero_grad()
    assert list(found) == list(expected) == [1, 3]
    for step, numbers in expected.items():
        assert found[step] == pytest.approx(numbers, rel=1e-4)
    assert hooks(watched) == 0 and not [name for m in watched.modules() for name in vars(m) if "signalprop" in name]
    torch._dynamo.reset()


def test_frozen_layers_have_no_gradient_and_say_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model = gpt2()
    for name, p in model.named_parameters():
        p.requires_grad_("h.2" in name)
    seen = Seen()
    with SignalMonitor(model, every=1, log=seen) as monitor:
        train(model, 3, monitor)
    assert row(seen[3], "gradient") == [] and len(row(seen[3], "variance")) == 3
    assert caplog.text.count("no gradients") == 1


@pytest.mark.slow
def test_distributed(tmp_path: Path) -> None:
    run_ranks(monitored.__file__, tmp_path)
    results = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for result in results:
        assert result["losses"]["bare"] == result["losses"]["monitored"]
        assert result["same"] and result["hooks"] == 0
    assert not (tmp_path / "rank1.jsonl").exists()
    lines = [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 4]


def test_logs_that_fail_do_not_end_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        def add_scalar(self, *_: Any) -> None:
            raise OSError(28, "No space left on device")

    model, seen, path = gpt2(), Seen(), tmp_path / "folder" / "signal.jsonl"
    path.parent.mkdir()
    monitor = SignalMonitor(model, every=1, writer=Full(), jsonl=path, log=seen)
    path.unlink()
    path.parent.rmdir()
    with monitor:
        train(model, 2, monitor)
        path.parent.mkdir()
        train(model, 1, monitor)
    assert sorted(seen) == [1, 2, 3]
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [3]
    said = [record.getMessage() for record in caplog.records]
    assert sum("the writer failed (OSError: [Errno 28]" in line for line in said) == 1
    assert sum("not written to" in line for line in said) == 1 and len(said) == 2


# --- warnings ----------------------------------------------------------------------------------------------------


def test_a_learning_rate_a_thousand_times_too_large(caplog: pytest.LogCaptureFixture) -> None:
    model, seen = gpt2(4), Seen()
    with SignalMonitor(model, every=5, log=seen) as monitor:
        train(model, 10, monitor)
        train(model, 15, monitor, lr=1.0)
    assert monitor.warnings
    assert next((w.quantity, w.step) for w in monitor.warnings) == ("loss", 12)  # every step is kept
    first = monitor.warnings[1]
    assert first.step == 15  # the first sample after the fault
    assert first.quantity == "variance" and first.value > 1e4
    assert first.layer in first.layers
    assert "step 15: signal variance after layer" in caplog.text
    assert "earlier weights predict" in first.text and "\n" not in first.text
    assert seen[10]["signal/outside"] == 0 < seen[15]["signal/outside"]
    told = [(w.quantity, layer) for w in monitor.warnings[1:] for layer in w.layers]
    assert len(told) == len(set(told))  # each layer once per quantity
    lines = [record for record in caplog.records if record.name == "signalprop.monitoring"]
    assert len(lines) == len(monitor.warnings)
    events = monitor.findings[-len(lines) :]  # after what the rules say of the last sample
    assert monitor.findings[: -len(lines)]
    for line, item, found in zip(lines, monitor.warnings, events, strict=True):
        assert found.text == item.text and found.layers == item.layers and found.severity == "warning"
        assert line.getMessage().startswith(item.text) and line.getMessage().endswith(f"Next: {found.remedy}")


def test_bands_are_predicted_at_the_start_and_at_every_eighth_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = gpt2(), []
    monkeypatch.setattr(checks, "bands", lambda *a, **b: made.append(1) or bands(*a, **b))
    counts = []
    with SignalMonitor(model, every=1, log=lambda *_: counts.append(len(made))) as monitor:
        train(model, 10, monitor)
        assert counts == [1] * 8 + [2] * 2 and monitor.warnings == []
        with torch.no_grad():
            model.transformer.h[1].mlp.c_proj.weight.mul_(1e5)
        train(model, 2, monitor)
    variance = next(w for w in monitor.warnings if w.quantity == "variance")
    assert variance.step == 11 and min(variance.layers) == 1
    assert counts[10] == 3  # before it is said, held against the weights of that step


def test_a_layer_that_is_scaled_in_training_is_named() -> None:
    model = gpt2(4)
    with SignalMonitor(model, every=2) as monitor:
        train(model, 4, monitor)
        with torch.no_grad():
            model.transformer.h[2].mlp.c_proj.weight.mul_(3000)
        train(model, 2, monitor)
    variance = next(w for w in monitor.warnings if w.quantity == "variance")
    assert variance.step == 6 and min(variance.layers) == 2


def test_nan_names_the_first_layer(caplog: pytest.LogCaptureFixture) -> None:
    model, seen = gpt2(4), Seen()
    with SignalMonitor(model, every=2, log=seen) as monitor:
        train(model, 3, monitor)
        with torch.no_grad():
            model.transformer.h[2].mlp.c_proj.weight[0, 0] = float("nan")
        train(model, 4, monitor)
    (warning,) = monitor.warnings
    assert (warning.step, warning.quantity, warning.layers) == (4, "finite", (2,))
    assert "layer 2 feed-forward, branch" in warning.text and "h.2.mlp.c_proj.weight is not finite" in warning.text
    assert seen[4] == {"signal/not_finite_layer": 2.0}
    assert seen[6] == {"signal/not_finite_layer": 0.0}  # by then the optimizer has written NaN everywhere
    assert caplog.text.count("not finite") == 1
    assert monitor.findings[0].name == "not finite" and monitor.findings[0].severity == "fault"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every is 0"),
        ({"tolerance": 1.0}, "tolerance is 1.0; expected a factor above 1"),
        ({"tolerance": {"speed": 2.0}}, "speed"),
        ({"writer": object()}, "without add_scalar"),
        ({"skip_first": -1}, "skip_first is -1"),
        ({"ring": -1}, "ring -1"),
        ({"start": read_parametrization(gpt2(2))}, "start has 4 sublayers, the model 6"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SignalMonitor(gpt2(), **options)


def test_scores_need_a_batch_that_the_model_reads(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = gpt2(), sequences()
    embedded = model.transformer.wte(ids)
    arguments = {"inputs_embeds": embedded, "labels": ids}
    numbers = one_step(model, arguments)
    assert len(row(numbers, "variance")) == 3 and row(numbers, "score_std") == [] and caplog.text == ""
    batch = Batch(tokens=np.full((1, 8), 10_000), targets=np.zeros((1, 8), int))
    model.zero_grad()
    assert row(one_step(model, {"input_ids": ids, "labels": ids}, batch=batch), "score_std") == []
    assert "attention scores not measured" in caplog.text


def test_bad_use(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give a mapping"):
        SignalMonitor(nn.Linear(2, 2))
    with pytest.raises(InputError, match="not attached"):
        SignalMonitor(gpt2()).step()
    model = gpt2()
    with pytest.raises(InputError, match="cannot write"), SignalMonitor(model, jsonl=tmp_path / "no" / "x") as monitor:
        train(model, 1, monitor)
    assert hooks(model) == 0


def test_a_layer_that_a_step_skipped_has_no_update_of_0() -> None:
    """LayerDrop skips a layer in single steps: its update is not measured there; one that never moves is told."""
    torch.manual_seed(0)
    parts = [nn.Parameter(torch.randn(20)) for _ in range(3)]
    movement = Movement([(Place(k), [p]) for k, p in enumerate(parts)], 20)
    for step in range(1, 16):
        for k, p in enumerate(parts):
            p.grad = None if k == 2 or (k == 1 and step in (7, 14)) else torch.ones(20)
        movement.record(step, 1.0)
        of_layers, _ = movement.update()
        if step > 1:
            assert of_layers[0] is not None and of_layers[0] > 0
            assert (of_layers[1] is None) == (step in (8, 15))
            assert of_layers[2] == (None if step < 10 else 0.0)
        for p in parts:
            p.data -= 0.01 * (0 if p.grad is None else p.grad)


@pytest.mark.parametrize(("rate", "told"), [(1e-6, True), (0.05, False)])
def test_updates_that_bfloat16_rounds_away(rate: float, told: bool) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(400).bfloat16())
    movement = Movement([(Place(0), [weight])], 20)
    for step in range(1, 13):
        weight.grad = torch.ones_like(weight)
        movement.record(step, 1.0)
        assert (movement.stalled() is not None) == (told and step > 10)
        weight.data -= rate * weight.grad

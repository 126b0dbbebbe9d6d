"""Probe in a training loop: sampling, hooks, accumulation, evaluation in between."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from signalprop.attachment.families import mapping_of
from signalprop.attachment.mapping import find
from signalprop.errors import InputError
from signalprop.measurement import Probe, measure

from .test_measure import assert_same, n_hooks
from .test_measure_families import arguments_for, total


def test_every_third_step_of_a_training_run(build: Any) -> None:
    model = build("gpt2").train()
    twin = build("gpt2").train()
    arguments = arguments_for(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, twin)]
    profiles = []
    with Probe(model, every=3, scheme="run") as probe:
        for step in range(7):
            torch.manual_seed(step)
            loss = total(model(**arguments))
            loss.backward()
            profiles.append(probe.profile())
            assert (n_hooks(model) > 0) == ((step + 1) % 3 == 0)
            optimizers[0].step()
            optimizers[0].zero_grad()
    assert [p is not None for p in profiles] == [True, False, False, True, False, False, True]
    for step in range(7):
        torch.manual_seed(step)
        expected = measure(twin, arguments, loss=total)
        if profiles[step] is not None:
            assert_same(profiles[step], expected)
            assert profiles[step].gradient_scale == pytest.approx(expected.gradient_scale, rel=1e-5)
            assert profiles[step].scheme == "run"
        torch.manual_seed(step)
        total(twin(**arguments)).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, theirs)  # the probe changes nothing


def test_a_hundred_cycles_and_an_exception_leave_no_hooks(build: Any) -> None:
    model = build("vit")
    arguments = arguments_for(model)
    for _ in range(100):
        with Probe(model):
            assert n_hooks(model) > 0
        assert n_hooks(model) == 0

    def training() -> None:
        with Probe(model) as probe:
            total(model(**arguments)).backward()
            assert probe.profile() is not None
            raise RuntimeError("training broke")

    with pytest.raises(RuntimeError, match="training broke"):
        training()
    assert n_hooks(model) == 0
    bias = find(model, mapping_of(model).sublayers[0].weights["value"]).bias
    with torch.no_grad():
        bias[0] = float("nan")
    with Probe(model) as probe:
        total(model(**arguments)).backward()
        with pytest.raises(InputError, match=r"layer 0 attention, branch.*v.*\.bias is not finite"):
            probe.profile()
        assert n_hooks(model) > 0  # the next step is sampled again
    assert n_hooks(model) == 0


def test_gradient_accumulation_records_the_first_pass_and_says_so(build: Any) -> None:
    model = build("llama").eval()
    first, second = arguments_for(model), arguments_for(model, seed=2)
    expected = measure(model, first, loss=total)
    with Probe(model) as probe:
        total(model(**first)).backward()
        total(model(**second)).backward()
        profile = probe.profile()
        total(model(**second)).backward()
        after = probe.profile()
    assert profile is not None and after is not None
    assert_same(profile, expected)
    assert "the model ran 2 times in this step; the first pass was recorded" in profile.notes
    assert_same(after, measure(model, second, loss=total))


def test_no_backward_pass_and_frozen_layers_are_noted(build: Any) -> None:
    model = build("gpt2").eval()
    with Probe(model) as probe:
        model(**arguments_for(model))
        profile = probe.profile()
        assert profile is not None and profile.gradient is None
        assert any("no backward pass" in note for note in profile.notes)
        for name, p in model.named_parameters():
            p.requires_grad_("h.2" in name)
        total(model(**arguments_for(model))).backward()
        profile = probe.profile()
    assert profile is not None and profile.gradient is None
    assert any("none reached layer 0 attention, stream_in" in note for note in profile.notes)


def test_padding_comes_from_the_call(build: Any) -> None:
    model = build("bert").eval()
    arguments = arguments_for(model)
    mask = (torch.arange(11) < torch.tensor([7, 4, 11])[:, None]).long()
    expected = measure(model, {**arguments, "attention_mask": mask}, loss=total)
    with Probe(model) as probe:
        total(model(arguments["input_ids"], mask)).backward()  # by position
        profile = probe.profile()
    assert profile is not None
    assert_same(profile, expected)


def test_sums_that_stay_on_a_device_give_the_same_profile(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of accelerators, taken here on the CPU."""
    from signalprop.watching import recording, reduction

    model = build("gpt_neox").eval()
    mask = (torch.arange(11) < torch.tensor([7, 4, 11])[:, None]).long()
    arguments = {**arguments_for(model), "attention_mask": mask}
    expected = measure(model, arguments, loss=total)
    monkeypatch.setattr(recording, "moments", reduction.exact)
    profile = measure(model, arguments, loss=total)
    assert_same(profile, expected)
    assert profile.gradient_scale == pytest.approx(expected.gradient_scale, rel=1e-5)


def test_a_model_that_never_ran(build: Any) -> None:
    with Probe(build("gpt2")) as probe, pytest.raises(InputError, match=r"no probe point was reached.*compiled=True"):
        probe.profile()
    with pytest.raises(InputError, match="not attached"):
        probe.profile()
    with pytest.raises(InputError, match="every is 0"):
        Probe(build("gpt2"), every=0)


def test_the_step_that_the_block_ended_in(build: Any) -> None:
    model = build("gpt2").eval()
    with Probe(model) as probe:
        total(model(**arguments_for(model))).backward()
    assert_same(probe.profile(), measure(model, arguments_for(model), loss=total))
    with pytest.raises(InputError, match="not attached"):
        probe.profile()


def test_a_layer_that_is_skipped(build: Any) -> None:
    model = build("gpt2").eval()
    model.transformer.h[1].mlp.forward = lambda x: torch.zeros_like(x)
    with pytest.raises(InputError, match=r"layer 1 feed-forward, branch: this point was not reached.*12 of 13"):
        measure(model, arguments_for(model), loss=total)


def test_nothing_of_a_tensors_size_is_kept(build: Any) -> None:
    """A gradient that is held until the next one could not be added to in place."""
    model = build("gpt2").train()
    arguments = arguments_for(model)
    shape = (*arguments["input_ids"].shape, 32)

    def held() -> int:
        gc.collect()
        return sum(type(item) is torch.Tensor and item.shape == shape for item in gc.get_objects())

    def step() -> None:
        total(model(**arguments)).backward()

    step()
    before = held()
    with Probe(model) as probe:
        step()
        assert held() == before
        assert probe.profile() is not None

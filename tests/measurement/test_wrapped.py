"""Wrapped models are read as what is inside: the same numbers as of the bare model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from applied import vanilla
from signalprop.attachment.anatomy import anatomy
from signalprop.attachment.families import mapping_of
from signalprop.attachment.parametrization_of import read_parametrization
from signalprop.data import Batch, default_batch
from signalprop.diagnosis.run import diagnose
from signalprop.errors import InputError
from signalprop.measurement import Probe, measure
from signalprop.monitoring import SignalMonitor
from signalprop.repair import apply, check
from signalprop.streams.wrappers import unwrapped

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*fan_in_fan_out:UserWarning")  # peft's


def batch_for(model: nn.Module) -> Batch:
    a = mapping_of(model).architecture
    return default_batch(a if a.input == "patches" else a.replace(seq_len=12), batch_size=2)


def adapted(model: nn.Module, conv: bool, **options: Any) -> nn.Module:
    """A copy of the model with LoRA on all its linear layers."""
    peft = pytest.importorskip("peft")
    names = ["c_attn", "c_proj", "c_fc"] if conv else "all-linear"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        settings = peft.LoraConfig(target_modules=names, r=2, fan_in_fan_out=conv, **options)
        wrapped: nn.Module = peft.get_peft_model(copy.deepcopy(model), settings).eval()
    return wrapped


def worst(one: Any, other: Any) -> float:
    """Largest relative difference of two profiles' variances."""
    pairs = [(one.forward, other.forward), (one.gradient, other.gradient)]
    return max(float(np.max(abs(a[k].variance / b[k].variance - 1))) for a, b in pairs for k in a)


class TestAdapters:
    @pytest.mark.parametrize(
        "family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "t5", "vit"))]
    )
    def test_fresh_ones_change_no_number(self, family: str) -> None:
        model = vanilla(family, 2).eval()
        wrapped, batch = adapted(model, family == "gpt2"), batch_for(model)
        assert worst(measure(wrapped, batch), measure(model, batch)) == 0
        mine, theirs = read_parametrization(wrapped), read_parametrization(model)
        assert all(np.array_equal(mine.weights[role], theirs.weights[role]) for role in theirs.weights)

    def test_trained_ones_count_as_if_merged(self) -> None:
        model = vanilla("gpt2", 2).eval()
        wrapped = adapted(model, True, init_lora_weights=False)
        merged = copy.deepcopy(wrapped).merge_and_unload()
        batch = batch_for(model)
        assert worst(measure(wrapped, batch), measure(merged, batch)) < 1e-4
        assert worst(measure(wrapped, batch), measure(model, batch)) > 1e-3
        mine, theirs = read_parametrization(wrapped), read_parametrization(merged)
        for role in theirs.weights:
            np.testing.assert_allclose(mine.weights[role], theirs.weights[role], rtol=1e-12)
        assert not np.allclose(mine.weights["output"], read_parametrization(model).weights["output"], rtol=1e-6)

    def test_training_is_watched_and_not_ended(self) -> None:
        model = vanilla("llama", 2)
        wrapped = adapted(model, False).train()
        ids = torch.as_tensor(batch_for(model).tokens)
        with SignalMonitor(wrapped, every=1, skip_first=0) as monitor, Probe(wrapped) as probe:
            wrapped(input_ids=ids, labels=ids).loss.backward()
            profile, numbers = probe.profile(), monitor.step()
        bare = measure(model.train(), {"input_ids": ids, "labels": ids}, backward=False)
        assert profile is not None and numbers is not None and not monitor.warnings
        assert np.array_equal(profile.forward["stream_out"].variance, bare.forward["stream_out"].variance)
        assert numbers["signal/layer_1/variance"] == bare.forward["stream_out"].variance[-1]
        assert "signal/outside" in numbers

    def test_no_scheme_is_put_on_them(self) -> None:
        wrapped = adapted(vanilla("llama", 2), False)
        before = copy.deepcopy(wrapped.state_dict())
        with pytest.raises(InputError, match=r"adapters .*apply the scheme to the plain model"):
            apply(wrapped, "lns")
        assert all(torch.equal(value, before[name]) for name, value in wrapped.state_dict().items())


def test_the_module_inside_is_measured() -> None:
    model = vanilla("llama", 2).eval()
    wrapped = nn.DataParallel(torch.compile(adapted(model, False), backend="eager"))  # type: ignore[arg-type]
    batch = batch_for(model)
    assert type(unwrapped(wrapped)) is type(model)
    assert worst(measure(wrapped, batch), measure(model, batch)) == 0


def test_weights_that_device_map_keeps_elsewhere(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = vanilla("llama", 2).eval()
    wrapped = accelerate.disk_offload(copy.deepcopy(model), tmp_path, execution_device=torch.device("cpu"))
    assert all(p.is_meta for p in wrapped.parameters())
    batch = batch_for(model)
    mine, theirs = (measure(each, batch, backward=False) for each in (wrapped, model))
    assert np.array_equal(mine.forward["stream_out"].variance, theirs.forward["stream_out"].variance)
    assert np.array_equal(mine.forward["branch"].variance, theirs.forward["branch"].variance)
    assert anatomy(wrapped).proved
    assert check(wrapped, "huggingface").to_json()["rows"] == check(model, "huggingface").to_json()["rows"]
    assert all(p.is_meta for p in wrapped.parameters())
    one, other = (diagnose(each, [batch], jacobian_sequences=0).to_json() for each in (wrapped, model))
    assert one["weights"] == other["weights"] and "device_map keeps the weights of" in one["notes"][0]
    assert [row["variance_in"] for row in one["signal"]] == [row["variance_in"] for row in other["signal"]]
    with pytest.raises(InputError, match=r"give backward=False .*device_map keeps the weights"):
        measure(wrapped, batch)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*quantize:UserWarning")
def test_dynamic_int8_is_measured_forward_and_has_no_gradient() -> None:
    model = vanilla("llama", 2).eval()
    quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)
    batch = batch_for(model)
    seen: list[float] = []
    for layer in quantised.model.layers:
        layer.register_forward_hook(lambda _, __, out: seen.append(float(out.double().var(correction=0))))
    mine = measure(quantised, batch, backward=False).forward["stream_out"].variance
    np.testing.assert_allclose(mine[1::2], seen[:2], rtol=1e-6)
    with pytest.raises(InputError, match=r"give backward=False .*q_proj is quantised to integers, so no gradient"):
        measure(quantised, batch)
    found = diagnose(quantised, [batch])
    assert found.identity is None and all(layer.gradient is None for layer in found.signal)
    assert any("q_proj is quantised to integers" in note for note in found.notes)


def test_packed_integers_are_not_read_as_weights() -> None:
    model = vanilla("llama", 2).eval()
    layer: Any = model.get_submodule("model.layers.0.mlp.up_proj")
    layer.weight = nn.Parameter(layer.weight.detach().mul(1000).to(torch.int8), requires_grad=False)
    with pytest.raises(InputError, match="a Linear holds packed integers; take the model before it is quantised"):
        read_parametrization(model)

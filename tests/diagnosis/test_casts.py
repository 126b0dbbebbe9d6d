"""Casts hold what torch's own formats hold; the model is as before afterwards; noise is by its definition."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from choice import some
from diagnosing import VOCABULARY, logits_of, mapping_of, text_batch, tiny
from diagnosis.test_signal import streams
from signalprop.attachment.anatomy import attach, require_roles
from signalprop.diagnosis.casts import LinearMap, cast, casts, maps_of
from signalprop.diagnosis.number_formats import PER_TENSOR, SCALED, Format
from signalprop.diagnosis.stream import loss

FLOATS = [name for name in PER_TENSOR if name != "int8"]
SKIP = 3


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def by_hand(row: Tensor, name: str, largest: float) -> Tensor:
    """A row as a format holds it, one block after the other, `largest` being that of the tensor."""
    kind, _, part = name.partition("_")
    size = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}.get(kind, 128 if part == "block" else len(row))
    out = []
    for block in row.split(size):
        most = float(block.abs().max())
        if kind == "nvfp4":
            whole = torch.tensor(largest) / (6 * 448)
            scale = (block.abs().max() / 6 / whole).to(torch.float8_e4m3fn).float() * whole
        elif kind.startswith("mx"):
            exponent = math.floor(math.log2(most)) - {"mxfp4": 2, "mxfp8": 8}[kind]
            scale = torch.tensor([2.0**exponent]).to(torch.float8_e8m0fnu).float()
        else:
            scale = block.abs().max() / {"int8": 127, "int4": 7}[kind]
        x = block / scale
        if kind == "mxfp8":
            held = x.clamp(-448, 448).to(torch.float8_e4m3fn).float()
        elif kind.startswith("int"):
            held = torch.tensor([round(float(one)) for one in x])  # Python's, ties to even
        else:
            numbers = torch.tensor(E2M1)
            away = (x.abs()[:, None] - numbers).abs()
            away += torch.tensor([0, 1e-6, 0, 1e-6, 0, 1e-6, 0, 1e-6])  # ties: even last bit
            held = numbers[away.argmin(1)] * x.sign()
        out.append(held * scale)
    return torch.cat(out)


class TestFormats:
    @pytest.mark.parametrize("name", FLOATS)
    def test_as_torch_casts(self, name: str) -> None:
        torch.manual_seed(0)
        x = torch.randn(4000) * torch.logspace(-9, 2, 4000)  # from below the smallest subnormal to 448
        x = x.clamp(-400, 400)
        wanted = x.to(getattr(torch, name)).float()
        assert torch.equal(Format(name, scaled=False)(x), wanted)
        assert not torch.equal(x, wanted)

    def test_float16_overflows_and_the_others_do_not(self) -> None:
        x = torch.tensor([7e4, -7e4, 65504.0])
        assert Format("float16", scaled=False)(x).tolist() == [math.inf, -math.inf, 65504.0]
        assert Format("float16", scaled=True)(x).isfinite().all()
        assert Format("float8_e5m2", scaled=False)(x).tolist() == [57344.0, -57344.0, 57344.0]

    @pytest.mark.parametrize("name", SCALED)
    def test_scales_of_rows_and_blocks(self, name: str) -> None:
        """Against every block by itself, its scale by the standard's words, and the nearest of all its numbers."""
        torch.manual_seed(0)
        x = torch.randn(3, 300) * torch.logspace(-4, 3, 900).reshape(3, 300)  # 300: the last block is short
        wanted = torch.stack([by_hand(row, name, float(x.abs().max())) for row in x])
        assert torch.equal(Format(name, scaled=True)(x), wanted)

    def test_a_number_that_is_not_finite_spoils_its_own_block_alone(self) -> None:
        x = torch.ones(2, 256)
        x[0, 3], x[1, 5] = math.nan, math.inf
        for name in SCALED:
            held = Format(name, scaled=True)(x)
            assert torch.isnan(held[0, 3]) and int(torch.isnan(held).sum()) == 1, name
            assert held[1, 200] == pytest.approx(1.0, rel=0.5 if "channel" in name else 0.07), name


class TestModels:
    @pytest.mark.parametrize(
        ("family", "name"),
        some(
            [("gpt2", "float8_e5m2"), ("llama", "bfloat16"), ("bert", "float8_e5m2"), ("opt", "bfloat16")],
            (("gpt2", "float8_e5m2"), ("llama", "bfloat16")),
        ),
    )
    def test_weights_as_if_they_had_been_stored_so(self, family: str, name: str) -> None:
        model, batch = tiny(family, 2), text_batch(tiny(family, 2))
        mapping, before = mapping_of(model), weights(model)
        stored = tiny(family, 2)
        stored.load_state_dict(before)
        with torch.no_grad():
            for one in all_maps(stored):
                one.weight.data = one.weight.data.to(getattr(torch, name)).float()
        with cast(model, Format(name, scaled=False), "weights", all_maps(model)):
            assert torch.equal(logits_of(model, batch), logits_of(stored, batch))
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        found, *_ = casts(attach(model, mapping), [batch], [name], ["weights"], loss(model, [batch]), SKIP)
        assert not found.scaled
        assert found.loss.value == loss(stored, [batch]).mean
        assert found.increase.value == pytest.approx(loss(stored, [batch]).mean - loss(model, [batch]).mean, abs=1e-12)
        clean, noisy = streams(model, text_batch(model, 1)), streams(stored, text_batch(model, 1))
        for got, x, y in zip(found.signal_to_noise, clean[1:], noisy[1:], strict=True):
            x, y = x[:, SKIP:], y[:, SKIP:]
            assert got == pytest.approx(10 * math.log10(float(x.square().sum() / (x - y).square().sum())), abs=1e-3)

    def test_activations_are_what_maps_read(self) -> None:
        model = tiny("llama", 1)
        batch = text_batch(model)
        reads: list[Tensor] = []
        form = Format("float8_e4m3fn", scaled=True)
        with cast(model, form, "activations", all_maps(model)):
            handle = model.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda _, a: reads.append(a[0]))
            logits_of(model, batch)
            handle.remove()
        assert torch.equal(reads[0], form(reads[0]))  # casting twice changes nothing
        levels = reads[0] / (reads[0].abs().max() / 448)
        assert torch.allclose(levels.to(torch.float8_e4m3fn).float(), levels, rtol=1e-5)

    def test_everything_is_put_back_after_an_error(self) -> None:
        model = tiny("llama", 2)
        before = weights(model)

        def fails(*_: Any) -> None:
            raise RuntimeError("in the middle of a map")

        handle = model.model.layers[1].mlp.up_proj.register_forward_hook(fails)
        with (
            pytest.raises(RuntimeError, match="in the middle"),
            cast(model, Format("int8", scaled=True), "both", all_maps(model)),
        ):
            logits_of(model, text_batch(model))
        handle.remove()
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class TestExperts:
    """One parameter holds a role's weights of all experts; every expert has scales of its own."""

    @pytest.mark.parametrize("family", ["Mixtral", "GptOss"])
    def test_as_if_every_expert_had_been_stored_so(self, family: str) -> None:
        model, batch = mixture(family), text_batch(tiny("llama", 1))
        stored, before = copy.deepcopy(model), weights(model)
        for form in (Format("int8", scaled=True), Format("nvfp4", scaled=True)):
            with torch.no_grad():
                for one in all_maps(stored):
                    parts = one.weight.data if one.experts else [one.weight.data]
                    held = [form(part.mT).mT if one.turned else form(part) for part in parts]
                    one.weight.data = torch.stack(held) if one.experts else held[0]
            with cast(model, form, "weights", all_maps(model)):
                assert torch.equal(logits_of(model, batch), logits_of(stored, batch))
            stored.load_state_dict(before)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert {one.parameter for one in all_maps(model) if one.experts} == {"gate_up_proj", "down_proj"}

    def test_what_the_last_map_reads_is_cast_inside_of_the_module(self) -> None:
        model, batch, form = mixture("Mixtral"), text_batch(tiny("llama", 1)), Format("int4_channel", scaled=True)
        plain = logits_of(model, batch)
        with cast(model, form, "activations", [one for one in all_maps(model) if one.inside]):
            found = logits_of(model, batch)

        def by_hand(experts: Any, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
            gate, up = (x @ experts.gate_up_proj.mT).chunk(2, -1)  # (experts, tokens, features)
            every = form(experts.act_fn(gate) * up) @ experts.down_proj.mT
            return sum(shares[:, k, None] * every[chosen[:, k], torch.arange(len(x))] for k in range(chosen.shape[1]))

        for layer in model.model.layers:
            layer.mlp.experts.forward = partial(by_hand, layer.mlp.experts)
        assert torch.allclose(found, logits_of(model, batch), atol=1e-5)
        assert not torch.allclose(found, plain, atol=1e-3)


def mixture(family: str) -> Any:
    """Two layers of four experts, alike from run to run."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 2, "vocab_size": VOCABULARY, "num_local_experts": 4, "initializer_range": 0.2,
    }  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**sizes)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def all_maps(model: nn.Module) -> list[LinearMap]:
    return maps_of(require_roles(attach(model, mapping_of(model))))

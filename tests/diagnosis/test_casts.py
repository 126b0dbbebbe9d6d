"""Casts hold what torch's own formats hold; the model is as before afterwards; noise is by its definition."""

from __future__ import annotations

import copy
import math
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from diagnosing import VOCABULARY, logits_of, mapping_of, text_batch, tiny
from diagnosis.test_signal import streams
from signalprop.attachment.attached import attach, require_roles
from signalprop.diagnosis.casts import LinearMap, cast, casts, maps_of
from signalprop.diagnosis.number_formats import PER_TENSOR, SCALED, Format
from signalprop.diagnosis.result import Cast, Estimate, MapNoise
from signalprop.diagnosis.sensitivity import by_map, to_leave_out
from signalprop.diagnosis.stream import loss
from signalprop.repair.left_out import left_out
from signalprop.report.diagnosis_tables import cast_table

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
    @pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "opt"])
    @pytest.mark.parametrize("name", ["float8_e5m2", "bfloat16"])
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
        (found,) = casts(
            attach(model, mapping), [batch], formats=[name], of=["weights"], scaled=[False], skip_first=SKIP
        )
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
        assert {name.rpartition(".")[2] for one in all_maps(model) if one.experts for name in [one.path]} == {
            "gate_up_proj", "down_proj"
        }  # fmt: skip

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

    def test_each_stack_has_its_damage_and_its_place_in_the_lists(self) -> None:
        model, batch = mixture("Mixtral"), text_batch(tiny("llama", 1))
        mapping = mapping_of(model)
        rows = casts(
            attach(model, mapping), [batch], formats=["int4_channel"], of=["weights", "activations"], skip_first=SKIP
        )
        weight, activation = by_map(attach(model, mapping), [batch], rows, skip_first=SKIP)
        path = "model.layers.0.mlp.experts"
        damages = {item.name: item.damage for item in weight.maps}
        assert (damages[f"{path}.gate_up_proj"] or 0) > 0 and (damages[f"{path}.down_proj"] or 0) > 0
        items = {item.name: item for item in activation.maps}
        assert (items[f"{path}.down_proj"].damage or 0) > 0
        router, first = items["model.layers.0.mlp.gate"], items[f"{path}.gate_up_proj"]
        assert (first.damage or 0) > 0 and (first.channel, first.token) == (router.channel, router.token)
        lists = left_out(model, {f"{path}.down_proj": "", "model.layers.0.self_attn.o_proj": ""})["runtimes"]
        assert lists["transformers"] == ["model.layers.0.self_attn.o_proj", "lm_head", path]
        assert lists["torchao"] == lists["transformers"][:2] and path in lists["vllm"]
        pattern = lists["llm-compressor"][-1].removeprefix("re:")
        assert re.match(pattern, f"{path}.3.up_proj") and not re.match(pattern, "model.layers.0.mlp.gate")


class TestByMap:
    """What each map's cast does, and where it ends."""

    def test_a_map_alone_against_the_whole_model(self) -> None:
        """Noise behind its layer: that of a model with that map stored so. Damage: by a gradient per token."""
        model = tiny("gpt2", 2)
        batch, mapping = text_batch(model), mapping_of(model)
        (row,) = casts(attach(model, mapping), [batch], formats=["int4_channel"], of=["weights"], skip_first=SKIP)
        (found,) = by_map(attach(model, mapping), [text_batch(model, 1)], [row], skip_first=SKIP)
        assert {item.layer for item in found.maps} == {0, 1} and len(found.maps) == 8
        clean = streams(model, text_batch(model, 1))
        for item in found.maps:
            module, before = model.get_submodule(item.name), weights(model)
            with torch.no_grad():
                module.weight.data = Format("int4_channel", scaled=True)(module.weight.data.T).T  # of Conv1D
            noise = streams(model, text_batch(model, 1))[item.layer + 1] - clean[item.layer + 1]
            model.load_state_dict(before)
            noise[:, :SKIP] = 0
            signal = float(clean[item.layer + 1][:, SKIP:].square().sum())
            assert item.noise == pytest.approx(float(noise.square().sum()) / signal, rel=1e-4)
            assert item.damage == pytest.approx(damage_of(model, item.layer, noise[0]), rel=1e-3)

    def test_outliers_of_what_a_map_reads(self) -> None:
        """A gain of the norm makes a channel, a token's values make a token; against a plain hook."""
        model = tiny("llama", 2)
        with torch.no_grad():
            model.model.layers[1].input_layernorm.weight[3] = 40.0
            model.model.layers[1].self_attn.v_proj.weight *= 100
        batch, mapping = text_batch(model), mapping_of(model)
        (row,) = casts(attach(model, mapping), [batch], formats=["int4_channel"], of=["weights"], skip_first=SKIP)
        (found,) = by_map(attach(model, mapping), [batch], [row], skip_first=SKIP)
        items = {item.name: item for item in found.maps}
        read: dict[str, torch.Tensor] = {}
        for name, module in maps_by_name(model).items():
            module.register_forward_pre_hook(lambda _, args, name=name: read.update({name: args[0][0, SKIP:]}))
        streams(model, text_batch(model, 1))
        for name, x in read.items():
            rms = x.square().mean().sqrt()
            assert items[name].channel == pytest.approx(float(x.square().mean(0).sqrt().max() / rms), rel=1e-4)
            assert items[name].token == pytest.approx(float(x.square().mean(1).sqrt().max() / rms), rel=1e-4)
        value = items["model.layers.1.self_attn.v_proj"]
        assert value.largest_channel == 3 and value.channel is not None and value.channel > 5
        untouched = items["model.layers.0.self_attn.v_proj"].channel
        assert untouched is not None and untouched < value.channel / 2
        worst = found.model_copy(update={"maps": (value.model_copy(update={"damage": 1.0, "channel": 7.0}),)})
        (spared,) = to_leave_out(model, [worst])
        assert spared.reasons[value.name].endswith("; channel 3 of what it reads is 7 times the root mean square")

    def test_the_worst_are_left_out(self) -> None:
        """Half of the damage, in at most a tenth of the maps; nothing where the damage is small."""
        model = tiny("llama", 3)

        def row(*damages: float) -> Cast:
            names = list(maps_by_name(model))
            items = [MapNoise(name=n, layer=0, noise=1.0, damage=d) for n, d in zip(names, damages, strict=True)]
            nothing = Estimate(value=None)
            return Cast(
                format="nvfp4", of="both", scaled=True, loss=nothing, increase=nothing, maps=tuple(items)
            )  # fmt: skip

        (found,) = to_leave_out(model, [row(0.1, *[0.01] * 19, 0.3)])
        assert list(found.reasons)[:2] == [list(maps_by_name(model))[20], "lm_head"]
        assert found.reasons[list(maps_by_name(model))[20]] == "51 % of the damage, 0.3 nats per token"
        assert to_leave_out(model, [row(*[1e-5] * 21)]) == ()
        some: Any = [SimpleNamespace(casts=[row(*[damage] * 21)]) for damage in (0.1, 0.0)]
        told, bare = map(cast_table, some)
        assert "within a factor of 3" in told and "damage" not in bare
        assert len(to_leave_out(model, [row(*[0.1] * 21)])[0].reasons) == 3 + 1  # a tenth of 21, and the head


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


def maps_by_name(model: Any) -> dict[str, nn.Module]:
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}


def damage_of(model: Any, layer: int, noise: Tensor) -> float:
    """Half the sum over tokens of the squared change of the loss's sum by the noise there alone, per target."""
    at = torch.zeros(
        noise.shape[0], 1, dtype=noise.dtype, requires_grad=True
    )  # one number per token: how much of its noise is added

    def shift(_: Any, __: Any, output: Any) -> Any:
        out = output if isinstance(output, Tensor) else output[0]
        return out + (at * noise).to(out) if isinstance(output, Tensor) else (out + (at * noise).to(out), *output[1:])

    handle = model.transformer.h[layer].register_forward_hook(shift)
    batch = text_batch(model, 1)
    logits = model(input_ids=torch.as_tensor(batch.tokens)).logits
    handle.remove()
    targets = torch.as_tensor(batch.targets)
    total = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
    (change,) = torch.autograd.grad(total, at)
    return float(0.5 * change.square().sum() / (targets >= 0).sum())

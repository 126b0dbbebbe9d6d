"""What is done to weights to plant a fault."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def blocks(model: Any) -> Any:
    """The list of layers."""
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1)


def named(model: Any, *words: str, dims: int | None = None) -> list[Any]:
    """Parameters in whose names one of the words stands."""
    return [
        p for name, p in model.named_parameters()
        if any(word in name for word in words) and (dims is None or p.ndim == dims)
    ]  # fmt: skip


def each(*words: str, change: Callable[[Tensor], Any], dims: int | None = None) -> Callable[[Any], None]:
    """A change of all parameters in whose names one of the words stands."""

    def plant(model: Any) -> None:
        found = named(model, *words, dims=dims)
        assert found, words
        for p in found:
            change(p)

    return plant


def in_layers(layers: tuple[int, ...], *words: str, change: Callable[[Tensor], Any]) -> Callable[[Any], None]:
    """A change in some layers only."""

    def plant(model: Any) -> None:
        for i in layers:
            found = [p for name, p in blocks(model)[i].named_parameters() if any(word in name for word in words)]
            assert found, words
            for p in found:
                change(p)

    return plant


def buffer(word: str, change: Callable[[Tensor], Any]) -> Callable[[Any], None]:
    """A change of all buffers in whose names a word stands."""

    def plant(model: Any) -> None:
        found = [b for name, b in model.named_buffers() if word in name]
        assert found, word
        for b in found:
            change(b)

    return plant


def zero(p: Tensor) -> Tensor:
    """Zeros."""
    return p.zero_()


def nan_row(row: int) -> Callable[[Tensor], Any]:
    """One row becomes NaN."""
    return lambda p: p[row].fill_(math.nan)


def interleaved(model: Any, *, back: bool = False) -> None:
    """Rotary pairs in the other order."""
    for layer in blocks(model):
        a = layer.self_attn
        for weight in (a.q_proj.weight, a.k_proj.weight):
            half = a.head_dim // 2
            shape = (-1, half, 2, weight.shape[1]) if back else (-1, 2, half, weight.shape[1])
            weight.copy_(weight.clone().view(shape).transpose(1, 2).reshape(weight.shape))


def regrouped(model: Any) -> None:
    """Query heads numbered the other way round."""
    heads, keys = model.config.num_attention_heads, model.config.num_key_value_heads
    order = torch.arange(heads).view(keys, -1).t().reshape(-1)
    for layer in blocks(model):
        q, o = layer.self_attn.q_proj.weight, layer.self_attn.o_proj.weight
        q.copy_(q.clone().view(heads, -1, q.shape[1])[order].reshape(q.shape))
        o.copy_(o.clone().view(o.shape[0], heads, -1)[:, order].reshape(o.shape))


def swapped(model: Any, first: str, second: str) -> None:
    """Two maps of every layer change places."""
    for layer in blocks(model):
        a, b = (next(p for n, p in layer.named_parameters() if word in n) for word in (first, second))
        held = a.clone()
        a.copy_(b)
        b.copy_(held)


def turned(*words: str) -> Callable[[Any], None]:
    """Square maps the other way round."""
    return each(*words, change=lambda p: p.copy_(p.t().clone()), dims=2)


def fused_turned(part: int) -> Callable[[Any], None]:
    """A third of GPT-2's fused map, the other way round."""

    def plant(model: Any) -> None:
        width = model.config.n_embd
        for block in blocks(model):
            view = block.attn.c_attn.weight[:, part * width : (part + 1) * width]
            view.copy_(view.t().clone())

    return plant


def fused_order(*order: int) -> Callable[[Any], None]:
    """The thirds of GPT-2's fused map in another order."""

    def plant(model: Any) -> None:
        for block in blocks(model):
            for p in block.attn.c_attn.parameters():
                parts = p.clone().chunk(3, -1)
                p.copy_(torch.cat([parts[i] for i in order], -1))

    return plant


def reordered(order: Callable[[int], list[int]]) -> Callable[[Any], None]:
    """Layers in another order."""

    def plant(model: Any) -> None:
        held = blocks(model)
        for place, layer in enumerate([held[i] for i in order(len(held))]):
            held[place] = layer

    return plant


def drawn_anew(*layers: int) -> Callable[[Any], None]:
    """Layers as an initialiser leaves them."""

    def plant(model: Any) -> None:
        for i in layers:
            for name, p in blocks(model)[i].named_parameters():
                if p.ndim > 1:
                    p.normal_(0, 0.02)
                else:
                    p.fill_(float("bias" not in name))

    return plant


def copied(source: int, target: int) -> Callable[[Any], None]:
    """A layer becomes a copy of another."""
    return lambda model: blocks(model)[target].load_state_dict(blocks(model)[source].state_dict())


def based(base: float) -> Callable[[Any], None]:
    """Another rotary base, in the configuration too."""

    def plant(model: Any) -> None:
        model.config.rope_parameters = {"rope_type": "default", "rope_theta": base}
        buffer("inv_freq", lambda b: b.copy_(base ** -(torch.arange(len(b)) / len(b))))(model)

    return plant


def attribute(name: str, value: Callable[[Any], Any]) -> Callable[[Any], None]:
    """An attribute of every module that has it."""

    def plant(model: Any) -> None:
        found = [m for m in model.modules() if hasattr(m, name)]
        assert found, name
        for module in found:
            setattr(module, name, value(getattr(module, name)))

    return plant


def times_output(word: str, factor: float) -> Callable[[Any], None]:
    """What a module outputs, times a factor."""

    def plant(model: Any) -> None:
        module = next(m for name, m in model.named_modules() if name.endswith(word))
        module.register_forward_hook(lambda _, args, out: out * factor)

    return plant


def head_apart(model: Any, std: float = 0.02) -> None:
    """A head of its own, freshly drawn."""
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(torch.randn(model.lm_head.weight.shape) * std)


def head_of_zero(n: int, layer: int) -> Callable[[Any], None]:
    """One head's part of the output map becomes 0."""

    def plant(model: Any) -> None:
        a = blocks(model)[layer].self_attn
        a.o_proj.weight[:, n * a.head_dim : (n + 1) * a.head_dim] = 0

    return plant


def scaled_by_depth(*words: str) -> Callable[[Any], None]:
    """Maps are drawn with the factor 1/sqrt(2 N)."""

    def plant(model: Any) -> None:
        std = 0.02 / math.sqrt(2 * len(blocks(model)))
        for p in named(model, *words, dims=2):
            p.normal_(0, std)

    return plant


def fan_in_of_the_width(model: Any) -> None:
    """LeCun draws with the width's fan-in everywhere, the maps that end a branch over the depth."""
    n, width = len(blocks(model)), model.config.hidden_size
    for layer in blocks(model):
        for name, p in layer.named_parameters():
            if p.ndim == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                p.normal_(0, (width * (n if last else 1)) ** -0.5)


def fused_by_heads(model: Any) -> None:
    """GPT-2's fused map stored head by head, (heads, 3, d_head), where the model reads thirds."""
    heads = model.config.n_head
    for block in blocks(model):
        for p in block.attn.c_attn.parameters():
            parts = p.clone().unflatten(-1, (3, heads, -1)).transpose(-3, -2)
            p.copy_(parts.reshape(p.shape))


def experts_swapped(model: Any) -> None:
    """Gate and up halves of every expert change places."""
    for p in named(model, "gate_up_proj"):
        p.copy_(p.roll(p.shape[1] // 2, 1))


def stretched(factor: float) -> Callable[[Any], None]:
    """Rotary positions divided by a factor, as the configuration says."""

    def plant(model: Any) -> None:
        model.config.rope_parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": factor}
        buffer("inv_freq", lambda b: b.div_(factor))(model)

    return plant


def adapters_times(factor: float) -> Callable[[Any], nn.Module]:
    """Adapters that the base weights need, with a factor (lora_alpha / r) that is wrong."""

    def plant(model: Any) -> nn.Module:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        outer: Any = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "o_proj"]))
        for module in outer.modules():
            if hasattr(module, "lora_B"):
                a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
                b.normal_(0, 0.3)
                module.get_base_layer().weight.sub_(2 * b @ a)
                module.scaling["default"] = 2 * factor
        peft: nn.Module = outer.eval()
        return peft

    return plant


def in_half_precision(factor: float) -> Callable[[Any], None]:
    """float16, with down maps and what they read larger, and the stream the same: only the format's range is left."""

    def plant(model: Any) -> None:
        for layer in blocks(model):
            layer.mlp.up_proj.weight.mul_(factor)
            layer.mlp.down_proj.weight.div_(factor)
        model.half()

    return plant

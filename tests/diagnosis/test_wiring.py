"""Wiring faults of fresh models: PyTorch's own attention, rewritten blocks of transformers, no false alarms."""

from __future__ import annotations

import math
from types import MethodType
from typing import Any

import benchmarks.doctor.models as small
import pytest
import torch
from torch import Tensor, nn

from choice import some
from diagnosing import tiny
from measurement.conftest import fresh, models
from signalprop.diagnosis.run import diagnose
from signalprop.diagnosis.wiring import wiring_of
from signalprop.streams.arguments import tiny_arguments

WIDTH, HEADS, WORDS = 32, 4, 50
IDS = torch.randint(0, WORDS, (1, 24), generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    def __init__(self, scale: float | None, before: float) -> None:
        super().__init__()
        self.maps, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.before = scale, before

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.maps(x).chunk(3, -1))
        made = nn.functional.scaled_dot_product_attention(q * self.before, k, v, is_causal=True, scale=self.scale)
        return self.out(made.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, scale: float | None, before: float) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(scale, before)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


class Decoder(nn.Module):
    def __init__(self, scale: float | None = None, before: float = 1.0) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block(scale, before) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def named(
    model: nn.Module, arguments: dict[str, Any] | None = None, own: bool = True, causal: bool = True
) -> list[tuple[str, Any]]:
    torch.manual_seed(0)
    found = wiring_of(model.eval(), arguments or {"ids": IDS}, own=own, causal=causal)
    return [(one.name, one.layers) for one in found]


@pytest.mark.parametrize("scale", [None, 1.0, 1 / WIDTH, math.sqrt(8)])
def test_the_scale_of_pytorchs_own_attention(scale: float | None) -> None:
    assert named(Decoder(scale)) == ([] if scale is None else [("score scale", (0, 1, 2))])


def test_a_scale_on_queries_counts() -> None:
    assert named(Decoder(1.0, before=8**-0.5)) == []
    assert named(Decoder(None, before=8**-0.5)) == [("score scale", (0, 1, 2))]


@pytest.mark.parametrize("before", [1.0, 0.5])
def test_large_values_in_the_same_map_are_no_factor_on_queries(before: float) -> None:
    model = Decoder(before=before)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.maps.weight[2 * WIDTH :] *= 4  # what DeepScaleLM draws where tokens hardly correlate
    assert named(model) == ([] if before == 1 else [("score scale", (0, 1, 2))])


def skipping(kept: float) -> Any:
    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = kept * hidden_states + self.attn(self.ln_1(hidden_states), attention_mask=kwargs.get("attention_mask"))[0]
        return x + self.mlp(self.ln_2(x))

    return forward


@pytest.mark.parametrize(("kept", "name"), [(0.0, "no skip"), (2.0, "doubled skip")])
def test_a_block_of_transformers_that_was_rewritten(kept: float, name: str) -> None:
    model = tiny("gpt2", 4)
    arguments = {"input_ids": IDS % model.config.vocab_size}
    assert named(model, arguments, own=False, causal=False) == []
    block = model.transformer.h[2]
    block.forward = MethodType(skipping(kept), block)
    assert named(model, arguments, own=False) == [(name, (2,))]


def test_what_keeps_a_model_from_being_understood_is_named() -> None:
    torch.manual_seed(0)
    model = Decoder()
    nn.init.zeros_(model.blocks[1].norm.weight)
    nn.init.zeros_(model.blocks[1].norm.bias)
    (found,) = (v for v in diagnose(model.eval(), IDS).findings if v.severity == "fault")
    assert "blocks.1.norm" in found.text and found.layers == (1,)


@pytest.mark.slow
@pytest.mark.parametrize("family", models())
def test_nothing_is_said_of_fresh_families(family: str) -> None:
    model = fresh(family).eval()
    arguments = tiny_arguments(model)
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.ndim == 2 and not value.is_floating_point() and family != "whisper":
            arguments[name] = value.repeat(1, -(-24 // value.shape[1]))[:, :24]
    assert named(model, arguments, own=False, causal=False) == []


@pytest.mark.parametrize("tied", some([False, True], (True,)))
def test_a_head_that_copies_the_table(tied: bool) -> None:
    """In a model of one's own: two parameters with one set of numbers are no tied head; one parameter is."""
    torch.manual_seed(0)
    model = small.Decoder(layers=3, width=32).eval()
    table = model.tokens.weight
    model.head.weight = table if tied else nn.Parameter(table.detach().clone())
    found = {one.name: one.text for one in diagnose(model, small.words(), jacobian_sequences=0, trials=False).findings}
    assert ("head not tied" in found) is not tied
    assert tied or "their numbers are equal until training changes them" in found["head not tied"]

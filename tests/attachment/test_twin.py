"""A model that replays cannot prove, by its twin: held to the same model's own proof in single precision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import signalprop as sp
from measurement.conftest import moved
from signalprop.attachment import twin
from signalprop.attachment.anatomy import attach, require_roles
from signalprop.attachment.mapping import Mapping

# Fused by blocks and by groups; layers that differ; post-norm, two stacks, images.
NAMES = ["gpt2", "gpt_neox", "qwen2_moe", "gemma3", "bert", "t5-gated", "vit"]


def stranger(name: str, **changes: Any) -> Any:
    model = moved(name, **changes).eval()
    model.config.model_type = "stranger"
    return model


def said(mapping: Mapping) -> Any:
    rows = [
        {k: str(v) if k == "weights" else v for k, v in vars(item).items() if k not in ("skip", "multiplier")}
        for item in mapping.sublayers
    ]
    head = replace(mapping.head, scale=pytest.approx(mapping.head.scale, rel=1e-6))  # type: ignore[arg-type]
    ends = mapping.embedding, head, mapping.final_norm, mapping.encoder_final_norm, mapping.gain_offset
    return mapping.architecture, rows, ends, mapping.layers


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in NAMES[:2])) for n in NAMES])
def test_the_twin_of_a_half_precise_model_says_what_its_own_proof_says(name: str) -> None:
    model = stranger(name)
    own = require_roles(attach(model)).mapping
    by_twin = require_roles(attach(model.bfloat16()))
    assert said(by_twin.mapping) == said(own)
    assert "random model of the same configuration" in by_twin.mapping.notes[-1]
    assert by_twin.mapping.arguments.dtype == torch.bfloat16  # type: ignore[union-attr]


def test_layers_beyond_the_twins_two_are_carried_over_and_a_twin_is_proved_once(monkeypatch: Any) -> None:
    made = []
    monkeypatch.setattr(twin, "fresh", lambda cls, config: made.append(config.n_layer) or cls(config))
    for _ in range(2):
        model = stranger("gpt2", n_layer=5, n_embd=24)
        table = sp.read_parametrization(model)
        by_twin = sp.read_parametrization(model.bfloat16())
        assert by_twin.architecture == table.architecture
        torch.testing.assert_close(by_twin.weights["query"], table.weights["query"], rtol=1e-2, atol=0)
    assert made == [2]
    assert "with 2 layers" in require_roles(attach(model)).mapping.notes[-1]


def test_a_scheme_on_the_meta_device_is_the_one_that_is_drawn_later() -> None:
    with torch.device("meta"):
        model = stranger("gpt2")
    table = sp.apply(model, "deepscalelm", seed=0)
    model.to_empty(device="cpu")
    sp.initialize(model)
    assert sp.check(model, "deepscalelm").ok
    assert sp.apply(stranger("gpt2"), "deepscalelm", redraw=True, seed=0) == table


class Whole(nn.Module):
    """A map whose weight is held as integers."""

    def __init__(self, of: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter((of.weight.abs().max() / 127).half())
        self.weight = nn.Parameter((of.weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.scale.to(x.dtype) * self.weight.to(x.dtype)).T


def test_a_quantised_model() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, vocab_size=60, intermediate_size=48
    )
    model: Any = transformers.LlamaForCausalLM(config).eval()
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            model.set_submodule(path, Whole(module))
    config.model_type = model.config.model_type = "stranger"
    weights = require_roles(attach(model)).mapping.sublayers[4].weights
    assert weights == {role: f"model.layers.2.self_attn.{role[0]}_proj" for role in ("query", "key", "value", "output")}
    with pytest.raises(sp.InputError, match="layer 0 attention query: a Whole holds packed integers"):
        sp.apply(model, "deepscalelm", seed=0)


SIZES = {"vocab_size": 60, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", ["llama", "gptj"])  # GPT-J has no file, so a twin says what its weights are
def test_a_model_quantised_by_bitsandbytes(family: str, bits: int, tmp_path: Path) -> None:
    """Read as it computes: weights to a hundredth of what they were. A scheme cannot be drawn into it."""
    pytest.importorskip("bitsandbytes")
    rotated = {"rotary_dim": 8} if family == "gptj" else {"intermediate_size": 128}
    plain = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **SIZES, **rotated))
    plain.save_pretrained(tmp_path)
    how = transformers.BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=how, device_map="cpu")
    table, expected = sp.read_parametrization(model), sp.read_parametrization(plain.eval())
    for role in ("query", "key", "value", "output", "up", "down"):
        assert table.weights[role] == pytest.approx(expected.weights[role], rel=0.01)
    with pytest.raises(sp.InputError, match=r"layer 0 attention query: a Linear.bit.* holds packed integers"):
        sp.apply(model, "deepscalelm", seed=0)


def test_where_the_layers_of_a_configuration_differ_the_twin_has_them_all() -> None:
    model = stranger("gemma3", num_hidden_layers=4).bfloat16()
    paths = twin.layer_paths(model, sp.anatomy(model).streams)
    assert twin.twin_of(model, paths, twin.KEPT) is None
    whole = twin.twin_of(model, paths, None)
    assert whole is not None and len(whole.model.layers) == 4  # type: ignore[union-attr,arg-type]


def test_no_twin_is_made_of_what_has_another_tree_of_modules() -> None:
    model = stranger("gpt2").bfloat16()
    model.transformer.h[1].extra = nn.Linear(4, 4)
    with pytest.raises(sp.InputError, match=r"give model.float\(\)"):
        sp.read_parametrization(model)

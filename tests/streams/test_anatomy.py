"""The anatomy: against transformers' own hidden states, against the families' mappings, and what it must not prove."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import signalprop as sp
from choice import some
from signalprop.attachment.found import mapping_found
from signalprop.data.batches import Batch
from signalprop.errors import InputError
from signalprop.results.profile import POINTS
from signalprop.streams.proof import prove

_SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 60, "pad_token_id": 0}
_LLAMA = {**_SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 1}
_GPT = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 60, "bos_token_id": 1, "eos_token_id": 1}
IDS = torch.arange(2, 24).reshape(2, 11)


def model_of(family: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **fields)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


# What no family knows: experts; attention and feed-forward in parallel; factors on branches; sums within a module that
# is given the stream; recurrence.
STRANGERS: dict[str, dict[str, Any]] = {
    "mixtral": {**_LLAMA, "num_local_experts": 4},
    "gptj": {**_GPT, "rotary_dim": 4},
    "granite": {**_LLAMA, "residual_multiplier": 0.22},
    "bloom": {"hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": 60},
    "mamba2": {**_SMALL, "num_heads": 8, "head_dim": 8, "n_groups": 1},
}


def test_norms_on_the_stream_that_begin_layers_stand_on_the_sums_before() -> None:
    """Those of MiniMax begin with a norm that is added to: a post-norm of the layer before; first, the embedding's."""
    model = model_of("minimax", **_LLAMA, num_local_experts=4, head_dim=8)
    profile, seen = sp.measure(model, {"input_ids": IDS}, backward=False), []
    for layer in model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.register_forward_hook(lambda _, __, out: seen.append(out.detach().double().var(unbiased=False).item()))
    model.model.norm.register_forward_hook(
        lambda _, __, out: seen.append(out.detach().double().var(unbiased=False).item())
    )
    model(IDS)
    assert profile.forward["stream_in"].variance.tolist() == pytest.approx(seen[:-1], rel=1e-6)
    assert profile.forward["stream_out"].variance.tolist() == pytest.approx(seen[1:], rel=1e-6)
    assert "layers.0 begins with a norm on the stream (model.layers.0.input_layernorm)" in str(profile.notes)


def test_a_norm_on_the_stream_that_nothing_is_added_before_is_said() -> None:
    """Grounding DINO's layers end with a norm on the stream and begin with another one."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.begin, self.end, self.up, self.down = (
                *(nn.LayerNorm(8) for _ in "ab"),
                *(nn.Linear(8, 8) for _ in "ab"),
            )
            nn.init.normal_(self.begin.weight)

        def forward(self, x: Tensor) -> Tensor:
            x = self.begin(x)
            x = x + self.up(x)
            return self.end(x + self.down(x))  # type: ignore[no-any-return]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(2))

        def forward(self, inputs: Tensor) -> Tensor:
            for layer in self.layers:
                inputs = layer(inputs)
            return inputs

    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 5, 8)
    found = sp.anatomy(model, {"inputs": x})
    assert [layer.entry_norm for layer in found.stacks[0].layers] == ["layers.0.begin", "layers.1.begin"]
    assert str(found).count("begin (layernorm), on the stream") == 1
    assert "the layers begin with a norm on the stream" in str(sp.measure(model, {"inputs": x}, backward=False).notes)


@pytest.mark.parametrize("family", some(STRANGERS, ("mixtral", "gptj", "mamba2")))
def test_layers_of_unknown_families_against_the_hidden_states_of_transformers(family: str) -> None:
    model = model_of(family, **STRANGERS[family])
    found = sp.anatomy(model)
    assert found.proved and found.error is not None and found.error < 1e-6
    profile = sp.measure(model, {"input_ids": IDS}, backward=False)
    hidden = model(IDS, output_hidden_states=True).hidden_states[family != "mamba2" :]  # which gives no embeddings
    last = {row["layer"]: i for i, row in enumerate(profile.to_json()["sublayers"])}
    assert len(last) == 3
    for layer in (0, 1):  # transformers gives the stream after the last layer normed
        expected = hidden[layer].double().var(unbiased=False).item()
        assert profile.forward["stream_out"].variance[last[layer]] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("family", "fields"), [("llama", _LLAMA), ("gpt_neox", {**_SMALL, "intermediate_size": 48}), ("gpt2", _GPT)]
)
def test_known_families_measure_the_same_through_what_was_found(family: str, fields: dict[str, Any]) -> None:
    model = model_of(family, **fields)
    batch = {"input_ids": IDS, "labels": IDS}
    known, found = (
        sp.measure(model, batch),
        sp.measure(model, batch, mapping=mapping_found(model, sp.anatomy(model).streams)),
    )
    for point in POINTS:
        for name in ("variance", "token_correlation"):
            for side in ("forward", "gradient"):
                one, other = (getattr(getattr(p, side)[point], name) for p in (known, found))
                np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def test_what_needs_no_weights_works_on_the_stream_alone_and_what_does_says_so() -> None:
    model = model_of("granite", **STRANGERS["granite"])
    batch = Batch(IDS.numpy(), IDS.numpy())
    hidden = model(IDS, output_hidden_states=True).hidden_states[1:3]
    found = [layer.variance for layer in sp.diagnose(model, [batch], skip_first=0).signal[:2]]
    assert found == pytest.approx([h.var(-1, unbiased=False).mean().item() for h in hidden], rel=1e-5)
    with sp.SignalMonitor(model, every=1, tolerance=None) as monitor:
        model(IDS, labels=IDS).loss.backward()
        assert monitor.step()
    unknown = model_of("mamba", **_SMALL)
    for verb in (sp.read_parametrization, lambda m: sp.check(m, "gpt2")):
        with pytest.raises(InputError, match=r"^give a mapping"):
            verb(unknown)


def test_multipliers_norms_and_their_gains() -> None:
    [stack] = sp.anatomy(model_of("granite", **STRANGERS["granite"])).stacks
    assert {(b.skip.value, b.multiplier.value, b.placement) for b in stack.branches} == {(1.0, 0.22, "pre")}
    gemma = sp.anatomy(model_of("gemma2", **_LLAMA, head_dim=8))
    assert {(n.kind, n.offset) for n in gemma.norms} == {("rmsnorm", 1.0)} and gemma.norms[0].error < 1e-6
    assert {b.placement for b in gemma.stacks[0].branches} == {"sandwich"}
    parallel = sp.anatomy(model_of("gptj", **STRANGERS["gptj"])).stacks[0]
    assert [(b.sort, b.parallel) for b in parallel.layers[2].branches] == [("attention", False), ("feed_forward", True)]


def test_a_wrong_claim_is_not_proved() -> None:
    model = model_of("llama", **_LLAMA)
    found = sp.anatomy(model)
    stack = found.stacks[0]
    layer = stack.layers[1]
    branch = replace(layer.branches[0], multiplier=replace(layer.branches[0].multiplier, value=1.001))
    wrong = replace(stack, layers=(stack.layers[0], replace(layer, branches=(branch, layer.branches[1]))))
    [again], _ = prove(model, {"input_ids": IDS}, (wrong,))
    assert [b.proved for b in again.branches] == [True, True, False, True]


class Block(nn.Module):
    """Multipliers in three ways: a parameter, a lerp, and a factor on all after an addition in place."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([0.3]))
        self.one, self.two, self.three = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gain * self.one(x)
        x = torch.lerp(x, self.two(x), 0.25)
        return x.mul(0.5).add_(F.dropout(self.three(x), 0.5, self.training))


class Loose(nn.Module):
    """Layers whose own forward never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 16)
        parts = ({"norm": nn.LayerNorm(16), "map": nn.Linear(16, 16)} for _ in range(4))
        self.layers = nn.ModuleList(nn.ModuleDict(part) for part in parts)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + layer["map"](layer["norm"](x))
        return x


def test_models_of_your_own() -> None:
    torch.manual_seed(0)
    blocks = sp.anatomy(nn.Sequential(Block(), Block()), {"input": torch.randn(2, 5, 16)}).stacks[0]
    found = [(b.skip.value, b.multiplier.value, b.multiplier.parameter) for b in blocks.layers[1].branches]
    assert found == [(1.0, pytest.approx(0.3), "1.gain"), (0.75, 0.25, ""), (0.5, 1.0, "")]
    assert all(branch.proved for branch in blocks.branches)
    loose = Loose()
    [stack] = sp.anatomy(loose).stacks
    assert [b.module for b in stack.branches] == [f"layers.{i}.map" for i in range(4)]
    assert {b.placement for b in stack.branches} == {"pre"} and all(b.proved for b in stack.branches[:-1])


class Mixed(nn.Module):
    """A layer with one branch between two norms and one with a norm at its end alone, as in gemma4."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.after, self.last = (nn.LayerNorm(16) for _ in range(3))
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.after(self.one(self.norm(x)))
        return x + self.last(self.two(x))


class Pooling(Loose):
    """Lists of layers in a list; all but the first read half the tokens and are added to its output, as in funnel."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(Mixed() for _ in range(2)) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = first = self.table(ids)
        for i, block in enumerate(self.layers):
            x = F.max_pool1d(x.mT, 2).mT if i == 1 else x
            for layer in block:
                x = layer(x)
            first = x if i == 0 else first
        return first + x.repeat_interleave(2, 1)


def test_a_stream_that_passes_by_some_layers_is_not_one_stack() -> None:
    found = sp.anatomy(Pooling(), {"ids": torch.arange(8)[None]})
    assert [stack.path for stack in found.stacks] == ["layers.0", "layers.1", "layers.2"]


class Channels(nn.Module):
    """A vector over channels that are not last, in a view of its own, as in poolformer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.map = nn.Parameter(torch.full((8,), 0.5)), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale[:, None, None] * self.map(x)


def test_a_multiplier_over_channels_is_proved_in_the_shape_in_which_it_multiplies() -> None:
    found = sp.anatomy(nn.Sequential(Channels(), Channels()), {"input": torch.randn(1, 8, 4, 4)})
    assert found.proved and found.stacks[0].branches[0].multiplier.parameter == "0.scale"


def test_structure_without_numbers() -> None:
    config = transformers.AutoConfig.for_model("llama", **{**_LLAMA, "num_hidden_layers": 40})
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    found = sp.anatomy(model)
    text = str(found)
    assert repr(found).startswith("<Anatomy of ") and len(repr(found)) < 200
    assert not found.proved and "structure only" in text and "layers 0-39" in text
    assert "input_layernorm -> self_attn (attention)" in text


def test_no_stream_is_one_line() -> None:
    with pytest.raises(InputError, match=r"^give a mapping.*no residual stream was found") as caught:
        sp.anatomy(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    assert "\n" not in str(caught.value)


class _Shift(nn.Module):
    """RWKV's shift: a mean of each token and the one before, then a map."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.sigmoid(x) * nn.functional.pad(x, (0, 0, 1, -1)))


class _InLists(nn.Module):
    """Layers that are members of several lists."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norms = nn.Embedding(20, 8), nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.mixes = nn.ModuleList(_Shift() for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.words(ids)
        for norm, mix in zip(self.norms, self.mixes, strict=True):
            x = x + mix(norm(x))
        return x


def test_a_shift_over_tokens_is_no_feed_forward() -> None:
    text = str(sp.anatomy(_InLists(), torch.arange(8)[None]))
    assert "layers 0-1\n" in text and "+-- norms.* (layernorm) -> mixes.* (branch)" in text

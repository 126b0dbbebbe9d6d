"""What weights are, proved by replay: against the families' tables, in models that no family knows, and refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import signalprop as sp
from choice import some
from commandline import Command
from measurement.conftest import moved
from signalprop.attachment.found import mapping_found
from signalprop.attachment.found_roles import mapping_with_roles
from signalprop.data import Batch
from signalprop.network.parametrization import ROLES

_LLAMA = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 60, "pad_token_id": 0,
    "intermediate_size": 48, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 1, "initializer_range": 0.2,
}  # fmt: skip


def published(family: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**_LLAMA, **fields})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def stranger(family: str, **fields: Any) -> Any:
    """A model of transformers under a name that no family has."""
    model = published(family, **fields)
    model.config.model_type = "stranger"
    return model


# Separate, fused in blocks and in groups; grouped heads; rotated in halves and by share (ALiBi: bloom below); tables of
# positions, of distances, of segments; gates; convolutions; pre, post, sandwich, res-post; gains 1 + w; norms of
# queries, of one head and of all; transposed maps; patches; a second stack with cross-attention; heads tied,
# scaled, transformed.
FAMILIES = ["llama", "gpt2", "bert", "gemma3", "gpt_neox", "falcon-grouped", "phi", "olmo2", "mpnet", "t5-gated", "vit",
            "bart", "opt", "qwen3", "lfm2"]  # fmt: skip


# The others are slow tests: llama's maps stand in qwen3, phi's in gpt_neox, opt's in bart, olmo2's norms in gemma3,
# mpnet's distances in t5-gated; attachment and diagnosis read ViTs.
SLOW = ("llama", "phi", "opt", "olmo2", "mpnet", "vit")


@pytest.mark.parametrize("name", some(FAMILIES, set(FAMILIES) - {*SLOW}))
def test_what_is_proved_is_what_the_family_says(name: str) -> None:
    model = moved(name).eval()
    known, found = sp.read_parametrization(model), sp.read_parametrization(model, mapping_with_roles(model))
    for role in ROLES:
        np.testing.assert_array_equal(found.weights[role], known.weights[role])
        np.testing.assert_array_equal(found.biases[role], known.biases[role])
    for column in ("skip", "branch", "norm_gain", "post_norm_gain", "score_scale"):
        np.testing.assert_allclose(getattr(found, column), getattr(known, column), rtol=1e-6)
    for end in ("embedding", "head"):
        for name, value in vars(getattr(known, end)).items():
            assert getattr(getattr(found, end), name) == (pytest.approx(value) if type(value) is float else value)
    for field in ("kind", "n_heads", "n_kv_heads", "d_head", "d_ff", "gated", "activation", "norm", "norm_eps",
                  "qk_norm", "positions", "rotary_base", "rotary_fraction", "n_segments", "embedding_norm", "bias",
                  "qkv_bias", "dropout", "shared_norm", "tied_embeddings", "head", "head_transform"):  # fmt: skip
        assert getattr(found.architecture, field) == getattr(known.architecture, field), field
    one, other = (sp.predict(p).forward["stream_out"].variance for p in (found, known))
    np.testing.assert_allclose(one, other, rtol=1e-5)


def test_a_feed_forward_whose_norm_gives_what_is_added_is_not_sought_in_the_convolution_beside_it() -> None:
    model = published("lfm3", layer_types=["conv", "full_attention", "conv"], use_sandwich_norm=True)
    found = [set(row.weights) for row in mapping_with_roles(model).sublayers]
    assert found[1] == found[3] == {"gate", "up", "down"} and "conv_filter" in found[0] and "query" in found[2]


STRANGERS: dict[str, dict[str, Any]] = {
    "granitemoeshared": {"num_local_experts": 4},
    "hyperclovax": {
        "use_post_norm": False,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
    },
    "gptj": {"n_embd": 32, "n_layer": 3, "n_head": 4, "rotary_dim": 4},
    "bloom": {"n_layer": 3, "n_head": 4},
}


@pytest.mark.parametrize(
    "family",
    some(STRANGERS, ("hyperclovax",)),
)
def test_models_that_no_family_knows_are_predicted_and_initialised(family: str) -> None:
    model = stranger(family, **STRANGERS[family])
    batch = {"input_ids": torch.randint(2, 60, (4, 11), generator=torch.Generator().manual_seed(0))}

    def last(profile: Any) -> float:
        return float(profile.forward["stream_out"].variance[-1])

    now = sp.read_parametrization(model)
    short = now.architecture.replace(seq_len=11)
    assert last(sp.predict(sp.read_parametrization(model, architecture=short))) == pytest.approx(
        last(sp.measure(model, batch, backward=False)), rel=0.3
    )
    if family == "hyperclovax":
        assert set(now.branch) == {0.3} and set(now.score_scale[::2]) == {0.2}
    asked = sp.apply(model, "xavier" if family == "granitemoeshared" else "deepscalelm", seed=0)
    measured = sp.measure(model, batch, backward=False)
    drawn = replace(asked, architecture=asked.architecture.replace(seq_len=11))
    assert last(measured) == pytest.approx(last(sp.predict(drawn)), rel=0.3)
    again = stranger(family, **STRANGERS[family])
    asked = sp.apply(again, "xavier", seed=0)
    stream_alone = mapping_found(again, sp.anatomy(again).streams).architecture
    drawn = sp.read_parametrization(again, architecture=stream_alone)
    assert (
        drawn.architecture.gated == (family in ("hyperclovax", "granitemoeshared"))
        and drawn.architecture.seq_len == stream_alone.seq_len
    )
    sp.fold(again)  # the factor on the head's input goes into its weight
    if family != "hyperclovax":  # whose own factor stays, and its inverse is in the folded weights
        assert {row.place for row in sp.check(again, "xavier").rows if row.verdict != "ok"} <= {"head"}
    for role in ROLES:
        np.testing.assert_allclose(drawn.weights[role], asked.weights[role], rtol=0.1)


@pytest.mark.parametrize(
    ("family", "fields", "why"),
    [
        ("mamba", {}, "branch: "),
        ("granitemoe_swa", {"layer_types": ["full_attention"] * 3}, "q_proj, k_proj, v_proj in .* are not proved"),
        ("minimax", {"layer_types": ["linear_attention"] * 3, "num_local_experts": 4}, "qkv_proj, output_gate in"),
    ],
)  # fmt: skip
def test_a_weight_that_is_not_proved_is_named(family: str, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(sp.InputError, match=rf"^give a mapping.*{why}") as caught:
        sp.read_parametrization(stranger(family, **fields))
    assert "\n" not in str(caught.value)


class Doubled(nn.Linear):
    """No linear map of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return 1.01 * super().forward(x)


class Layer(nn.Module):
    """Plain attention and feed-forward, wrong in one way or none."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.one, self.two = nn.LayerNorm(16), nn.LayerNorm(16)
        self.a, self.b, self.c, self.d = (nn.Linear(16, 16) for _ in range(4))
        self.d = Doubled(16, 16) if fault == "map" else self.d
        self.e, self.f = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        q, k, v = (m(y).unflatten(-1, (2, 8)).transpose(1, 2) for m in (self.c, self.b, self.a))
        q = 1.01 * q if self.fault == "scale" else q
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.d(out)
        inside = self.e(self.two(x))
        return x + self.f(F.gelu(inside) if self.fault != "activation" else F.gelu(inside) + 0.001)


class Own(nn.Module):
    def __init__(self, fault: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(40, 16), nn.Embedding(12, 16)
        self.blocks = nn.ModuleList(Layer(fault) for _ in range(2))
        self.last, self.out = nn.LayerNorm(16), nn.Linear(16, 40, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.out(self.last(x))
        return y


def test_names_say_nothing_and_numbers_all() -> None:
    mapping = mapping_with_roles(Own(), {"ids": torch.tensor([[3, 9, 4, 30, 7, 22, 11]])})
    assert mapping.sublayers[2].weights == {
        "query": "blocks.1.c", "key": "blocks.1.b", "value": "blocks.1.a", "output": "blocks.1.d",
    }  # fmt: skip
    a = mapping.architecture
    assert (a.kind, a.n_heads, a.activation, a.positions, a.head) == ("decoder", 2, "gelu", "learned", "lm")
    assert (mapping.embedding.token, mapping.embedding.position, mapping.head.weight) == ("words", "places", "out")


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("scale", "blocks.0 attention: the roles of c, b, a in|blocks.0 attention: the roles of a, b, c in"),
        ("activation", "blocks.0 feed-forward: the roles of e in blocks.0.f are not proved"),
        ("map", r"blocks.0.d is not the linear map of its weight \(off by 0.01\)"),
    ],
)
def test_a_replay_that_is_off_by_a_hundredth_proves_nothing(fault: str, why: str) -> None:
    with pytest.raises(sp.InputError, match=why):
        mapping_with_roles(Own(fault), {"ids": torch.tensor([[3, 9, 4, 30, 7, 22, 11]])})


def test_half_precision_and_queries_without_effect_prove_nothing() -> None:
    with pytest.raises(sp.InputError, match=r"identified in single precision; .* so give model.float\(\)"):
        mapping_with_roles(Own("").bfloat16(), {"ids": torch.tensor([[3, 9, 4, 30, 7, 22, 11]])})
    blind = stranger("hyperclovax", use_post_norm=False)
    for layer in blind.model.layers:
        nn.init.zeros_(layer.self_attn.q_proj.weight)
    with pytest.raises(sp.InputError, match=r"attention: the roles of q_proj.* any queries and keys would do"):
        sp.read_parametrization(blind)


def test_the_command_says_what_every_weight_is_or_which_is_not_known(command: Command, tmp_path: Path) -> None:
    for family, fields in (("hyperclovax", {"use_post_norm": False}), ("mixtral", {"num_local_experts": 4})):
        published(family, **fields).save_pretrained(tmp_path / family)
    found = command("anatomy", str(tmp_path / "hyperclovax"), "--json", str(tmp_path / "found.json"))
    assert "weights proved      of 6 of 6 branches, by replay in float64" in found.out
    assert "3 x feed-forward: gate model.layers.*.mlp.gate_proj, up model.layers.*.mlp.up_proj, down" in found.out
    assert "4 heads, 2 of keys, positions rotary" in found.out
    weights = json.loads((tmp_path / "found.json").read_text())["weights"]
    assert weights["sublayers"][2]["key"] == "model.layers.1.self_attn.k_proj"
    mixtral = command("anatomy", str(tmp_path / "mixtral"))
    assert "3 x 4 experts, 2 a token by softmax: router model.layers.*.mlp.gate, expert_gate" in mixtral.out
    lightning = published("minimax", num_local_experts=4, layer_types=["linear_attention"] * 3)
    lightning.save_pretrained(tmp_path / "minimax")
    refused = command("anatomy", str(tmp_path / "minimax"))
    assert refused.status == 0 and "weights proved      of 3 of 6 branches" in refused.out
    assert "not predicted       model.layers.0 feed-forward: the roles of qkv_proj, output_gate" in refused.out


def test_ids_that_count_like_positions_leave_the_tables_in_their_places() -> None:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=64, bos_token_id=None, eos_token_id=None
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    found = mapping_with_roles(model, {"input_ids": torch.arange(12)[None]})
    assert found.embedding.token == "transformer.wte"


def test_adapters_are_part_of_their_maps() -> None:
    """LoRA of PEFT in a model of one's own: predicted as the model with the adapters merged."""
    pytest.importorskip("peft")
    from benchmarks.code_bases.parts import ids
    from benchmarks.code_bases.wrappers import lora

    model: Any = lora().eval()
    adapted = sp.predict(model, ids()).forward["stream_out"].variance
    plain = sp.predict(model.get_base_model(), ids())
    with model.disable_adapter():
        without = sp.predict(model, ids()).forward["stream_out"].variance
    merged = sp.predict(model.merge_and_unload().eval(), ids()).forward["stream_out"].variance
    assert adapted.tolist() == pytest.approx(merged.tolist(), rel=1e-6)
    assert plain.forward["stream_out"].variance.tolist() == adapted.tolist()
    assert without[-1] < 0.9 * adapted[-1]


class _CachedRotation(nn.Module):
    """An attention of torchtune: its frequencies are `theta`, its angles a buffer (tokens, width / 2, 2).

    The buffer has as many rows as the key map, as a stack of experts has beside a router.
    """

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.output_proj = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.k_proj, self.v_proj = nn.Linear(32, 16, bias=False), nn.Linear(32, 16, bias=False)
        theta = 5000.0 ** (-torch.arange(4) / 4)
        angles = torch.outer(torch.arange(16), theta)
        self.register_buffer("theta", theta, persistent=False)
        self.register_buffer("cache", torch.stack([angles.cos(), angles.sin()], -1), persistent=False)

    def rotated(self, x: Tensor) -> Tensor:
        """(batch, tokens, features) -> (batch, heads, tokens, 8), neighbouring entries rotated."""
        a, b = x.unflatten(-1, (-1, 4, 2)).unbind(-1)
        cos, sin = self.cache[: x.shape[1], None].unbind(-1)
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Causal attention with grouped keys."""
        v = self.v_proj(x).unflatten(-1, (-1, 8)).transpose(1, 2)
        heads = nn.functional.scaled_dot_product_attention(
            self.rotated(self.q_proj(x)), self.rotated(self.k_proj(x)), v, is_causal=True, enable_gqa=True
        )
        return self.output_proj(heads.transpose(1, 2).flatten(-2))


class _CachedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.RMSNorm(32), _CachedRotation()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm(x))


class _Cached(nn.Module):
    """A small model of such attentions that reads 16 tokens at most, and says so."""

    def __init__(self) -> None:
        super().__init__()
        self.max_seq_len = 16
        self.embedding, self.head = nn.Embedding(50, 32), nn.Linear(32, 50, bias=False)
        self.layers, self.norm = nn.ModuleList(_CachedLayer() for _ in range(3)), nn.RMSNorm(32)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        assert ids.shape[1] <= self.max_seq_len, "the sequence is too long"
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def test_a_cache_of_rotations_is_no_stack_of_experts() -> None:
    torch.manual_seed(0)
    model = _Cached()
    table = sp.read_parametrization(model)
    assert table.architecture.seq_len == 16
    assert table.weights["key"][0] == pytest.approx(model.layers[0].attn.k_proj.weight.std().item(), rel=0.02)
    assert sp.diagnose(model).data.length == 16
    with pytest.raises(sp.InputError, match="_Cached failed on ids: the sequence is too long"):
        sp.diagnose(model, [Batch(np.zeros((2, 20), np.int64), np.zeros((2, 20), np.int64))])
    with pytest.raises(sp.InputError, match=r"batches is \[1, 2\]; expected Batches, or tensors"):
        sp.diagnose(model, [1, 2])

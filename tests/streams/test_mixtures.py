"""Experts, gated convolutions and output gates: what their weights are, proved by replay, or not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import signalprop as sp
from signalprop.attachment.found_roles import roles_of
from signalprop.streams.replay import Replayed

_LLAMA = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 60,
    "intermediate_size": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1,
}  # fmt: skip
_MOE = {"moe_intermediate_size": 12, "num_experts_per_tok": 2, "head_dim": 8}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8,
           "num_key_value_heads": 4, "head_dim": 4}  # fmt: skip
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 8,
          "layer_types": ["linear_attention", "linear_attention"], "head_dim": 8}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {**_LLAMA, "num_local_experts": 4, "head_dim": 8},
    "qwen2_moe": {**_LLAMA, **_MOE, "num_experts": 6, "shared_expert_intermediate_size": 20, "norm_topk_prob": False,
                  "decoder_sparse_step": 1},
    "deepseek_v3": {**_LLAMA, **_MOE, **_LATENT, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
                    "first_k_dense_replace": 0, "routed_scaling_factor": 2.5, "n_shared_experts": 1},
    "granitemoe": {**_LLAMA, "num_local_experts": 4},
    "lfm2": {**_LLAMA, "layer_types": ["conv", "conv"], "block_auto_adjust_ff_dim": False},
    "minimax_m3_vl_text": {**_LLAMA, "num_local_experts": 4, "dense_intermediate_size": 24, "head_dim": 8,
                           "shared_intermediate_size": 12, "num_experts_per_tok": 2, "rotary_dim": 4,
                           "layer_types": ["full_attention"] * 2, "mlp_layer_types": ["sparse"] * 2},
    "phimoe": {**_LLAMA, "num_local_experts": 4},
    "qwen3_5_gated": {**_LLAMA, **_DELTA, "layer_types": ["full_attention", "full_attention"]},
    "laguna": {**_LLAMA, **_MOE, "num_experts": 4, "shared_expert_intermediate_size": 12},
    "lfm3": {**_LLAMA, "layer_types": ["conv", "conv"], "head_dim": 8},
}  # fmt: skip


_OWN = {"qwen3_5_gated": "qwen3_5_text"}


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(_OWN.get(family, family), **MODELS[family])
    )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "norm" in name or "bias" in name or name.endswith((".D", "A_log")):
            nn.init.uniform_(tensor.data, 0.5, 1.5)
        elif tensor.ndim > 1:
            nn.init.normal_(tensor.data, std=0.3)
    return model.eval()


def proved(family: str, branch: int) -> Any:
    return roles_of(model_of(family)).proof.branches[branch]


def test_experts_and_how_they_are_chosen() -> None:
    for family, rows in (("mixtral", slice(0, 24)), ("granitemoe", slice(0, 24))):
        found = proved(family, 1)
        block = "mlp" if family == "mixtral" else "block_sparse_moe"
        gate = next(path for role, (path, _) in found.weights.items() if role == "expert_gate")
        assert gate.startswith(f"model.layers.0.{block}.") and found.weights["expert_gate"][1] == rows
        assert (found.routing.n_experts, found.routing.top_k, found.routing.width) == (4, 2, 24)
        assert (found.routing.scores, found.routing.normalised, found.activation) == ("softmax", True, "silu")
    found = proved("qwen2_moe", 1)
    assert not found.routing.normalised and found.weights["router"] == ("model.layers.0.mlp.gate", None)
    assert found.weights["shared_router"][0] == "model.layers.0.mlp.shared_expert_gate"
    assert found.weights["shared_down"][0] == "model.layers.0.mlp.shared_expert.down_proj"


def test_groups_corrections_and_scales_of_sigmoid_routers() -> None:
    attention, experts = roles_of(model_of("deepseek_v3")).proof.branches[:2]
    assert isinstance(experts, Replayed)
    routing = experts.routing
    assert routing is not None and routing.corrected and routing.scale == 2.5
    assert (routing.scores, routing.n_groups, routing.top_groups, routing.top_k) == ("sigmoid", 4, 2, 2)
    assert isinstance(attention, str) and "are not proved" in attention  # of a family without a file the stream alone


@pytest.mark.parametrize("family", ["lfm2", "lfm3"])  # lfm3: before a norm of its own
def test_gated_convolutions(family: str) -> None:
    found = proved(family, 0)
    assert found.words == "gated convolution" and found.error < 2e-6
    roles = {"conv_filter": "conv", "conv_out": "out_proj"}
    assert roles.items() <= {role: path.rpartition(".")[2] for role, (path, _) in found.weights.items()}.items()


@pytest.mark.parametrize(
    ("family", "words", "role", "name"),
    [
        ("qwen3_5_gated", "attention with an output gate", "attention_gate", "q_proj"),
        ("laguna", "attention with an output gate", "attention_gate", "g_proj"),  # Softplus, one per head
    ],
)
def test_what_attentions_have_beside_their_maps(family: str, words: str, role: str, name: str) -> None:
    found = proved(family, 0)
    assert found.words == words and found.error < 2e-6
    assert found.weights[role][0] == f"model.layers.0.self_attn.{name}"
    if name == "q_proj":  # by heads: the query's features, then the gate's
        assert found.weights["query"][1][:8] == list(range(8)) and found.weights[role][1][:8] == list(range(8, 16))


def test_experts_whose_gates_are_clamped_and_a_sparse_mixer() -> None:
    clamped, sparse = proved("minimax_m3_vl_text", 1), proved("phimoe", 1)
    assert clamped.activation == "clamped swish" and "shared_up" in clamped.weights
    assert sparse.routing.scores == "sparse mixer" and sparse.activation == "silu"


@pytest.mark.parametrize(
    ("family", "module", "branch", "why"),
    [
        ("mixtral", "mlp.experts", 1, "holds experts, whose role in model.layers.0.mlp is not proved"),
        ("qwen2_moe", "mlp.shared_expert.down_proj", 1, "shared_expert.down_proj is not the linear map of its weight"),
        ("lfm2", "conv.in_proj", 0, "in_proj is not the linear map of its weight"),
    ],
)
def test_what_is_off_by_a_hundredth_is_not_proved(family: str, module: str, branch: int, why: str) -> None:
    model = model_of(family)
    inner = model.model.layers[0].get_submodule(module)
    forward = inner.forward
    inner.forward = lambda *args, **kwargs: forward(*args, **kwargs) + 0.01 * args[0].mean()
    found = roles_of(model).proof.branches[branch]
    assert isinstance(found, str) and re.search(why, found)


def test_recurrences_are_not_proved() -> None:
    torch.manual_seed(0)
    config = transformers.Mamba2Config(hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, vocab_size=60)
    found = roles_of(transformers.Mamba2ForCausalLM(config).eval()).proof.branches[0]
    assert isinstance(found, str)
    assert re.search("the roles of in_proj and of the convolution .*conv1d in .*out_proj are not proved", found)


def test_multipliers_of_experts_fold_into_their_last_maps(tmp_path: Path) -> None:
    ids = torch.randint(2, 60, (4, 11), generator=torch.Generator().manual_seed(0))
    model = model_of("qwen2_moe")
    before = model(ids).logits
    sp.apply(model, "layerscale", initialize=False, change_function=True)
    scaled = model(ids).logits
    assert (scaled - before).abs().max() > 0.1 * before.abs().max()
    sp.save(model, tmp_path)
    down = model.model.layers[0].mlp.experts.down_proj.clone()
    loaded = sp.load(tmp_path).eval()
    for one in (model, loaded):
        sp.fold(one)
        torch.testing.assert_close(one(ids).logits, scaled, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.model.layers[0].mlp.experts.down_proj, 0.1 * down)

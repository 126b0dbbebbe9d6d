"""Qwen3-Next: gated DeltaNets in most layers, gated attention in some, experts with a gated shared one."""

from dataclasses import replace
from typing import Any

from signalprop.errors import InputError
from signalprop.families import llama, qwen2_moe, qwen3_moe
from signalprop.families.base import BY_HAND, Config, Fields, activation_name, check_kinds, rotary
from signalprop.network.architecture import Architecture

MIXERS = {"linear_attention": "gated_delta_net", "full_attention": "attention"}


def fields(c: Config) -> Fields:
    every = range(c["num_hidden_layers"])
    period = c["full_attention_interval"]
    kinds = c["layer_types"] or ["linear_attention" if (i + 1) % period else "full_attention" for i in every]
    check_kinds(kinds, MIXERS)
    if activation_name(c["hidden_act"]) != "silu":
        raise InputError(f"a gated DeltaNet with another activation than silu is not supported; {BY_HAND}")
    shared = {"shared_width": c["shared_expert_intermediate_size"], "shared_gated": True}
    dense = qwen2_moe.dense(c)
    settings: Fields = {} if all(dense) else {"experts": qwen2_moe.routed(c) | shared}
    if "full_attention" in kinds:
        settings["attention"] = {"gate": "features"}
    if "linear_attention" in kinds:
        settings["gated_delta_net"] = {
            "n_heads": c["linear_num_value_heads"], "d_value": c["linear_value_head_dim"],
            "n_groups": c["linear_num_key_heads"], "d_key": c["linear_key_head_dim"],
            "width": c["linear_conv_kernel_dim"], "eps": c["rms_norm_eps"],
        }  # fmt: skip
    return llama.decoder({**c, "layer_types": None}) | {
        "qk_norm": True, "rotary_fraction": rotary(c, "partial_rotary_factor", 0.25), "settings": settings,
        "branches": tuple(
            (MIXERS[kind], "feed_forward" if one else "experts") for kind, one in zip(kinds, dense, strict=True)
        ),
    }  # fmt: skip


def _groups(a: Architecture) -> int:
    given: Any = a.settings["gated_delta_net"]
    return int(given.n_groups)


ATTENTION = replace(
    llama.ATTENTION,
    weights={role: path for role, path in llama.ATTENTION.weights.items() if role != "query"},
    blocks={"self_attn.q_proj": ("query", "attention_gate")},
    turns={"self_attn.q_proj": lambda a: a.n_heads},
)
_QKVZ, _BA = "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba"
DELTA = replace(
    llama.ATTENTION,
    branch="linear_attn",
    weights={"delta_filter": "linear_attn.conv1d", "delta_out": "linear_attn.out_proj"},
    blocks={_QKVZ: ("delta_query", "delta_key", "delta_value", "delta_gate"), _BA: ("delta_write", "delta_decay")},
    turns={_QKVZ: _groups, _BA: _groups},
    scaling="", query_norm="", key_norm="",
)  # fmt: skip
FAMILY = llama.FAMILY.like(
    "qwen3_next", fields,
    defaults={
        **qwen3_moe.FAMILY.defaults, "vocab_size": 151936, "intermediate_size": 5632, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32768,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "num_experts_per_tok": 10, "num_experts": 512, "norm_topk_prob": True,
        "layer_types": None, "full_attention_interval": 4,
    },
    paths=llama.paths(ATTENTION, gain_offset=1.0, kinds={"experts": qwen2_moe.EXPERTS, "gated_delta_net": DELTA}),
)  # fmt: skip

"""Qwen3.5's language model: Qwen3-Next without experts, and with a map for each part of its DeltaNets."""

from dataclasses import replace

from signalprop.families import qwen2_moe, qwen3_next

DELTA = replace(
    qwen3_next.DELTA,
    weights={**qwen3_next.DELTA.weights, "delta_gate": "linear_attn.in_proj_z", "delta_write": "linear_attn.in_proj_b",
             "delta_decay": "linear_attn.in_proj_a"},
    blocks={"linear_attn.in_proj_qkv": ("delta_query", "delta_key", "delta_value")},
    turns={},
)  # fmt: skip
FAMILY = qwen3_next.FAMILY.like(
    "qwen3_5_text", None,
    {
        "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
        "num_key_value_heads": 4, "num_experts": 0,
    },
    paths=qwen3_next.FAMILY.with_stack(kinds={"experts": qwen2_moe.EXPERTS, "gated_delta_net": DELTA}),
)  # fmt: skip

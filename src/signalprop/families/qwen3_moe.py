"""Qwen3-MoE: Qwen3, with experts in some layers."""

from signalprop.families import _experts, llama, qwen2, qwen2_moe
from signalprop.families.base import Config, Fields


def fields(c: Config) -> Fields:
    return _experts.sparse(llama.decoder(c) | {"qk_norm": True}, qwen2_moe.dense(c), **qwen2_moe.routed(c))


FAMILY = llama.FAMILY.like(
    "qwen3_moe", fields,
    defaults={
        **qwen2.FAMILY.defaults, **qwen2_moe.ROUTED, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 24, "num_key_value_heads": 4, "num_experts_per_tok": 8, "num_experts": 128,
        "moe_intermediate_size": 768,
    },
    paths=_experts.paths(_experts.branch()),
)  # fmt: skip

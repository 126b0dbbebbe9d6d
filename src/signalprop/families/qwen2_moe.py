"""Qwen2-MoE: Qwen2, with experts and a gated shared one in some layers."""

from signalprop.families import _experts, llama, qwen2
from signalprop.families.base import Config, Fields


def dense(c: Config) -> list[bool]:
    """Layers without experts."""
    only, step, n = c["mlp_only_layers"] or (), c["decoder_sparse_step"], _experts.count(c)
    return [i in only or n == 0 or (i + 1) % step != 0 for i in range(c["num_hidden_layers"])]


def routed(c: Config) -> Fields:
    """Settings of the experts."""
    return {
        "n_experts": _experts.count(c), "top_k": c["num_experts_per_tok"], "width": c["moe_intermediate_size"],
        "normalised": c["norm_topk_prob"],
    }  # fmt: skip


def fields(c: Config) -> Fields:
    shared = {"shared_width": c["shared_expert_intermediate_size"], "shared_gated": True}
    return _experts.sparse(qwen2.fields(c) | {"qkv_bias": c["qkv_bias"]}, dense(c), **routed(c), **shared)


EXPERTS = _experts.branch(shared="shared_expert", weights={"shared_router": "mlp.shared_expert_gate"})
ROUTED = {
    "num_experts_per_tok": 4, "num_experts": 60, "moe_intermediate_size": 1408, "norm_topk_prob": False,
    "decoder_sparse_step": 1, "mlp_only_layers": None,
}  # fmt: skip

FAMILY = qwen2.FAMILY.like(
    "qwen2_moe", fields,
    {
        **ROUTED, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 16, "shared_expert_intermediate_size": 5632, "qkv_bias": True,
    },
    paths=_experts.paths(EXPERTS, llama.ATTENTION),
)  # fmt: skip

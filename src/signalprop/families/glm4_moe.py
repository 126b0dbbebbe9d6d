"""GLM-4.5: Llama, with partial rotations, norms on queries and keys in some sizes, and experts after the first layers.

The bias that corrects the choice of experts starts at zero, and is read as that.
"""

from signalprop.families import _experts, llama
from signalprop.families.base import Config, Fields, rotary


def routed(c: Config) -> Fields:
    """Settings of experts with a sigmoid's scores, as of DeepSeek-V3."""
    return {
        "n_experts": c["n_routed_experts"], "top_k": c["num_experts_per_tok"], "width": c["moe_intermediate_size"],
        "scores": "sigmoid", "normalised": c["norm_topk_prob"], "scale": c["routed_scaling_factor"],
        "n_groups": c["n_group"], "top_groups": c["topk_group"],
        "shared_width": c["moe_intermediate_size"] * c["n_shared_experts"],
    }  # fmt: skip


def fields(c: Config) -> Fields:
    d_head = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    made = llama.decoder({**c, "head_dim": d_head}) | {
        "bias": False, "qk_norm": bool(c["use_qk_norm"]), "rotary_fraction": rotary(c, "partial_rotary_factor", 0.5),
    }  # fmt: skip
    return _experts.sparse(made, c["first_k_dense_replace"], **routed(c))


FAMILY = llama.FAMILY.like(
    "glm4_moe", fields,
    {
        "vocab_size": 151552, "intermediate_size": 10944, "num_hidden_layers": 46, "num_attention_heads": 96,
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128,
        "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "first_k_dense_replace": 1,
        "use_qk_norm": False,
    },
    paths=_experts.paths(_experts.branch(shared="shared_experts")),
)  # fmt: skip

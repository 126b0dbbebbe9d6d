"""DeepSeek-V2: latent attention, and experts with a softmax's scores, whose weights are not normalised.

transformers' class leaves the number of experts of a token open, and cannot run without it; it is read as 6, that of
the released models. Stretched rotations are read as in DeepSeek-V3.
"""

from signalprop.families import _experts, deepseek_v3, glm4_moe
from signalprop.families.base import Config, Fields, refuse


def fields(c: Config) -> Fields:
    refuse(c, mlp_bias="biases")
    grouped = c["topk_method"] == "group_limited_greedy"
    groups = {"n_group": c["n_group"] or 1, "topk_group": c["topk_group"] or 1} if grouped else _NO_GROUPS
    routed = glm4_moe.routed({**c, **groups, "num_experts_per_tok": c["num_experts_per_tok"] or 6})
    routed |= {"scores": "softmax", "normalised": False}
    return deepseek_v3.latent(c, _experts.sparse(deepseek_v3.decoder(c), c["first_k_dense_replace"], **routed))


_NO_GROUPS = {"n_group": 1, "topk_group": 1}
FAMILY = deepseek_v3.FAMILY.like(
    "deepseek_v2", fields,
    {
        **_NO_GROUPS, "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 2048, "moe_intermediate_size": 1407,
        "n_routed_experts": 64, "num_experts_per_tok": None, "n_shared_experts": 2, "routed_scaling_factor": 1.0,
        "topk_method": "greedy", "first_k_dense_replace": 0, "mlp_bias": False,
    },
)  # fmt: skip

"""GLM-4.7 Flash: DeepSeek-V3, whose layers say which have experts.

The bias that corrects the choice of experts starts at zero, and is read as that.
"""

from signalprop.families import _experts, deepseek_v3, glm4_moe
from signalprop.families.base import Config, Fields


def fields(c: Config) -> Fields:
    dense = _experts.dense({**c, "first_k_dense_replace": 1})
    return deepseek_v3.latent(c, _experts.sparse(deepseek_v3.decoder(c), dense, **glm4_moe.routed(c)))


FAMILY = deepseek_v3.FAMILY.like(
    "glm4_moe_lite", fields,
    {
        "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240, "num_hidden_layers": 47,
        "num_attention_heads": 20, "num_key_value_heads": 20, "rms_norm_eps": 1e-5, "max_position_embeddings": 202752,
        "moe_intermediate_size": 1536, "n_routed_experts": 64, "num_experts_per_tok": 4, "routed_scaling_factor": 1.8,
        "n_group": 1, "topk_group": 1, "q_lora_rank": 768, "v_head_dim": 256, "qk_nope_head_dim": 192,
    },
)  # fmt: skip

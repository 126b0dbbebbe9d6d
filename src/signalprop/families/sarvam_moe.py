"""Sarvam 30B: GLM-4.5 with norms on queries and keys, whole heads rotating, and of GLM-4.5's classes.

The bias that corrects the choice of experts starts at zero, and is read as that.
"""

from signalprop.families import glm4_moe
from signalprop.families.base import Config, Fields, normal

EXPERTS = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}  # in released configurations


def fields(c: Config) -> Fields:
    usual = {"partial_rotary_factor": 1.0, "rope_theta": c.get("rope_theta", 8e6)}
    return glm4_moe.fields({**c, "rope_parameters": {**usual, **(c.get("rope_parameters") or {})}})


FAMILY = glm4_moe.FAMILY.like(
    "sarvam_moe", fields,
    {
        "vocab_size": 262144, "hidden_size": 4096, "intermediate_size": 8192, "num_hidden_layers": 19,
        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 64, "rms_norm_eps": 1e-6,
        "moe_intermediate_size": 1024, "num_experts_per_tok": 6, "routed_scaling_factor": 2.5, "use_qk_norm": True,
    },
    initialisation=normal(0.006, usual=0.006),
    former=EXPERTS | {"use_qkv_bias": "attention_bias"},
)  # fmt: skip

"""Solar Open: GLM-4.5's experts in every layer, beside Llama's attention.

The bias that corrects the choice of experts starts at zero, and is read as that.
"""

from signalprop.families import glm4_moe
from signalprop.families.base import Config, Fields


def fields(c: Config) -> Fields:
    fixed = {"use_qk_norm": False, "first_k_dense_replace": 0, "intermediate_size": c["moe_intermediate_size"]}
    rotations = {"rope_parameters": {"partial_rotary_factor": 1.0, **(c.get("rope_parameters") or {"rope_theta": 1e6})}}
    return glm4_moe.fields({**c, **fixed, **rotations})


FAMILY = glm4_moe.FAMILY.like(
    "solar_open", fields,
    {
        "vocab_size": 196608, "num_hidden_layers": 48, "num_attention_heads": 64, "head_dim": 128,
        "moe_intermediate_size": 1280,
    },
)  # fmt: skip

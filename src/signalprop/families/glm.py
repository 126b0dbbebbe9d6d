"""GLM (GLM-4-9B): Llama, with biases on queries, keys and values, and one map for gate and up.

Half of each head rotates, neighbouring features together.
"""

from dataclasses import replace

from signalprop.families import llama
from signalprop.families.base import Config, Fields, rotary


def fields(c: Config) -> Fields:
    fraction = {"rotary_fraction": rotary(c, "partial_rotary_factor", 0.5)}
    return llama.decoder(c) | {"bias": False, "qkv_bias": bool(c["attention_bias"])} | fraction


FEED_FORWARD = replace(
    llama.FEED_FORWARD,
    weights={"down": "mlp.down_proj"},
    blocks={"mlp.gate_up_proj": ("gate", "up")},
    activation="mlp.activation_fn",
)
FAMILY = llama.FAMILY.like(
    "glm", fields,
    {
        "vocab_size": 151552, "intermediate_size": 13696, "num_hidden_layers": 40, "num_key_value_heads": 2,
        "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7, "attention_bias": True,
    },
    paths=llama.paths(feed_forward=FEED_FORWARD),
)  # fmt: skip

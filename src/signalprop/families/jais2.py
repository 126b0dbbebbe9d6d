"""Jais 2: Llama, with LayerNorms, biases, and squared ReLUs instead of gates."""

from signalprop.families import arcee, llama
from signalprop.families.base import Config, Fields


def fields(c: Config) -> Fields:
    norm = {"norm": "layernorm", "norm_bias": True, "norm_eps": c["layer_norm_eps"]}
    return arcee.FAMILY.fields({**c, "rms_norm_eps": c["layer_norm_eps"]}) | norm


FAMILY = arcee.FAMILY.like(
    "jais2", fields,
    defaults={
        **llama.FAMILY.defaults, "vocab_size": 150272, "hidden_size": 3328, "intermediate_size": 26624,
        "num_attention_heads": 26, "hidden_act": "relu2", "max_position_embeddings": 8192, "layer_norm_eps": 1e-5,
        "attention_bias": True, "mlp_bias": True,
    },
)  # fmt: skip

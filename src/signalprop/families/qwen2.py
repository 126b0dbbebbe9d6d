"""Qwen2 and Qwen2.5: Llama, with biases on queries, keys and values."""

from signalprop.families import llama
from signalprop.families.base import Config, Fields


def fields(c: Config) -> Fields:
    return llama.decoder(later(c)) | {"bias": False, "qkv_bias": True}


def later(c: Config) -> Config:
    """A configuration that says which layers have the window, if it is used: those from max_window_layers on."""
    first = c.get("max_window_layers", 28)
    plain = ["full_attention" if i < first else "sliding_attention" for i in range(c["num_hidden_layers"])]
    return {**c, "layer_types": c.get("layer_types") or plain}


FAMILY = llama.FAMILY.like(
    "qwen2", fields,
    {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768, "num_key_value_heads": 32},
)  # fmt: skip

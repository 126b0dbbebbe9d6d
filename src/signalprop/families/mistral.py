"""Mistral: Llama, with a window on all layers."""

from signalprop.families import llama

FAMILY = llama.FAMILY.like(
    "mistral", lambda c: llama.decoder({**c, "use_sliding_window": True}),
    {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
)  # fmt: skip

"""Qwen2 and Qwen2.5: Llama, with biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from signalprop.families import llama
from signalprop.families.base import Config


def fields(c: Config) -> dict[str, Any]:
    """Fields of an Architecture."""
    return llama.decoder(c) | {"bias": False, "qkv_bias": True}


FAMILY = replace(
    llama.FAMILY,
    model_type="qwen2",
    defaults={
        **llama.FAMILY.defaults, "vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
    },
    fields=fields,
)  # fmt: skip

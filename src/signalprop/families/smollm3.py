"""SmolLM3: Llama. Every fourth layer rotates nothing; an Architecture says that all layers rotate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from signalprop.families import llama
from signalprop.families.base import Config, rotary


def fields(c: Config) -> dict[str, Any]:
    """Fields of an Architecture."""
    return llama.fields(c) | {"rotary_base": rotary(c, "rope_theta", 2e6)}


FAMILY = replace(
    llama.FAMILY,
    model_type="smollm3",
    defaults={
        **llama.FAMILY.defaults, "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    fields=fields,
)  # fmt: skip

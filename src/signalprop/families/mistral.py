"""Mistral: Llama, with a window on all layers."""

from __future__ import annotations

from typing import Any

from signalprop.families import llama
from signalprop.families.base import Config


def fields(c: Config) -> dict[str, Any]:
    """Fields of an Architecture."""
    return llama.decoder({**c, "use_sliding_window": True})


FAMILY = llama.FAMILY.like(
    "mistral", fields,
    {
        "intermediate_size": 14336, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "sliding_window": 4096,
    },
)  # fmt: skip

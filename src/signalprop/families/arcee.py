"""Arcee (AFM): Llama, with squared ReLUs instead of gates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from signalprop.families import llama
from signalprop.families.base import Config


def fields(c: Config) -> dict[str, Any]:
    """Fields of an Architecture."""
    return llama.fields(c) | {"gated": False}


FEED_FORWARD = replace(llama.FEED_FORWARD, weights={"up": "mlp.up_proj", "down": "mlp.down_proj"})
FAMILY = llama.FAMILY.like(
    "arcee", fields,
    {
        "hidden_size": 2560, "intermediate_size": 18432, "hidden_act": "relu2",
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    },
    paths=llama.paths(feed_forward=FEED_FORWARD),
)  # fmt: skip

"""HunYuan (dense, v1): Llama, with norms on queries and keys after their rotation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from signalprop.families import llama
from signalprop.families.base import Config


def fields(c: Config) -> dict[str, Any]:
    """Fields of an Architecture. A rotation keeps lengths, so that a norm before it does the same."""
    return llama.decoder(c) | {"qk_norm": True}


ATTENTION = replace(llama.ATTENTION, query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm")
FAMILY = llama.FAMILY.like(
    "hunyuan_v1_dense", fields,
    {"vocab_size": 290943, "rms_norm_eps": 1e-5},
    paths=llama.paths(ATTENTION),
)  # fmt: skip

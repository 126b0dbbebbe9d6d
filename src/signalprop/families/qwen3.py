"""Qwen3: Llama, with norms on queries and keys."""

from __future__ import annotations

from typing import Any

from signalprop.families import llama, qwen2
from signalprop.families.base import Config


def fields(c: Config) -> dict[str, Any]:
    """Fields of an Architecture."""
    return llama.decoder(qwen2.later(c)) | {"qk_norm": True}


FAMILY = llama.FAMILY.like("qwen3", fields, defaults={**qwen2.FAMILY.defaults, "head_dim": 128})

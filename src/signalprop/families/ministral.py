"""Ministral: Mistral, with a window on the layers that say so (by default, all)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from signalprop.families import llama, mistral
from signalprop.families.base import Config

_PLAIN = ("sliding_attention",)


def fields(c: Config) -> dict[str, Any]:
    """Fields of an Architecture."""
    return llama.decoder({**c, "use_sliding_window": "sliding_attention" in (c.get("layer_types") or _PLAIN)})


FAMILY = replace(mistral.FAMILY, model_type="ministral", fields=fields)

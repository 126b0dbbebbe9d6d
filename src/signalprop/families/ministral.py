"""Ministral: Mistral, with a window on the layers that say so (by default, all)."""

from __future__ import annotations

from typing import Any

from signalprop.families import llama, mistral
from signalprop.families.base import Config


def fields(c: Config) -> dict[str, Any]:
    """Fields of an Architecture."""
    return llama.decoder({**c, "use_sliding_window": True})


FAMILY = mistral.FAMILY.like("ministral", fields)

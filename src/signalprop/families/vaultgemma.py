"""VaultGemma: Gemma 2 without norms on the branches' outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from signalprop.families import gemma2, llama
from signalprop.families.base import Config


def fields(c: Config) -> dict[str, Any]:
    """Fields of an Architecture."""
    return gemma2.fields(c) | {"norm_placement": "pre"}


FAMILY = gemma2.FAMILY.like(
    "vaultgemma", fields,
    paths=llama.paths(
        replace(llama.ATTENTION, attention=""),
        replace(llama.FEED_FORWARD, norm="pre_feedforward_layernorm"),
        gain_offset=1.0,
    ),
)  # fmt: skip

"""Granite MoE with windows, sinks and a rotary base per layer; a shared feed-forward beside the experts, or none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from signalprop.families import granite_swa, granitemoeshared
from signalprop.families.base import Config


def fields(c: Config) -> dict[str, Any]:
    """Fields of an Architecture."""
    given, windows = granitemoeshared.fields({**c, "layer_types": None}), granite_swa.windows(c)
    return given | windows | {"settings": given["settings"] | windows["settings"]}


(_PATHS,) = granite_swa.FAMILY.paths
FAMILY = granitemoeshared.FAMILY.like(
    "granitemoe_swa", fields,
    {"sliding_window": 128},
    paths=(replace(_PATHS, stacks=(replace(_PATHS.stacks[0], kinds=granitemoeshared.KINDS),)),),
)  # fmt: skip

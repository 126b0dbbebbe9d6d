"""Granite MoE with windows, sinks and a rotary base per layer; a shared feed-forward beside the experts, or none."""

from signalprop.families import granite_swa, granitemoeshared
from signalprop.families.base import Config, Fields


def fields(c: Config) -> Fields:
    given, windows = granitemoeshared.fields({**c, "layer_types": None}), granite_swa.windows(c)
    return given | windows | {"settings": given["settings"] | windows["settings"]}


FAMILY = granitemoeshared.FAMILY.like(
    "granitemoe_swa", fields,
    {"sliding_window": 128},
    paths=granite_swa.FAMILY.with_stack(kinds=granitemoeshared.KINDS),
)  # fmt: skip

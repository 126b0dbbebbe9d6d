"""mBART: BART, with norms before the branches, and one at the end of each stack."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from signalprop.families import bart
from signalprop.families.base import Config


def fields(c: Config) -> dict[str, Any]:
    """Fields of an Architecture."""
    return bart.fields(c) | {"norm_placement": "pre", "final_norm": True}


STACKS = bart.stack("encoder", final_norm=True), bart.stack("decoder", final_norm=True, cross=True)
FAMILY = bart.FAMILY.like("mbart", fields, paths=(replace(bart.PATHS, stacks=STACKS),))

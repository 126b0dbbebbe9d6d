"""GLM-4-0414: GLM, with a second norm on each branch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from signalprop.families import glm, llama
from signalprop.families.base import Config


def fields(c: Config) -> dict[str, Any]:
    """Fields of an Architecture."""
    return glm.fields(c) | {"norm_placement": "sandwich"}


_AFTER, _THEN = "post_self_attn_layernorm", "post_mlp_layernorm"
FAMILY = glm.FAMILY.like(
    "glm4", fields,
    paths=llama.paths(
        replace(llama.ATTENTION, branch=_AFTER, post_norm=_AFTER),
        replace(glm.FEED_FORWARD, branch=_THEN, post_norm=_THEN),
    ),
)  # fmt: skip

"""GLM-4-0414: GLM, with a second norm on each branch."""

from dataclasses import replace

from signalprop.families import glm, llama

_AFTER, _THEN = "post_self_attn_layernorm", "post_mlp_layernorm"
FAMILY = glm.FAMILY.like(
    "glm4", lambda c: glm.fields(c) | {"norm_placement": "sandwich"},
    paths=llama.paths(
        replace(llama.ATTENTION, branch=_AFTER, post_norm=_AFTER),
        replace(glm.FEED_FORWARD, branch=_THEN, post_norm=_THEN),
    ),
)  # fmt: skip

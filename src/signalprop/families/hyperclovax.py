"""HyperCLOVA X: Granite, whose branches have a second norm, and whose factor on logits multiplies."""

from dataclasses import replace

from signalprop.families import granite, llama
from signalprop.families.base import Config, Fields


def fields(c: Config) -> Fields:
    d_head = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    given = {**c, "attention_multiplier": c["attention_multiplier"] or d_head**-0.5}
    return granite.FAMILY.fields(given) | {
        "norm_placement": "sandwich" if c["use_post_norm"] else "pre", "head_scale": c["logits_scaling"],
    }  # fmt: skip


FAMILY = granite.FAMILY.like(
    "hyperclovax", fields,
    {"attention_multiplier": None, "use_post_norm": True},
    paths=llama.paths(
        replace(llama.ATTENTION, branch="post_norm1", post_norm="post_norm1"),
        replace(llama.FEED_FORWARD, branch="post_norm2", post_norm="post_norm2"),
    ),
)  # fmt: skip

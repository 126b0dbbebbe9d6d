"""Cohere 2 (Command R7B, Command A): Cohere, with windows, and every fourth layer without window and rotations."""

from dataclasses import replace

from signalprop.families import cohere, llama
from signalprop.families.base import Config, Fields, every, seeing


def fields(c: Config) -> Fields:
    kinds = every(c["sliding_window_pattern"], c)
    return cohere.fields(c) | seeing(c, kinds, rotates=[kind == "sliding_attention" for kind in kinds])


FAMILY = cohere.FAMILY.like(
    "cohere2", fields,
    {"sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 10_000.0},
    paths=llama.paths(llama.ATTENTION, replace(llama.FEED_FORWARD, norm="input_layernorm")),
)  # fmt: skip

"""OLMo 2: Llama, with norms on the branches' outputs instead of their inputs, and norms on queries and keys."""

from dataclasses import replace

from signalprop.families import llama

ATTENTION = replace(llama.ATTENTION, norm="post_attention_layernorm", branch="post_attention_layernorm", reads="")
FEED_FORWARD = replace(
    llama.FEED_FORWARD, norm="post_feedforward_layernorm", branch="post_feedforward_layernorm", reads="mlp"
)
FAMILY = llama.FAMILY.like(
    "olmo2", lambda c: llama.decoder(c) | {"norm_placement": "res-post", "qk_norm": "whole"},
    {"vocab_size": 50304, "rms_norm_eps": 1e-5},
    paths=llama.paths(ATTENTION, FEED_FORWARD),
)  # fmt: skip

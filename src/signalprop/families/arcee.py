"""Arcee (AFM): Llama, with squared ReLUs instead of gates."""

from dataclasses import replace

from signalprop.families import llama

FEED_FORWARD = replace(llama.FEED_FORWARD, weights={"up": "mlp.up_proj", "down": "mlp.down_proj"})
FAMILY = llama.FAMILY.like(
    "arcee", lambda c: llama.fields(c) | {"gated": False},
    {
        "hidden_size": 2560, "intermediate_size": 18432, "hidden_act": "relu2", "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    paths=llama.paths(feed_forward=FEED_FORWARD),
)  # fmt: skip

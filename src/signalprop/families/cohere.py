"""Cohere (Command R): attention and feed-forward in parallel after one LayerNorm.

Neighbouring features rotate together.
"""

from dataclasses import replace

from signalprop.families import llama
from signalprop.families.base import Config, Fields, refuse


def fields(c: Config) -> Fields:
    refuse(c, use_qk_norm="LayerNorms on queries and keys")
    return llama.decoder({**c, "rms_norm_eps": c["layer_norm_eps"]}) | {
        "norm": "layernorm", "bias": bool(c["attention_bias"]), "parallel": True, "shared_norm": True,
        "head_scale": c["logit_scale"],
    }  # fmt: skip


FAMILY = llama.FAMILY.like(
    "cohere", fields,
    {
        "vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
        "num_attention_heads": 64, "max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "tie_word_embeddings": True,
        "rope_theta": 500_000.0, "logit_scale": 0.0625,
    },
    paths=llama.paths(feed_forward=replace(llama.FEED_FORWARD, norm="input_layernorm")),
)  # fmt: skip

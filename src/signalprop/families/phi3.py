"""Phi-3 and Phi-4: Llama, with one map for queries, keys and values, and one for gate and up."""

from dataclasses import replace

from signalprop.families import glm, llama
from signalprop.families.base import Config, Fields, rotary


def fields(c: Config) -> Fields:
    return llama.decoder({**c, "attention_bias": False, "use_sliding_window": True}) | {
        "dropout": c["resid_pdrop"], "embedding_dropout": c["embd_pdrop"],
        "rotary_fraction": rotary(c, "partial_rotary_factor", 1.0),
    }  # fmt: skip


ATTENTION = replace(
    llama.ATTENTION,
    branch="resid_attn_dropout",
    weights={"output": "self_attn.o_proj"},
    fused="self_attn.qkv_proj",
)
FEED_FORWARD = replace(glm.FEED_FORWARD, branch="resid_mlp_dropout")
FAMILY = llama.FAMILY.like(
    "phi3", fields,
    {
        "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    },
    paths=llama.paths(ATTENTION, FEED_FORWARD),
)  # fmt: skip

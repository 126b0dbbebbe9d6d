"""Seed-OSS: Llama; queries, keys and values have biases, the attention's output has a separate switch.

Dropout is a function call in both branches, which no hook sees: in training mode branches are seen after it.
"""

from signalprop.families import llama
from signalprop.families.base import Config, Fields


def fields(c: Config) -> Fields:
    """One `bias` is for both the attention's output and the feed-forward."""
    return llama.decoder(c) | {"bias": bool(c["attention_out_bias"] or c["mlp_bias"]), "dropout": c["residual_dropout"]}


FAMILY = llama.FAMILY.like(
    "seed_oss", fields,
    {
        "vocab_size": 155136, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 80,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288, "attention_bias": True,
        "attention_out_bias": False, "attention_dropout": 0.1, "residual_dropout": 0.1,
    },
)  # fmt: skip

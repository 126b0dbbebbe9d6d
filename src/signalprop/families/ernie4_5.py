"""ERNIE 4.5: Llama, with one setting for all biases; neighbouring features rotate together."""

from signalprop.families import llama
from signalprop.families.base import Config, Fields


def biased(c: Config) -> Fields:
    """The configuration with Llama's names of its biases."""
    return {**c, "attention_bias": bool(c["use_bias"]), "mlp_bias": bool(c["use_bias"]), "attention_dropout": 0.0}


FAMILY = llama.FAMILY.like(
    "ernie4_5", lambda c: llama.fields(biased(c)),
    {
        "vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "use_bias": False, "rope_theta": 500_000.0,
    },
)  # fmt: skip

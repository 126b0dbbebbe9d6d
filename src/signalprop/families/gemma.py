"""Gemma: Llama, with embeddings times sqrt(d) and gains of 1 + weight."""

from signalprop.families import llama
from signalprop.families.base import Config, Fields, activation_name, refuse


def fields(c: Config) -> Fields:
    """The released configurations say "gelu" and mean the tanh approximation."""
    refuse(c, use_bidirectional_attention="bidirectional attention")
    act = c.get("hidden_activation") or ("gelu_pytorch_tanh" if c["hidden_act"] == "gelu" else c["hidden_act"])
    return llama.decoder(c) | {"activation": activation_name(act), "embedding_scale": c["hidden_size"] ** 0.5}


FAMILY = llama.FAMILY.like(
    "gemma", fields,
    {
        "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
    paths=llama.paths(gain_offset=1.0),
)  # fmt: skip

"""IQuest-Coder: Llama, class and all, with another configuration."""

from signalprop.families import llama

FAMILY = llama.FAMILY.like(
    "iquestcoder", None,
    {
        "vocab_size": 76800, "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 80,
        "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
    },
)  # fmt: skip

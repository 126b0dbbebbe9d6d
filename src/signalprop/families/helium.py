"""Helium: Llama, without a bias on the attention's output; neighbouring features rotate together."""

from signalprop.families import llama

FAMILY = llama.FAMILY.like(
    "helium", lambda c: llama.decoder(c) | {"bias": bool(c["mlp_bias"])},
    {
        "vocab_size": 48000, "hidden_size": 2560, "intermediate_size": 7040, "num_hidden_layers": 24,
        "num_attention_heads": 20, "num_key_value_heads": 20, "head_dim": 128, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-8, "rope_theta": 100_000.0,
    },
)  # fmt: skip

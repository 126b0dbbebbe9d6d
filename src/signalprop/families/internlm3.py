"""InternLM3: Llama."""

from signalprop.families import llama

FAMILY = llama.FAMILY.like(
    "internlm3", None,
    {
        "vocab_size": 128512, "intermediate_size": 10240, "num_hidden_layers": 48, "num_key_value_heads": 2,
        "head_dim": 128, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
    },
)  # fmt: skip

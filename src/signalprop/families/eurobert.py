"""EuroBERT: Llama's layers as an encoder."""

from signalprop.families import llama

FAMILY = llama.FAMILY.like(
    "eurobert", lambda c: llama.fields(c) | {"kind": "encoder", "head_bias": bool(c["mlp_bias"])},
    {
        "vocab_size": 128256, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
        "num_attention_heads": 12, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    },
)  # fmt: skip

"""HunYuan (dense, v1): Llama, with norms on queries and keys after their rotation, which keeps lengths."""

from dataclasses import replace

from signalprop.families import llama

ATTENTION = replace(llama.ATTENTION, query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm")
FAMILY = llama.FAMILY.like(
    "hunyuan_v1_dense", lambda c: llama.decoder(c) | {"qk_norm": True},
    {"vocab_size": 290943, "rms_norm_eps": 1e-5},
    paths=llama.paths(ATTENTION),
)  # fmt: skip

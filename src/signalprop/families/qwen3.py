"""Qwen3: Llama, with norms on queries and keys."""

from signalprop.families import llama, qwen2

FAMILY = llama.FAMILY.like(
    "qwen3",
    lambda c: llama.decoder(qwen2.later(c)) | {"qk_norm": True},
    defaults={**qwen2.FAMILY.defaults, "head_dim": 128},
)

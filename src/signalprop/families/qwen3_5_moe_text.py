"""Qwen3.5-MoE's language model: Qwen3-Next, with a map for each part of its DeltaNets."""

from signalprop.families import qwen3_5_text, qwen3_next

FAMILY = qwen3_next.FAMILY.like(
    "qwen3_5_moe_text", None,
    {"vocab_size": 248320, "num_hidden_layers": 40, "num_experts_per_tok": 8, "num_experts": 256},
    paths=qwen3_5_text.FAMILY.paths,
)  # fmt: skip

"""Sarvam 105B: DeepSeek-V3 without groups of experts or a latent for queries, and of DeepSeek-V3's classes.

What DeepSeek-V3's file says of biases and rotations is true here, too.
"""

from signalprop.families import deepseek_v3, sarvam_moe
from signalprop.families.base import normal

FAMILY = deepseek_v3.FAMILY.like(
    "sarvam_mla",
    own={
        "vocab_size": 262144, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 32,
        "num_attention_heads": 64, "n_routed_experts": 128, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "q_lora_rank": None,
    },
    initialisation=normal(0.006, usual=0.006),
    former=sarvam_moe.EXPERTS,
)  # fmt: skip

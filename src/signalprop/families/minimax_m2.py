"""MiniMax-M2: Llama, with partial rotations, norms on queries and keys over all heads, and experts in every layer.

The bias that corrects the choice of experts starts at zero, and is read as that.
"""

from signalprop.families import _experts, llama
from signalprop.families.base import Config, Fields, rotary


def fields(c: Config) -> Fields:
    """Released configurations say `rotary_dim` where others have a factor."""
    part = c["rotary_dim"] / c["head_dim"] if c["rotary_dim"] else 1.0
    made = llama.decoder(c) | {"qk_norm": "whole", "rotary_fraction": rotary(c, "partial_rotary_factor", part)}
    routed = {"n_experts": c["num_local_experts"], "top_k": c["num_experts_per_tok"], "scores": "sigmoid"}
    return _experts.sparse(made, **routed)


FAMILY = llama.FAMILY.like(
    "minimax_m2", fields,
    {
        "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
        "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608,
        "num_local_experts": 256, "num_experts_per_tok": 8, "rotary_dim": None, "rope_theta": 5e6,
    },
    paths=_experts.paths(_experts.branch()),
)  # fmt: skip

"""Kolibri 1: norms before and after branches and on queries and keys, windows, experts in every layer.

Layers without a window rotate nothing. The bias that corrects the choice of experts starts at zero, and is read so.
"""

from dataclasses import replace

from signalprop.families import _experts, glm4, llama, qwen2_moe, qwen3_moe
from signalprop.families.base import Config, Fields, every, rotating_in_windows


def fields(c: Config) -> Fields:
    kinds = every(5, c)
    made = llama.decoder({**c, "intermediate_size": c["moe_intermediate_size"]}) | {
        "qk_norm": True, "norm_placement": "sandwich", **rotating_in_windows(c, kinds),
    }  # fmt: skip
    shared = {"scores": "sigmoid", "shared_width": c["shared_expert_intermediate_size"]}
    return _experts.sparse(made, **qwen2_moe.routed(c), **shared)


_BRANCH, _AFTER = (one.branch for one in glm4.FAMILY.paths[0].stacks[0].sublayers)
FAMILY = qwen3_moe.FAMILY.like(
    "kolibri1", fields,
    {
        "vocab_size": 128000, "hidden_size": 2560, "num_hidden_layers": 50, "num_attention_heads": 48, "head_dim": 128,
        "max_position_embeddings": 262144, "sliding_window": 513, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "num_experts_per_tok": 6, "num_experts": 384, "layer_types": None,
        "attention_bias": False,
    },
    paths=_experts.paths(
        _experts.branch(shared="shared_experts", branch=_AFTER, post_norm=_AFTER),
        replace(llama.ATTENTION, branch=_BRANCH, post_norm=_BRANCH),
    ),
)  # fmt: skip

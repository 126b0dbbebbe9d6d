"""DeepSeek-V3 and R1: latent attention, and experts after the first layers.

The bias that corrects the choice of experts starts at zero, and is read as that; stretched rotations are read as plain
ones of the same base, with the factor that they put on the scores. Neighbouring features rotate together.
"""

import math
from dataclasses import replace
from typing import Any

from signalprop.families import _experts, glm4_moe, llama
from signalprop.families.base import Config, Fields, grown, refuse


def decoder(c: Config) -> Fields:
    """Fields of a dense decoder whose heads are as wide as those of latent attention."""
    refuse(c, attention_bias="biases")
    d_head = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    stretched = c.get("rope_parameters") or c.get("rope_scaling") or {}
    factor = grown(stretched.get("factor", 1), stretched.get("mscale_all_dim", 0))
    made = llama.decoder({**c, "head_dim": d_head, "num_key_value_heads": c["num_attention_heads"]})
    return made | {"attention_scale": factor**2 / math.sqrt(d_head)}


_LATENT_EPS = 1e-6  # of norms on latents, in transformers, whatever a configuration says of the others


def latent(c: Config, made: Fields, **settings: Any) -> Fields:
    """The fields with latent attention, of further `settings`, where they have attention."""
    widths = {
        "rank": c["kv_lora_rank"], "query_rank": c.get("q_lora_rank") or 0, "d_rotary": c["qk_rope_head_dim"],
        "d_value": c["v_head_dim"],
    }  # fmt: skip
    if made["norm_eps"] != _LATENT_EPS:
        widths["eps"] = _LATENT_EPS
    branches = made.get("branches", ("attention", "feed_forward"))
    layers = branches if isinstance(branches[0], tuple) else [branches] * c["num_hidden_layers"]
    others = {name: value for name, value in made["settings"].items() if name != "attention"}
    return made | {
        "branches": tuple(("latent_attention", last) for _, last in layers),
        "settings": {**others, "latent_attention": widths | settings},
    }


def fields(c: Config) -> Fields:
    return latent(c, _experts.sparse(decoder(c), c["first_k_dense_replace"], **glm4_moe.routed(c)))


ATTENTION = replace(
    llama.ATTENTION,
    weights={
        "latent_query_down": "self_attn.q_a_proj",
        "latent_query": "self_attn.q_b_proj",
        "latent_down": "self_attn.kv_a_proj_with_mqa",
        "latent_up": "self_attn.kv_b_proj",
        "latent_output": "self_attn.o_proj",
    },
)
_DIRECT = replace(  # queries do not come from a latent
    ATTENTION,
    weights={role: path for role, path in ATTENTION.weights.items() if role != "latent_query_down"}
    | {"latent_query": "self_attn.q_proj"},
)
_EXPERTS = _experts.branch(shared="shared_experts")
FAMILY = llama.FAMILY.like(
    "deepseek_v3", fields,
    defaults={
        **glm4_moe.FAMILY.defaults, "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
        "num_hidden_layers": 61, "num_attention_heads": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "routed_scaling_factor": 2.5, "n_group": 8,
        "topk_group": 4, "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128,
    },
    paths=(*_experts.paths(_EXPERTS, ATTENTION), *_experts.paths(_EXPERTS, _DIRECT)),
)  # fmt: skip

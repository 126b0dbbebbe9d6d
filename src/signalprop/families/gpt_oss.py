"""GPT-OSS: windows on every other layer, a sink per head, and biased experts whose gates multiply 1 + up.

Gates and ups are clamped at 7, which is read as not at all: fresh ones have a standard deviation of 1.1 at most in the
released sizes. Sinks (standard deviation 0.02) are read as zero, stretched rotations as plain ones of the same base,
with the factor that they put on the scores.
"""

import math
from dataclasses import replace

from signalprop.errors import InputError
from signalprop.families import _experts, llama
from signalprop.families.base import BY_HAND, Config, Fields, every, normal, rotary, seeing, stretch
from signalprop.network.layout import fan


def fields(c: Config) -> Fields:
    if (c["swiglu_alpha"], c["swiglu_limit"]) != (1.702, 7.0) or not c["attention_bias"]:
        raise InputError(f"GPT-OSS needs swiglu_alpha 1.702, swiglu_limit 7.0 and attention_bias; {BY_HAND}")
    made = llama.decoder(c) | seeing(c, every(2, c), sink=0.0)
    said = c.get("rope_parameters") or c.get("rope_scaling") or {"rope_type": "yarn", "factor": 32.0}
    made |= {
        "activation": "quick_gelu", "rotary_base": rotary(c, "rope_theta", 150_000.0),
        "attention_scale": stretch(said) ** 2 / math.sqrt(c["head_dim"]),
    }  # fmt: skip
    return _experts.sparse(
        made, n_experts=c["num_local_experts"], top_k=c["num_experts_per_tok"], router_bias=True, up_shift=1.0
    )


EXPERTS = replace(
    _experts.branch(router="router"),
    activation="",
    turns={"mlp.experts.gate_up_proj": lambda a: fan(a, "expert_up")[1]},
)
FAMILY = llama.FAMILY.like(
    "gpt_oss", fields,
    {
        "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "attention_bias": True, "sliding_window": 128, "num_local_experts": 128,
        "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
    },
    paths=_experts.paths(EXPERTS, replace(llama.ATTENTION, scaling="")),
    initialisation=normal(biases={"router": 0.02}),
)  # fmt: skip

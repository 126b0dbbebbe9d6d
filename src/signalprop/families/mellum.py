"""Mellum 2: Qwen3-MoE, with windows in some layers; layers with and without have different rotary bases."""

from signalprop.families import _experts, llama, qwen2_moe, qwen3_moe
from signalprop.families.base import Config, Fields, rotary_base_of, seeing


def fields(c: Config) -> Fields:
    kinds = c["layer_types"] or ["full_attention"] * c["num_hidden_layers"]
    bases = [rotary_base_of(c, kind, "", 1e4 if kind == "sliding_attention" else 5e5) for kind in kinds]
    made = llama.decoder(c) | {
        "qk_norm": True, "rotary_base": bases[0], "bias": False, **seeing(c, kinds, rotary_base=bases),
    }  # fmt: skip
    return _experts.sparse(made, _experts.dense({**c, "first_k_dense_replace": 0}), **qwen2_moe.routed(c))


FAMILY = qwen3_moe.FAMILY.like(
    "mellum", fields,
    {
        "vocab_size": 98304, "hidden_size": 2304, "intermediate_size": 7168, "num_hidden_layers": 28, "head_dim": 128,
        "max_position_embeddings": 131072, "sliding_window": 1024, "num_experts": 64, "moe_intermediate_size": 896,
        "norm_topk_prob": True, "layer_types": None,
    },
    paths=_experts.paths(_experts.branch(), llama.ATTENTION),
)  # fmt: skip

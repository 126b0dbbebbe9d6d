"""OLMoE: Llama, with norms on queries and keys over all heads, and experts in every layer."""

from signalprop.families import _experts, llama
from signalprop.families.base import Config, Fields, refuse


def fields(c: Config) -> Fields:
    refuse(c, clip_qkv="bounds on queries, keys and values")
    made = llama.decoder(c) | {"qk_norm": "whole"}
    return _experts.sparse(
        made, n_experts=c["num_experts"], top_k=c["num_experts_per_tok"], normalised=c["norm_topk_prob"]
    )


FAMILY = llama.FAMILY.like(
    "olmoe", fields,
    {
        "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16,
        "num_attention_heads": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "clip_qkv": None,
        "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False,
    },
    paths=_experts.paths(_experts.branch()),
)  # fmt: skip

"""Mixtral: Mistral, with experts in every layer."""

from signalprop.families import _experts, llama
from signalprop.families.base import Config, Fields


def fields(c: Config) -> Fields:
    made = llama.decoder({**c, "use_sliding_window": c["sliding_window"] is not None})
    return _experts.sparse(made, n_experts=c["num_local_experts"], top_k=c["num_experts_per_tok"])


FAMILY = llama.FAMILY.like(
    "mixtral", fields,
    {
        "intermediate_size": 14336, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
        "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6,
    },
    paths=_experts.paths(_experts.branch()),
)  # fmt: skip

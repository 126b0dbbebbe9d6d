"""Granite 3 MoE: Granite, with experts in every layer, the weights of the chosen normalised."""

from signalprop.families import _experts, granite, llama
from signalprop.families.base import Config, Fields


def fields(c: Config) -> Fields:
    made = llama.decoder(c) | granite.multiplied(c)
    return _experts.sparse(made, n_experts=c["num_local_experts"], top_k=c["num_experts_per_tok"])


FAMILY = granite.FAMILY.like(
    "granitemoe", fields,
    {"num_local_experts": 8, "num_experts_per_tok": 2},
    paths=_experts.paths(_experts.branch("block_sparse_moe", "router")),
)  # fmt: skip

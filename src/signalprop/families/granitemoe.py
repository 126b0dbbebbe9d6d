"""Granite 3 MoE: Granite, with experts in every layer, the weights of the chosen normalised."""

from __future__ import annotations

from typing import Any

from signalprop.families import _experts, granite, llama
from signalprop.families.base import Config


def fields(c: Config) -> dict[str, Any]:
    """Fields of an Architecture."""
    return _experts.sparse(
        llama.decoder(c) | granite.multiplied(c), [False] * c["num_hidden_layers"], n_experts=c["num_local_experts"],
        top_k=c["num_experts_per_tok"],
    )  # fmt: skip


FAMILY = granite.FAMILY.like(
    "granitemoe", fields,
    {"num_local_experts": 8, "num_experts_per_tok": 2},
    paths=_experts.paths(_experts.branch("block_sparse_moe", "router")),
)  # fmt: skip

"""K-EXAONE: norms before branches and on queries and keys, windows, and experts after the first layers.

Layers without a window rotate nothing. The bias that corrects the choice of experts starts at zero, and is read so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from signalprop.families import _experts, exaone4, glm4_moe, llama
from signalprop.families.base import Config, every, rotating_in_windows


def fields(c: Config) -> dict[str, Any]:
    """Fields of an Architecture."""
    window, n = c["sliding_window"], c["num_hidden_layers"]
    kinds = every(c["sliding_window_pattern"] if window else 1, c)
    said = c.get("mlp_layer_types")
    dense = [kind == "dense" for kind in said] if said else _experts.first(c["first_k_dense_replace"], n)
    routed = {**c, "n_routed_experts": _experts.count(c)}
    made = llama.decoder(c) | {"qk_norm": True} | rotating_in_windows(c, kinds)
    return _experts.sparse(made, dense, **glm4_moe.routed({**routed, "n_shared_experts": c["num_shared_experts"]}))


FAMILY = exaone4.FAMILY.like(
    "exaone_moe", fields,
    {
        "first_k_dense_replace": 1, "moe_intermediate_size": 1024, "num_experts": 64,
        "num_experts_per_tok": 8, "num_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "n_group": 1, "topk_group": 1,
    },
    paths=_experts.paths(_experts.branch(shared="shared_experts"), replace(llama.ATTENTION, attention="")),
)  # fmt: skip

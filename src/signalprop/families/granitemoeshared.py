"""Granite MoE with a shared feed-forward: two modules that read one norm and are added up."""

from dataclasses import replace

from signalprop.families import _experts, granite, granitemoe, llama
from signalprop.families.base import Config, Fields


def fields(c: Config) -> Fields:
    """The shared feed-forward is parallel to the experts, or the only one."""
    shared, routed = c["shared_intermediate_size"], c["num_local_experts"] > 0
    given = llama.decoder(c) | granite.multiplied(c)
    kinds = ("experts",) * routed + ("feed_forward",) * (shared > 0)
    if routed:
        experts = {"n_experts": c["num_local_experts"], "top_k": c["num_experts_per_tok"]}
        given["settings"] |= {"experts": experts | {"width": c["intermediate_size"]}}
    if len(kinds) == 2:
        given |= {"parallel": ("feed_forward",), "shared_norm": True}
    return given | {"d_ff": shared or c["intermediate_size"], "branches": ("attention", *kinds)}


SHARED = replace(
    llama.FEED_FORWARD,
    branch="shared_mlp",
    weights={"down": "shared_mlp.output_linear"},
    blocks={"shared_mlp.input_linear": ("gate", "up")},
    activation="shared_mlp.activation",
)
EXPERTS = _experts.branch("block_sparse_moe", "router")
KINDS = {"experts": EXPERTS, "feed_forward": SHARED}
FAMILY = granitemoe.FAMILY.like(
    "granitemoeshared", fields,
    {"shared_intermediate_size": 0},
    paths=llama.paths(kinds=KINDS),
)  # fmt: skip

"""What families with experts share: fields of an Architecture, and where transformers 5 has the weights."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from signalprop.families import llama
from signalprop.families.base import Config, Fields, ModelPaths, SublayerPaths


def sparse(fields: Fields, dense: Sequence[bool] | int = 0, **settings: Any) -> Fields:
    """Fields of a decoder some of whose layers have experts.

    Args:
        fields: of the dense decoder. dense: which layers have a feed-forward, or how many of the first.
        settings: of the experts.
    """
    listed = [i < dense for i in range(fields["n_layers"])] if isinstance(dense, int) else dense
    kinds = [("attention", "feed_forward" if one else "experts") for one in listed]
    branches: Any = kinds[0] if len(set(kinds)) == 1 else tuple(kinds)
    others = fields.get("settings") or {}
    if ("attention", "experts") in kinds:
        others = {**others, "experts": settings}
    return {**fields, "branches": branches, "settings": others}


def count(c: Config) -> int:
    """How many experts a configuration says; one of transformers 5 names them `num_local_experts`."""
    return int(c.get("num_local_experts", c["num_experts"]))


def dense(c: Config) -> list[bool] | int:
    """Layers without experts: those that a configuration lists, or how many of the first."""
    listed = c.get("mlp_layer_types")
    return [kind == "dense" for kind in listed] if listed else int(c["first_k_dense_replace"])


def branch(block: str = "mlp", router: str = "gate", shared: str = "", **changes: Any) -> SublayerPaths:
    """Experts as transformers 5 has them: three-dimensional parameters, gates and what they multiply in one.

    Args:
        block: the module. router, shared: in it; no `shared`: none. changes: other fields.
    """
    weights = {"router": f"{block}.{router}", "expert_down": f"{block}.experts.down_proj"}
    if shared:
        names = {"shared_gate": "gate_proj", "shared_up": "up_proj", "shared_down": "down_proj"}
        weights |= {role: f"{block}.{shared}.{name}" for role, name in names.items()}
    given = {"branch": block, "weights": weights | changes.pop("weights", {}), "activation": f"{block}.experts.act_fn"}
    return replace(
        llama.FEED_FORWARD, blocks={f"{block}.experts.gate_up_proj": ("expert_gate", "expert_up")}, **(given | changes)
    )


def paths(experts: SublayerPaths, attention: SublayerPaths = llama.ATTENTION, **changes: Any) -> tuple[ModelPaths, ...]:
    """Llama's paths, with experts in some or all layers."""
    return llama.paths(attention, kinds={"experts": experts}, **changes)

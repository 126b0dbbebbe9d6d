"""LFM2-MoE: LFM2, with experts after the first layers, chosen and weighed by a sigmoid.

The bias that corrects the choice of experts starts at zero, and is read as that.
"""

from signalprop.families import _experts, lfm2
from signalprop.families.base import Config, Fields


def fields(c: Config) -> Fields:
    made, dense = lfm2.fields(c), c["num_dense_layers"]
    layers = [(kind, "feed_forward" if i < dense else "experts") for i, (kind, _) in enumerate(made["branches"])]
    experts = {
        "n_experts": _experts.count(c), "top_k": c["num_experts_per_tok"],
        "width": c["moe_intermediate_size"], "scores": "sigmoid", "normalised": c["norm_topk_prob"],
        "scale": c["routed_scaling_factor"],
    }  # fmt: skip
    routed = {"experts": experts} if dense < len(layers) else {}
    return made | {"branches": tuple(layers), "settings": made["settings"] | routed}


EXPERTS = _experts.branch("feed_forward", norm="ffn_norm", activation="")
FAMILY = lfm2.FAMILY.like(
    "lfm2_moe", fields,
    {
        "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_dense_layers": 2,
        "num_experts_per_tok": 4, "num_experts": 32, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
        "block_auto_adjust_ff_dim": False,
    },
    paths=lfm2.FAMILY.with_stack(kinds={"gated_convolution": lfm2.CONVOLUTION, "experts": EXPERTS}),
)  # fmt: skip

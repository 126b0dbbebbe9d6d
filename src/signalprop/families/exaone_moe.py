"""K-EXAONE: norms before branches and on queries and keys, windows, and experts after the first layers.

Layers without a window rotate nothing. The bias that corrects the choice of experts starts at zero, and is read so.
"""

from signalprop.families import _experts, exaone4, glm4_moe, llama
from signalprop.families.base import Config, Fields


def fields(c: Config) -> Fields:
    routed = {**c, "n_routed_experts": _experts.count(c), "n_shared_experts": c["num_shared_experts"]}
    made = llama.decoder(c) | {"qk_norm": True} | exaone4.windows(c)
    return _experts.sparse(made, _experts.dense(c), **glm4_moe.routed(routed))


FAMILY = exaone4.FAMILY.like(
    "exaone_moe", fields,
    {
        "first_k_dense_replace": 1, "moe_intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8,
        "num_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1,
    },
    paths=_experts.paths(_experts.branch(shared="shared_experts"), llama.ATTENTION),
)  # fmt: skip

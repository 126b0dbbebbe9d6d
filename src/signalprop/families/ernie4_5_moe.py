"""ERNIE 4.5 with experts: their chosen weights normalised, shared ones beside them.

The bias that corrects the choice of experts starts at zero, and is read as that.
"""

from signalprop.families import _experts, ernie4_5, llama
from signalprop.families.base import Config, Fields, refuse


def fields(c: Config) -> Fields:
    refuse(c, use_bias="biases")
    n, step, first, last = (c[key] for key in ("num_hidden_layers", *_PLACES))
    sparse = range(first, n if last == -1 else last + 1)
    return _experts.sparse(
        llama.fields(ernie4_5.biased(c)), [i not in sparse or (i + 1) % step != 0 for i in range(n)],
        n_experts=c.get("num_local_experts") or c.get("num_experts") or c["moe_num_experts"],
        top_k=c.get("num_experts_per_tok") or c["moe_k"],
        width=c["moe_intermediate_size"], shared_width=c["moe_intermediate_size"] * c["moe_num_shared_experts"],
    )  # fmt: skip


_PLACES = ("moe_layer_interval", "moe_layer_start_index", "moe_layer_end_index")
FAMILY = ernie4_5.FAMILY.like(
    "ernie4_5_moe", fields,
    {
        "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28, "num_attention_heads": 20,
        "num_key_value_heads": 4, "head_dim": None, "moe_intermediate_size": 1536, "moe_k": 6, "moe_num_experts": 64,
        "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1,
    },
    paths=_experts.paths(_experts.branch(shared="shared_experts")),
)  # fmt: skip

"""dots.llm1: Qwen3, with experts as GLM-4.5's after the first layers; without a number of experts, none.

The bias that corrects the choice of experts starts at zero, and is read as that.
"""

from signalprop.families import _experts, glm4_moe, llama, qwen2
from signalprop.families.base import Config, Fields


def fields(c: Config) -> Fields:
    made = llama.decoder({**qwen2.later(c), "use_sliding_window": c["sliding_window"] is not None}) | {"qk_norm": True}
    n, routed = c["num_hidden_layers"], bool(c["n_routed_experts"])
    settings = glm4_moe.routed(c) if routed else {}
    return _experts.sparse(made, c["first_k_dense_replace"] if routed else n, **settings)


FAMILY = glm4_moe.FAMILY.like(
    "dots1", fields,
    {
        "vocab_size": 152064, "hidden_size": 4608, "num_hidden_layers": 62, "num_attention_heads": 32,
        "num_key_value_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "n_shared_experts": None,
        "n_routed_experts": None, "num_experts_per_tok": None, "first_k_dense_replace": 0, "norm_topk_prob": False,
        "sliding_window": 4096, "max_window_layers": 62,
    },
)  # fmt: skip

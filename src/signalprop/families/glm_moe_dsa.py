"""GLM-5: DeepSeek-V3, with an indexer that selects the tokens that a token attends to.

The indexer has no gradient and no place in the stream; it is read as what it selects at most, and predictions refuse
more tokens than that. Its weights are not counted.
"""

from signalprop.families import _experts, deepseek_v3, glm4_moe
from signalprop.families.base import Config, Fields


def fields(c: Config) -> Fields:
    """`seq_len` is at most what the indexer selects."""
    made = _experts.sparse(deepseek_v3.decoder(c), _experts.dense(c), **glm4_moe.routed(c))
    made["seq_len"] = min(made["seq_len"], c["index_topk"])
    return deepseek_v3.latent(c, made, selects=c["index_topk"])


FAMILY = deepseek_v3.FAMILY.like(
    "glm_moe_dsa", fields,
    {
        "vocab_size": 154880, "hidden_size": 6144, "intermediate_size": 12288, "num_hidden_layers": 78,
        "num_attention_heads": 64, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "n_group": 1,
        "topk_group": 1, "q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "index_topk": 2048,
    },
)  # fmt: skip

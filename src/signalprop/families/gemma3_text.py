"""Gemma 3's language model: sandwich norms, norms on queries and keys.

Its layers alternate between a sliding window and all tokens, each kind with a different rotary base.
"""

from dataclasses import replace

from signalprop.families import llama
from signalprop.families.base import Config, Fields, activation_name, every, refuse, rotary_base_of, seeing


def fields(c: Config) -> Fields:
    refuse(c, use_bidirectional_attention="bidirectional attention", final_logit_softcapping="bounds on its logits")
    kinds = every(c["sliding_window_pattern"], c)
    before = {"sliding_attention": ("rope_local_base_freq", 10_000.0), "full_attention": ("rope_theta", 1_000_000.0)}
    bases = [rotary_base_of(c, kind, *before[kind]) for kind in kinds]
    return llama.decoder(c) | {
        "activation": activation_name(c["hidden_activation"]), "norm_placement": "sandwich", "qk_norm": True,
        "embedding_scale": c["hidden_size"] ** 0.5, "attention_scale": c["query_pre_attn_scalar"] ** -0.5,
        "rotary_base": bases[0], **seeing(c, kinds, rotary_base=bases),
    }  # fmt: skip


ATTENTION = replace(
    llama.ATTENTION,
    branch="post_attention_layernorm",
    post_norm="post_attention_layernorm",
)
FEED_FORWARD = replace(
    llama.FEED_FORWARD,
    norm="pre_feedforward_layernorm",
    branch="post_feedforward_layernorm",
    post_norm="post_feedforward_layernorm",
)
FAMILY = llama.FAMILY.like(
    "gemma3_text", fields,
    {
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072, "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
        "sliding_window": 4096, "sliding_window_pattern": 6,
    },
    paths=llama.paths(ATTENTION, FEED_FORWARD, gain_offset=1.0),
)  # fmt: skip

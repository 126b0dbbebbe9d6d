"""Gemma 2: sandwich norms, capped scores, a window on every other layer.

Its final cap on the logits (30) is read as none: at initialisation it changes them by less than one part in a thousand.
"""

from signalprop.families import gemma3_text, llama
from signalprop.families.base import Config, Fields, activation_name, every, refuse, seeing


def fields(c: Config) -> Fields:
    refuse(c, use_bidirectional_attention="bidirectional attention")
    return llama.decoder(c) | {
        "activation": activation_name(c["hidden_activation"]), "norm_placement": "sandwich",
        "embedding_scale": c["hidden_size"] ** 0.5, "attention_scale": c["query_pre_attn_scalar"] ** -0.5,
        **seeing(c, every(2, c), score_cap=c["attn_logit_softcapping"]),
    }  # fmt: skip


FAMILY = gemma3_text.FAMILY.like(
    "gemma2", fields,
    {"vocab_size": 256000, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0},
)  # fmt: skip

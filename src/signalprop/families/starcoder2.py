"""StarCoder 2: Llama's attention with a window, LayerNorms, biases, no gates.

Dropout is a function call in both branches and after the embedding, which no hook sees.
"""

from dataclasses import replace

from signalprop.families import llama
from signalprop.families.base import Config, Fields, normal


def fields(c: Config) -> Fields:
    same = {"rms_norm_eps": c["norm_epsilon"], "attention_bias": c["use_bias"], "use_sliding_window": True}
    return llama.decoder({**c, **same}) | {
        "gated": False, "norm": "layernorm", "norm_bias": True, "dropout": c["residual_dropout"],
        "embedding_dropout": c["embedding_dropout"],
    }  # fmt: skip


FEED_FORWARD = replace(llama.FEED_FORWARD, weights={"up": "mlp.c_fc", "down": "mlp.c_proj"}, activation="mlp.act")
FAMILY = llama.FAMILY.like(
    "starcoder2", fields,
    defaults={
        "vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30,
        "num_attention_heads": 24, "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096, "norm_epsilon": 1e-5, "attention_dropout": 0.0, "residual_dropout": 0.0,
        "embedding_dropout": 0.0, "use_bias": True, "tie_word_embeddings": True,
    },
    paths=llama.paths(feed_forward=FEED_FORWARD),
    initialisation=normal(0.018042, usual=0.018042),
)  # fmt: skip

"""MiniCPM3: latent attention, and fixed factors on embeddings, branches and the head's input."""

import math

from signalprop.families import deepseek_v3, llama
from signalprop.families.base import Config, Fields, normal, refuse


def fields(c: Config) -> Fields:
    refuse(c, mlp_bias="biases")
    d, n = c["hidden_size"], c["num_hidden_layers"]
    depth = math.sqrt(n) if c["scale_depth"] is None else c["scale_depth"]
    made = deepseek_v3.latent(
        {**c, "v_head_dim": c["v_head_dim"] or d // c["num_attention_heads"]}, deepseek_v3.decoder(c)
    )
    return made | {
        "embedding_scale": c["scale_emb"], "branch_scale": depth / math.sqrt(n),
        "head_scale": (c["dim_model_base"] or d) / d,
    }  # fmt: skip


FAMILY = llama.FAMILY.like(
    "minicpm3", fields,
    {
        "vocab_size": 73448, "hidden_size": 2560, "intermediate_size": 6400, "num_hidden_layers": 62,
        "num_attention_heads": 40, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": None,
        "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256,
    },
    paths=llama.paths(deepseek_v3.ATTENTION),
    initialisation=normal(0.1, usual=0.1),
)  # fmt: skip

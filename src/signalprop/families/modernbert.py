"""ModernBERT: a pre-norm encoder with gates, rotations, and a window on two layers of three.

Its first layer reads the normed embeddings without another norm, which would change nothing at initialisation.
"""

import math
from collections.abc import Mapping

from signalprop.families.base import (
    Config,
    Family,
    Fields,
    Initialisation,
    ModelPaths,
    StackPaths,
    SublayerPaths,
    activation_name,
    every,
    rotary_base_of,
    seeing,
)
from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import ROLES


def fields(c: Config) -> Fields:
    """A window is of so many tokens on both sides together."""
    kinds = every(c["global_attn_every_n_layers"], c, first=True)
    before = {"sliding_attention": ("local_rope_theta", 1e4), "full_attention": ("global_rope_theta", 1.6e5)}
    bases = [rotary_base_of(c, kind, *before[kind]) for kind in kinds]
    return {
        "kind": "encoder", "n_layers": c["num_hidden_layers"], "d_model": c["hidden_size"],
        "n_heads": c["num_attention_heads"], "d_ff": c["intermediate_size"], "gated": True,
        "activation": activation_name(c["hidden_activation"]), "norm_placement": "pre", "norm_bias": c["norm_bias"],
        "norm_eps": c["norm_eps"], "positions": "rotary", "rotary_base": bases[0], "embedding_norm": True,
        "vocab_size": c["vocab_size"], "dropout": c["mlp_dropout"], "attention_dropout": c["attention_dropout"],
        "embedding_dropout": c["embedding_dropout"], "bias": bool(c["mlp_bias"]),
        "qkv_bias": bool(c["attention_bias"]), "tied_embeddings": c["tie_word_embeddings"],
        "head_bias": c["decoder_bias"],
        **seeing({**c, "sliding_window": c["local_attention"]}, kinds, rotary_base=bases),
    }  # fmt: skip


TRUNCATED = 0.87963  # standard deviation of a normal variable cut at 2


def weights(a: Architecture) -> Mapping[str, float]:
    """Cut at two standard deviations; what writes to the stream smaller with depth."""
    out = 1 / math.sqrt(2 * a.n_layers)
    return {role: 0.02 * TRUNCATED * (out if role in ("output", "down") else 1) for role in ROLES}


ATTENTION = SublayerPaths(
    norm="attn_norm", branch="attn", weights={"output": "attn.Wo"}, fused="attn.Wqkv",
)  # fmt: skip
FEED_FORWARD = SublayerPaths(
    norm="mlp_norm", branch="mlp", weights={"down": "mlp.Wo"}, blocks={"mlp.Wi": ("gate", "up")}, activation="mlp.act",
)  # fmt: skip
FAMILY = Family(
    model_type="modernbert",
    defaults={
        "vocab_size": 50368, "hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 22,
        "num_attention_heads": 12, "hidden_activation": "gelu", "max_position_embeddings": 8192, "norm_eps": 1e-5,
        "norm_bias": False, "attention_bias": False, "attention_dropout": 0.0, "local_attention": 128,
        "embedding_dropout": 0.0, "mlp_bias": False, "mlp_dropout": 0.0, "decoder_bias": True,
        "tie_word_embeddings": True, "global_attn_every_n_layers": 3,
    },
    fields=fields,
    paths=(
        ModelPaths(
            (StackPaths("layers", (ATTENTION, FEED_FORWARD), final_norm="final_norm"),),
            token="embeddings.tok_embeddings",
            embedding_norm="embeddings.norm",
            transform="head.dense",
            transform_activation="head.act",
        ),
    ),
    initialisation=Initialisation(weights, tables=0.02 * TRUNCATED, transform=lambda a: weights(a)["output"]),
    head_transform=True,
)  # fmt: skip

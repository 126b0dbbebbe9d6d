"""GPT-2."""

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
    refuse,
)
from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import ROLES


def fields(c: Config) -> Fields:
    refuse(c, add_cross_attention="cross-attention")
    return {
        "kind": "decoder", "n_layers": c["n_layer"], "d_model": c["n_embd"], "n_heads": c["n_head"],
        "d_ff": c.get("n_inner") or 4 * c["n_embd"], "activation": activation_name(c["activation_function"]),
        "norm_placement": "pre", "norm_eps": c["layer_norm_epsilon"], "positions": "learned",
        "vocab_size": c["vocab_size"], "seq_len": c["n_positions"], "dropout": c["resid_pdrop"],
        "attention_dropout": c["attn_pdrop"], "embedding_dropout": c["embd_pdrop"],
        "attention_scale": None if c["scale_attn_weights"] else 1.0, "tied_embeddings": c["tie_word_embeddings"],
    }  # fmt: skip


def weights(a: Architecture) -> Mapping[str, float]:
    """Standard deviations: the two matrices that write to the stream are divided by sqrt(2N)."""
    residual = 0.02 * (1 / math.sqrt(2 * a.n_layers))
    return dict.fromkeys(ROLES, 0.02) | {"output": residual, "down": residual}


ATTENTION = SublayerPaths(
    norm="ln_1",
    branch="attn.resid_dropout",
    weights={"output": "attn.c_proj"},
    fused="attn.c_attn",
    by_depth="attn.scale_attn_by_inverse_layer_idx",
    scaling="attn.scaling",
)
FEED_FORWARD = SublayerPaths(
    norm="ln_2", branch="mlp.dropout", weights={"up": "mlp.c_fc", "down": "mlp.c_proj"}, activation="mlp.act"
)
FAMILY = Family(
    model_type="gpt2",
    defaults={
        "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
        "activation_function": "gelu_new", "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5, "scale_attn_weights": True, "tie_word_embeddings": True,
    },
    fields=fields,
    paths=(ModelPaths((StackPaths("h", (ATTENTION, FEED_FORWARD), final_norm="ln_f"),), token="wte", position="wpe"),),
    initialisation=Initialisation(weights),
)  # fmt: skip

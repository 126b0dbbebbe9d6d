"""GPT-NeoX and Pythia: attention and feed-forward in parallel, with a norm each, or one after the other."""

from signalprop.families.base import (
    Config,
    Family,
    Fields,
    ModelPaths,
    StackPaths,
    SublayerPaths,
    activation_name,
    normal,
    rotary,
)


def fields(c: Config) -> Fields:
    return {
        "kind": "decoder", "n_layers": c["num_hidden_layers"], "d_model": c["hidden_size"],
        "n_heads": c["num_attention_heads"], "d_ff": c["intermediate_size"],
        "activation": activation_name(c["hidden_act"]), "norm_placement": "pre", "norm_eps": c["layer_norm_eps"],
        "parallel": c["use_parallel_residual"], "positions": "rotary",
        "rotary_fraction": rotary(c, "partial_rotary_factor", c["rotary_pct"]),
        "rotary_base": rotary(c, "rope_theta", c.get("rotary_emb_base", 10_000.0)), "vocab_size": c["vocab_size"],
        "seq_len": c["max_position_embeddings"], "dropout": c["hidden_dropout"],
        "attention_dropout": c["attention_dropout"], "bias": True, "qkv_bias": c["attention_bias"],
        "tied_embeddings": c["tie_word_embeddings"],
    }  # fmt: skip


ATTENTION = SublayerPaths(
    norm="input_layernorm",
    branch="post_attention_dropout",
    weights={"output": "attention.dense"},
    fused="attention.query_key_value",
    scaling="attention.scaling",
)
FEED_FORWARD = SublayerPaths(
    norm="post_attention_layernorm",
    branch="post_mlp_dropout",
    weights={"up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"},
    activation="mlp.act",
)
STACK = StackPaths("layers", (ATTENTION, FEED_FORWARD), final_norm="final_layer_norm")
FAMILY = Family(
    model_type="gpt_neox",
    defaults={
        "vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64,
        "intermediate_size": 24576, "hidden_act": "gelu", "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "tie_word_embeddings": False,
        "use_parallel_residual": True, "attention_bias": True, "rotary_pct": 0.25,
    },
    fields=fields,
    paths=(ModelPaths((STACK,), token="embed_in", fused_order="groups"),),
    initialisation=normal(),
)  # fmt: skip

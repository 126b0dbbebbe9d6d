"""Phi (1, 1.5 and 2): attention and feed-forward in parallel after one norm."""

from signalprop.families.base import (
    Config,
    Family,
    Fields,
    ModelPaths,
    StackPaths,
    SublayerPaths,
    activation_name,
    normal,
    refuse,
    rotary,
    separate,
)


def fields(c: Config) -> Fields:
    refuse(c, qk_layernorm="LayerNorms on queries and keys")
    return {
        "kind": "decoder", "n_layers": c["num_hidden_layers"], "d_model": c["hidden_size"],
        "n_heads": c["num_attention_heads"], "n_kv_heads": c.get("num_key_value_heads"),
        "d_ff": c["intermediate_size"], "activation": activation_name(c["hidden_act"]), "norm_placement": "pre",
        "norm_eps": c["layer_norm_eps"], "parallel": True, "shared_norm": True, "positions": "rotary",
        "rotary_fraction": rotary(c, "partial_rotary_factor", 0.5), "rotary_base": rotary(c, "rope_theta", 10_000.0),
        "vocab_size": c["vocab_size"], "seq_len": c["max_position_embeddings"], "dropout": c["resid_pdrop"],
        "attention_dropout": c["attention_dropout"], "embedding_dropout": c["embd_pdrop"], "bias": True,
        "tied_embeddings": c["tie_word_embeddings"], "head_bias": True,
    }  # fmt: skip


ATTENTION = SublayerPaths(
    norm="input_layernorm",
    branch="resid_dropout",  # one dropout module serves both branches of a layer
    weights=separate("self_attn.", "q_proj k_proj v_proj", "self_attn.dense"),
    calls=2,
    scaling="self_attn.scaling",
)
FEED_FORWARD = SublayerPaths(
    norm="input_layernorm",
    branch="resid_dropout",
    weights={"up": "mlp.fc1", "down": "mlp.fc2"},
    call=1,
    calls=2,
    activation="mlp.activation_fn",
)
STACK = StackPaths("layers", (ATTENTION, FEED_FORWARD), final_norm="final_layernorm")
FAMILY = Family(
    model_type="phi",
    defaults={
        "vocab_size": 51200, "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32,
        "intermediate_size": 8192, "hidden_act": "gelu_new", "max_position_embeddings": 2048, "layer_norm_eps": 1e-5,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0, "tie_word_embeddings": False,
        "qk_layernorm": False,
    },
    fields=fields,
    paths=(ModelPaths((STACK,), token="embed_tokens"),),
    initialisation=normal(),
)  # fmt: skip

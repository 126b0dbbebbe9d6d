"""Llama, and the layer that most decoders since share."""

from typing import Any

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
    seeing,
    separate,
)


def decoder(c: Config) -> Fields:
    """Fields of an Architecture, of any decoder with Llama's keys. `seq_len` is the width of a window in use."""
    kinds = c.get("layer_types") or ["sliding_attention"] if c.get("use_sliding_window") else ["full_attention"]
    return {
        "kind": "decoder", "n_layers": c["num_hidden_layers"], "d_model": c["hidden_size"],
        "n_heads": c["num_attention_heads"], "n_kv_heads": c.get("num_key_value_heads"),
        "d_head": c.get("head_dim"), "d_ff": c["intermediate_size"], "gated": True,
        "activation": activation_name(c["hidden_act"]), "norm": "rmsnorm", "norm_placement": "pre", "norm_bias": False,
        "norm_eps": c["rms_norm_eps"], "positions": "rotary", "rotary_base": rotary(c, "rope_theta", 10_000.0),
        "vocab_size": c["vocab_size"], "dropout": 0.0,
        "attention_dropout": c["attention_dropout"], "bias": bool(c["attention_bias"]),
        "qkv_bias": bool(c["attention_bias"]), "tied_embeddings": c["tie_word_embeddings"], **seeing(c, kinds),
    }  # fmt: skip


def fields(c: Config) -> Fields:
    """One `bias` is for both the attention's output and the feed-forward."""
    return decoder(c) | {"bias": bool(c["attention_bias"] or c["mlp_bias"])}


ATTENTION = SublayerPaths(
    norm="input_layernorm",
    branch="self_attn",
    weights=separate("self_attn.", "q_proj k_proj v_proj", "self_attn.o_proj"),
    scaling="self_attn.scaling",
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
)
FEED_FORWARD = SublayerPaths(
    norm="post_attention_layernorm",
    branch="mlp",
    weights={"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"},
    activation="mlp.act_fn",
)


def paths(
    attention: SublayerPaths = ATTENTION,
    feed_forward: SublayerPaths = FEED_FORWARD,
    gain_offset: float = 0.0,
    **changes: Any,
) -> tuple[ModelPaths, ...]:
    """Llama's paths with other sublayers, or other fields of the StackPaths (`changes`)."""
    stack = StackPaths(**{"layers": "layers", "sublayers": (attention, feed_forward), "final_norm": "norm", **changes})
    return (ModelPaths((stack,), token="embed_tokens", gain_offset=gain_offset),)


FAMILY = Family(
    model_type="llama",
    defaults={
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
    },
    fields=fields,
    paths=paths(),
    initialisation=normal(),
)  # fmt: skip

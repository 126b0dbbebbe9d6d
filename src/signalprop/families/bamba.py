"""Bamba: Mamba-2 in most layers, attention in some, a gated feed-forward in all."""

import math
from dataclasses import replace

from signalprop.families import llama, mamba2
from signalprop.families.base import Config, Fields, rotary

_STEP = math.log1p(math.e)  # softplus of the 1 that every dt_bias is


def scan(c: Config, inner: int) -> Fields:
    """Settings of Mamba-2 that has so many features in all heads."""
    mamba2.check(c)
    heads = c["mamba_n_heads"]
    return {
        "n_heads": heads, "d_head": inner // heads, "n_groups": c["mamba_n_groups"],
        "d_state": c["mamba_d_state"], "width": c["mamba_d_conv"], "conv_bias": bool(c["mamba_conv_bias"]),
        "bias": bool(c["mamba_proj_bias"]), "rates": (1.0, float(heads)), "steps": (_STEP, _STEP),
        "eps": c["rms_norm_eps"],
    }  # fmt: skip


def fields(c: Config) -> Fields:
    n, attend = c["num_hidden_layers"], c.get("attn_layer_indices") or ()
    kinds = ["attention" if i in attend else "mamba2" for i in range(n)]
    return llama.fields(c) | {
        "rotary_fraction": rotary(c, "partial_rotary_factor", 0.5),
        "branches": tuple((kind, "feed_forward") for kind in kinds),
        "settings": {"mamba2": scan(c, c["mamba_expand"] * c["hidden_size"])} if "mamba2" in kinds else {},
    }  # fmt: skip


FEED_FORWARD = replace(
    llama.FEED_FORWARD,
    norm="pre_ff_layernorm",
    branch="feed_forward",
    weights={role: f"feed_forward.{role}_proj" for role in ("gate", "up", "down")},
    activation="feed_forward.act_fn",
)
SCAN = replace(
    mamba2.MIXER,
    norm="input_layernorm",
    branch="mamba",
    weights={"scan_filter": "mamba.conv1d", "scan_out": "mamba.out_proj"},
    blocks={"mamba.in_proj": mamba2.MIXER.blocks["mixer.in_proj"]},
)
FAMILY = llama.FAMILY.like(
    "bamba", fields,
    defaults={
        "vocab_size": 128000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu", "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
        "attention_dropout": 0.0, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
        "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False, "time_step_limit": (0.0, math.inf),
    },
    paths=llama.paths(feed_forward=FEED_FORWARD, final_norm="final_layernorm", kinds={"mamba2": SCAN}),
)  # fmt: skip

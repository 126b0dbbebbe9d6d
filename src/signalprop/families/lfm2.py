"""LFM2: short convolutions between gates, and in some layers attention with norms on queries and keys."""

from dataclasses import replace

from signalprop.families import llama
from signalprop.families.base import Config, Fields, SublayerPaths, check_kinds, rotary, separate


def fields(c: Config) -> Fields:
    n = c["num_hidden_layers"]
    attend = c.get("full_attn_idxs")
    kinds = c.get("layer_types") or ["full_attention" if attend is None or i in attend else "conv" for i in range(n)]
    check_kinds(kinds, ("full_attention", "conv"))
    full = {"layer_types": ["full_attention"], "hidden_act": "silu", "rms_norm_eps": c["norm_eps"]}
    made = llama.decoder({**c, **full, "attention_dropout": 0.0, "attention_bias": False})
    branches = [("attention" if kind == "full_attention" else "gated_convolution", "feed_forward") for kind in kinds]
    taps = {"gated_convolution": {"width": c["conv_L_cache"], "bias": bool(c["conv_bias"])}} if "conv" in kinds else {}
    return made | {
        "qk_norm": True, "rotary_base": rotary(c, "rope_theta", 1_000_000.0), "d_ff": _hidden(c),
        "branches": tuple(branches), "settings": made["settings"] | taps,
    }  # fmt: skip


def _hidden(c: Config) -> int:
    """Two thirds of intermediate_size, rounded up to a multiple, unless that is switched off."""
    width = int(c["intermediate_size"])
    if not c["block_auto_adjust_ff_dim"]:
        return width
    width = 2 * width // 3
    if c["block_ffn_dim_multiplier"] is None:
        return width
    multiple = int(c["block_multiple_of"])
    return multiple * -(-int(c["block_ffn_dim_multiplier"] * width) // multiple)


ATTENTION = replace(
    llama.ATTENTION,
    norm="operator_norm",
    weights=separate("self_attn.", "q_proj k_proj v_proj", "self_attn.out_proj"),
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
)
CONVOLUTION = SublayerPaths(
    norm="operator_norm",
    branch="conv",
    weights={"conv_filter": "conv.conv", "conv_out": "conv.out_proj"},
    blocks={"conv.in_proj": ("conv_before", "conv_after", "conv_value")},
)
FEED_FORWARD = SublayerPaths(
    norm="ffn_norm",
    branch="feed_forward",
    weights={"gate": "feed_forward.w1", "up": "feed_forward.w3", "down": "feed_forward.w2"},
)
FAMILY = llama.FAMILY.like(
    "lfm2", fields,
    defaults={
        "vocab_size": 65536, "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 128_000, "norm_eps": 1e-5,
        "tie_word_embeddings": True, "conv_bias": False, "conv_L_cache": 3, "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True,
    },
    paths=llama.paths(
        ATTENTION, FEED_FORWARD, final_norm="embedding_norm", kinds={"gated_convolution": CONVOLUTION}
    ),
)  # fmt: skip

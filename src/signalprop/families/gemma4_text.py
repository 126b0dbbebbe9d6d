"""Gemma 4's language model, dense: Gemma 3 with norms on values and scores that are not scaled.

Layers that see all tokens have heads of another width, and may use their keys as values. The final cap on the
logits (30 in released models) is read as none, as Gemma 2's. A layer's scalar, 1 at first, multiplies skip and branch
of its last sublayer where a live model is mapped. Per-layer inputs, keys and values of earlier layers, and experts
beside the feed-forward are refused; transformers' configuration class has the first by default.
"""

from dataclasses import replace

from signalprop.errors import InputError
from signalprop.families import gemma3_text, llama
from signalprop.families.base import BY_HAND, Config, Fields, activation_name, every, rotary_base_of, seeing, separate

_REFUSED = {
    "hidden_size_per_layer_input": "branches that read inputs per layer",
    "num_kv_shared_layers": "layers that attend to the keys of earlier ones",
    "enable_moe_block": "experts beside the feed-forward",
}


def fields(c: Config) -> Fields:
    for key, what in _REFUSED.items():
        if c[key]:
            raise InputError(f"Gemma 4 with {key} {c[key]} has {what}, which is not derived; {BY_HAND}")
    if c["use_bidirectional_attention"] == "all":
        raise InputError(f"Gemma 4 with bidirectional attention is not supported; {BY_HAND}")
    kinds = [*every(6, c)[:-1], "full_attention"]  # transformers makes the last layer one
    local = "sliding_attention" in kinds
    near = rotary_base_of(c, "sliding_attention", "rope_local_base_freq", 10_000.0)
    made = llama.decoder(c) | {
        "activation": activation_name(c["hidden_activation"]), "norm_placement": "sandwich", "qk_norm": True,
        "embedding_scale": c["hidden_size"] ** 0.5, "attention_scale": 1.0, "rotary_base": near,
        "branches": tuple((_KINDS.get(kind, kind), "feed_forward") for kind in kinds),
    }  # fmt: skip
    seen = seeing(c, ["sliding_attention"] if local else ["full_attention"], value_norm=True)
    settings = seen["settings"] if local else {}
    return made | seen | {"settings": settings | {"global_attention": _global(c, kinds)}}


_KINDS = {"sliding_attention": "attention", "full_attention": "global_attention"}


def _global(c: Config, kinds: list[str]) -> Fields:
    """Settings of the layers that see all tokens."""
    said = c.get("per_layer_config")
    if said is None:  # what released configurations say, and transformers writes layer by layer
        kv = c.get("num_global_key_value_heads") if c["attention_k_eq_v"] else None
        own = {"head_dim": c.get("global_head_dim", 512)} | ({"num_key_value_heads": kv} if kv else {})
        said = {i: own for i, kind in enumerate(kinds) if kind == "full_attention"}
    by_layer = {int(i): dict(own) for i, own in said.items()}
    heads = by_layer.get(len(kinds) - 1, {})
    others = [i for i, kind in enumerate(kinds) if by_layer.get(i, {}) != (heads if kind == "full_attention" else {})]
    if others or heads.keys() - {"head_dim", "num_key_value_heads"}:
        raise InputError(f"Gemma 4 with a per_layer_config of more than its full layers' heads: {BY_HAND}")
    turned = (c.get("rope_parameters") or {}).get("full_attention") or {}
    return {
        "d_head": heads.get("head_dim") or c["head_dim"],
        "n_kv_heads": heads.get("num_key_value_heads") or c["num_key_value_heads"],
        "rotary_base": turned.get("rope_theta", 1_000_000.0),
        "rotary_fraction": turned.get("partial_rotary_factor", 0.25 if not turned else 1.0),
        "proportional": turned.get("rope_type", "proportional") == "proportional",
        "value_norm": True, "shared": bool(c["attention_k_eq_v"]),
    }  # fmt: skip


_GLOBAL = replace(
    gemma3_text.ATTENTION,
    weights={
        f"global_{role}": path
        for role, path in separate("self_attn.", "q_proj k_proj v_proj", "self_attn.o_proj").items()
    },
)
_SHARED = replace(_GLOBAL, weights={role: path for role, path in _GLOBAL.weights.items() if role != "global_value"})
FAMILY = gemma3_text.FAMILY.like(
    "gemma4_text", fields,
    {
        "vocab_size": 262144, "num_hidden_layers": 30, "sliding_window": 512, "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 0, "enable_moe_block": False, "attention_k_eq_v": False,
        "use_bidirectional_attention": None,
    },
    readable={"hidden_size_per_layer_input": 0},
    paths=tuple(
        replace(paths, gain_offset=0.0)
        for row in (_GLOBAL, _SHARED)
        for paths in gemma3_text.FAMILY.with_stack(scalar="layer_scalar", kinds={"global_attention": row})
    ),
)  # fmt: skip

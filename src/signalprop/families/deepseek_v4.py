"""DeepSeek-V4: several residual streams, shared keys and values, averages of earlier runs of tokens, experts.

Its indexer has no gradient and no place in the stream: predictions refuse longer sequences than it selects all of. The
table that chooses experts in its first layers is read as transformers draws it, all zeros. Stretched rotations are read
as plain ones of the same base; the clamps on experts at 10 are left out. Its models are measured, and predicted from
their configuration; no table is read from their weights.
"""

from signalprop.errors import InputError
from signalprop.families import llama
from signalprop.families.base import BY_HAND, Config, Fields, check_kinds, refuse

NAME, HEAVY = "shared_kv_attention", "heavily_compressed_attention"
SPARSE = "compressed_sparse_attention"
_KINDS = {"sliding_attention": NAME, "compressed_sparse_attention": SPARSE, "heavily_compressed_attention": HEAVY}
_OF_RATIO = {0: NAME, 4: SPARSE, 128: HEAVY}


def kinds(c: Config) -> list[str]:
    """The attention of every layer."""
    n = c["num_hidden_layers"]
    if c.get("layer_types") is None and c.get("compress_ratios"):
        return [_OF_RATIO[ratio] for ratio in c["compress_ratios"][:n]]
    listed = c.get("layer_types") or ["heavily_compressed_attention"] * 2 + [
        "compressed_sparse_attention" if i % 2 else "heavily_compressed_attention" for i in range(n - 2)
    ]
    check_kinds(listed, _KINDS)
    return [_KINDS[kind] for kind in listed[:n]]


def fields(c: Config) -> Fields:
    """`seq_len` is the width of the windows."""
    refuse(c, attention_bias="biases", mlp_bias="biases")
    n, d_head = c["num_hidden_layers"], c["head_dim"]
    rates = c.get("compress_rates") or {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    turned = c.get("qk_rope_head_dim") or int(d_head * (c.get("partial_rotary_factor") or 64 / 512))
    given = {
        "window": c["sliding_window"], "query_rank": c["q_lora_rank"], "groups": c["o_groups"],
        "group_rank": c["o_lora_rank"], "d_rotary": turned,
    }  # fmt: skip
    later = given | {"rotary_base": float(c["compress_rope_theta"])}
    heavy = later | {"rate": rates["heavily_compressed_attention"]}
    sparse = later | {"rate": rates["compressed_sparse_attention"], "selects": c["index_topk"]}
    layers = kinds(c)
    routing = c.get("mlp_layer_types") or ["hash_moe"] * min(n, c.get("num_hash_layers", 3))
    hashed = routing.count("hash_moe")
    if "hash_moe" in routing[hashed:]:
        raise InputError(f"deepseek_v4 with experts by tables of ids after others is not supported; {BY_HAND}")
    experts = {
        "n_experts": c["n_routed_experts"], "top_k": c["num_experts_per_tok"], "width": c["moe_intermediate_size"],
        "scores": c["scoring_func"], "normalised": True, "scale": c["routed_scaling_factor"],
        "shared_width": c["moe_intermediate_size"], "hashed": hashed,
    }  # fmt: skip
    of_kind = {NAME: given, HEAVY: heavy, SPARSE: sparse}
    made = llama.decoder({**c, "intermediate_size": c["moe_intermediate_size"], "num_key_value_heads": 1})
    return made | {
        "seq_len": min(c["sliding_window"], c["max_position_embeddings"]),
        "branches": tuple((kind, "experts") for kind in layers),
        "settings": {kind: of_kind[kind] for kind in dict.fromkeys(layers)} | {"experts": experts},
        "streams": {"n": c["hc_mult"], "mixing": "mhc", "gate_std": 0.02, "sinkhorn": c["hc_sinkhorn_iters"]},
    }  # fmt: skip


FAMILY = llama.FAMILY.like(
    "deepseek_v4", fields,
    {
        "vocab_size": 129280, "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64,
        "max_position_embeddings": 1048576, "head_dim": 512, "q_lora_rank": 1024, "moe_intermediate_size": 2048,
        "n_routed_experts": 256, "num_experts_per_tok": 6, "scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5,
        "sliding_window": 128, "o_groups": 8, "o_lora_rank": 1024, "index_topk": 512, "compress_rope_theta": 160000.0,
        "hc_mult": 4, "hc_sinkhorn_iters": 20,
    },
    paths=(),
)  # fmt: skip

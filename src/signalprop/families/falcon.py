"""Falcon, the generation with rotary positions: parallel with one norm or two, or sequential."""

from signalprop.errors import InputError
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
    """Dropout of attention and embeddings is read by transformers and never applied."""
    if c["alibi"]:
        raise InputError(
            "Falcon with alibi (a bias on scores that grows with distance) is not supported; only rotary is"
        )
    new = bool(c["new_decoder_architecture"])
    parallel = new or bool(c["parallel_attn"])
    if not parallel and (c["hidden_dropout"] or c["attention_dropout"]):
        raise InputError(
            "Falcon without parallel_attn drops out its attention branch by the attention_dropout of a config that all "
            "layers share; this is not supported: set hidden_dropout and attention_dropout to 0"
        )
    n_kv_heads = (c.get("num_kv_heads") or c["num_attention_heads"]) if new or not c["multi_query"] else 1
    return {
        "kind": "decoder", "n_layers": c["num_hidden_layers"], "d_model": c["hidden_size"],
        "n_heads": c["num_attention_heads"], "n_kv_heads": n_kv_heads,
        "d_ff": c.get("ffn_hidden_size") or 4 * c["hidden_size"], "activation": activation_name(c["activation"]),
        "norm_placement": "pre", "norm_eps": c["layer_norm_epsilon"], "parallel": parallel,
        "shared_norm": parallel and (c.get("num_ln_in_parallel_attn") or 1 + new) == 1, "positions": "rotary",
        "rotary_base": rotary(c, "rope_theta", 10_000.0), "vocab_size": c["vocab_size"],
        "seq_len": c["max_position_embeddings"], "dropout": c["hidden_dropout"], "attention_dropout": 0.0,
        "embedding_dropout": 0.0, "bias": c["bias"], "tied_embeddings": c["tie_word_embeddings"],
    }  # fmt: skip


def paths(first: str, second: str) -> ModelPaths:
    """Paths by the names of the two norms. The sum of both branches is dropped out where they are parallel."""
    attention = SublayerPaths(
        norm=first,
        branch="self_attention",
        weights={"output": "self_attention.dense"},
        fused="self_attention.query_key_value",
        dropout="hidden_dropout",
    )
    feed_forward = SublayerPaths(
        norm=second,
        branch="mlp",
        weights={"up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"},
        dropout="hidden_dropout",
        activation="mlp.act",
    )
    stack = StackPaths("h", (attention, feed_forward), final_norm="ln_f")
    return ModelPaths((stack,), token="word_embeddings", fused_order="groups")


FAMILY = Family(
    model_type="falcon",
    defaults={
        "vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
        "activation": "gelu", "layer_norm_epsilon": 1e-5, "max_position_embeddings": 2048, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "bias": False, "alibi": False, "multi_query": True, "parallel_attn": True,
        "new_decoder_architecture": False, "tie_word_embeddings": True,
    },
    fields=fields,
    paths=(
        paths("ln_attn", "ln_mlp"),  # two norms
        paths("input_layernorm", "post_attention_layernorm"),  # sequential
        paths("input_layernorm", "input_layernorm"),  # one norm
    ),
    initialisation=normal(),
)  # fmt: skip

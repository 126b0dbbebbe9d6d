"""OPT, pre-norm or post-norm. Its dropout is a function call: in training mode branches are seen before it."""

from dataclasses import replace

from signalprop.errors import InputError
from signalprop.families import bart
from signalprop.families.base import BY_HAND, Config, Family, Fields, ModelPaths, activation_name, normal


def fields(c: Config) -> Fields:
    if c.get("word_embed_proj_dim") not in (None, c["hidden_size"]):
        raise InputError(
            f"OPT with word_embed_proj_dim {c['word_embed_proj_dim']} beside hidden_size {c['hidden_size']} maps its "
            f"embeddings to another width, which an Architecture cannot say; {BY_HAND}"
        )
    before = bool(c["do_layer_norm_before"])
    return {
        "kind": "decoder", "n_layers": c["num_hidden_layers"], "d_model": c["hidden_size"],
        "n_heads": c["num_attention_heads"], "d_ff": c["ffn_dim"],
        "activation": activation_name(c["activation_function"]), "norm_placement": "pre" if before else "post",
        "final_norm": None if before and not c["_remove_final_layer_norm"] else False, "norm_eps": 1e-5,
        "norm_bias": c["layer_norm_elementwise_affine"], "positions": "learned", "vocab_size": c["vocab_size"],
        "seq_len": c["max_position_embeddings"], "dropout": c["dropout"], "attention_dropout": c["attention_dropout"],
        "embedding_dropout": 0.0, "bias": c["enable_bias"], "tied_embeddings": c["tie_word_embeddings"],
    }  # fmt: skip


STACK = replace(bart.stack("decoder", final_norm=False), final_norm="decoder.final_layer_norm")
FAMILY = Family(
    model_type="opt",
    defaults={
        "vocab_size": 50272, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072,
        "activation_function": "relu", "max_position_embeddings": 2048, "do_layer_norm_before": True, "dropout": 0.1,
        "attention_dropout": 0.0, "enable_bias": True, "layer_norm_elementwise_affine": True,
        "tie_word_embeddings": True, "_remove_final_layer_norm": False,
    },
    fields=fields,
    paths=(
        ModelPaths(
            stacks=(STACK,),
            token="decoder.embed_tokens",
            position="decoder.embed_positions",
            classifiers=("score",),
        ),
    ),
    initialisation=normal(setting="init_std"),
    position_offset=2,
)  # fmt: skip

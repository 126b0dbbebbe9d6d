"""BERT, as an encoder or a decoder without cross-attention."""

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
    refuse,
    separate,
)


def fields(c: Config) -> Fields:
    """Fields of an Architecture, of BERT and of what is laid out like it."""
    refuse(c, add_cross_attention="cross-attention in a decoder")
    if c.get("position_embedding_type", "absolute") != "absolute":
        raise InputError(
            f"position_embedding_type {c['position_embedding_type']!r} is not supported; expected 'absolute'"
        )
    return {
        "kind": "decoder" if c["is_decoder"] else "encoder", "n_layers": c["num_hidden_layers"],
        "d_model": c["hidden_size"], "n_heads": c["num_attention_heads"], "d_ff": c["intermediate_size"],
        "activation": activation_name(c["hidden_act"]), "norm_placement": "post", "final_norm": False,
        "norm_eps": c["layer_norm_eps"], "positions": "learned", "n_segments": c["type_vocab_size"] or 0,
        "embedding_norm": True, "vocab_size": c["vocab_size"], "seq_len": c["max_position_embeddings"],
        "dropout": c["hidden_dropout_prob"], "attention_dropout": c["attention_probs_dropout_prob"],
        "tied_embeddings": c["tie_word_embeddings"],
    }  # fmt: skip


ATTENTION = SublayerPaths(
    norm="attention.output.LayerNorm",
    branch="attention.output.dropout",
    weights=separate("attention.self.", "query key value", "attention.output.dense"),
    scaling="attention.self.scaling",
)
FEED_FORWARD = SublayerPaths(
    norm="output.LayerNorm",
    branch="output.dropout",
    weights={"up": "intermediate.dense", "down": "output.dense"},
    activation="intermediate.intermediate_act_fn",
)
PATHS = ModelPaths(
    stacks=(StackPaths("encoder.layer", (ATTENTION, FEED_FORWARD)),),
    token="embeddings.word_embeddings",
    position="embeddings.position_embeddings",
    segment="embeddings.token_type_embeddings",
    embedding_norm="embeddings.LayerNorm",
    transform="cls.predictions.transform.dense",
    transform_activation="cls.predictions.transform.transform_act_fn",
    classifiers=("classifier", "classifier.out_proj"),
    inputs={"tokens": "input_ids", "keep": "attention_mask", "segments": "token_type_ids"},
)
FAMILY = Family(
    model_type="bert",
    defaults={
        "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072, "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1, "max_position_embeddings": 512, "type_vocab_size": 2,
        "layer_norm_eps": 1e-12, "pad_token_id": 0, "tie_word_embeddings": True, "is_decoder": False,
    },
    fields=fields,
    paths=(PATHS,),
    initialisation=normal(),
    head_transform=True,
)  # fmt: skip

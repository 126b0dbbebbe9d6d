"""ViT."""

from dataclasses import replace

from signalprop.families import bert
from signalprop.families.base import (
    Config,
    Family,
    Fields,
    ModelPaths,
    StackPaths,
    SublayerPaths,
    activation_name,
    normal,
    pair,
    separate,
)


def fields(c: Config) -> Fields:
    height, width = pair(c["image_size"])
    rows, columns = pair(c["patch_size"])
    return {
        "kind": "encoder", "n_layers": c["num_hidden_layers"], "d_model": c["hidden_size"],
        "n_heads": c["num_attention_heads"], "d_ff": c["intermediate_size"],
        "activation": activation_name(c["hidden_act"]), "norm_placement": "pre", "norm_eps": c["layer_norm_eps"],
        "positions": "learned", "input": "patches", "patch_dim": c["num_channels"] * rows * columns,
        "class_token": True, "seq_len": (height // rows) * (width // columns) + 1,
        "dropout": c["hidden_dropout_prob"], "attention_dropout": c["attention_probs_dropout_prob"],
        "qkv_bias": c["qkv_bias"], "tied_embeddings": False,
    }  # fmt: skip


NOW = StackPaths(
    "layers",
    (
        SublayerPaths(
            norm="layernorm_before",
            branch="dropout",  # one dropout module serves both branches of a layer
            weights=separate("attention.", "q_proj k_proj v_proj", "attention.o_proj"),
            calls=2,
            scaling="attention.scaling",
        ),
        SublayerPaths(
            norm="layernorm_after",
            branch="dropout",
            weights={"up": "mlp.fc1", "down": "mlp.fc2"},
            call=1,
            calls=2,
            activation="mlp.activation_fn",
        ),
    ),
    final_norm="layernorm",
)
BEFORE = StackPaths(
    "encoder.layer",
    (
        SublayerPaths(
            norm="layernorm_before",
            branch="attention.output.dropout",
            weights=separate("attention.attention.", "query key value", "attention.output.dense"),
            scaling="attention.attention.scaling",
        ),
        replace(bert.FEED_FORWARD, norm="layernorm_after"),
    ),
    final_norm="layernorm",
)


def paths(*class_tokens: str) -> tuple[ModelPaths, ...]:
    """Paths of a ViT with these class tokens, by the version of transformers."""
    return tuple(
        ModelPaths(
            stacks=(stack,),
            token="embeddings.patch_embeddings.projection",
            position="embeddings.position_embeddings",
            class_tokens=tuple(f"embeddings.{name}" for name in class_tokens),
            classifiers=("classifier", "cls_classifier"),
            inputs={"patches": "pixel_values"},
        )
        for stack in (NOW, BEFORE)
    )


FAMILY = Family(
    model_type="vit",
    defaults={
        "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "layer_norm_eps": 1e-12,
        "image_size": 224, "patch_size": 16, "num_channels": 3, "qkv_bias": True,
    },
    fields=fields,
    paths=paths("cls_token"),
    initialisation=normal(),
    head="classes",
)  # fmt: skip

"""T5, plain or gated, whole or its encoder alone."""

from collections.abc import Mapping

from signalprop.families.base import (
    Config,
    Family,
    Fields,
    Initialisation,
    ModelPaths,
    StackPaths,
    SublayerPaths,
    activation_name,
    separate,
)
from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import ROLES, fan


def fields(c: Config) -> Fields:
    """Dropout inside the feed-forward has no place in an Architecture and is not read."""
    first, _, second = c["feed_forward_proj"].partition("-")
    gated = first == "gated"
    # "gated-gelu" has always meant the tanh approximation
    act = "gelu_new" if c["feed_forward_proj"] == "gated-gelu" else second if gated else first
    return {
        "kind": "encoder-decoder", "n_layers": c["num_layers"],
        "n_decoder_layers": c.get("num_decoder_layers") or c["num_layers"], "d_model": c["d_model"],
        "n_heads": c["num_heads"], "d_head": c["d_kv"], "d_ff": c["d_ff"], "gated": gated,
        "activation": activation_name(act), "norm": "rmsnorm", "norm_placement": "pre", "norm_bias": False,
        "norm_eps": c["layer_norm_epsilon"], "positions": "relative", "attention_scale": 1.0,
        "vocab_size": c["vocab_size"], "seq_len": c["n_positions"], "target_len": c["n_positions"],
        "dropout": c["dropout_rate"], "bias": False, "tied_embeddings": c.get("tie_word_embeddings", True),
    }  # fmt: skip


def weights(a: Architecture) -> Mapping[str, float]:
    """Standard deviations. The random bias on scores, of standard deviation d^-1/2, has no column in the table."""
    return {role: fan(a, role)[0] ** -0.5 for role in ROLES} | {"query": (a.d_model * a.d_head) ** -0.5}


def _attention(place: str, name: str) -> SublayerPaths:
    return SublayerPaths(
        norm=f"{place}.layer_norm",
        branch=f"{place}.dropout",
        weights=separate(f"{place}.{name}.", "q k v", f"{place}.{name}.o"),
        scaling=f"{place}.{name}.scaling",
    )


def _feed_forward(place: str, *, gated: bool) -> SublayerPaths:
    inner = {"gate": "wi_0", "up": "wi_1", "down": "wo"} if gated else {"up": "wi", "down": "wo"}
    return SublayerPaths(
        norm=f"{place}.layer_norm",
        branch=f"{place}.dropout",
        weights={role: f"{place}.DenseReluDense.{name}" for role, name in inner.items()},
        activation=f"{place}.DenseReluDense.act",
    )


def paths(*, gated: bool, decoder: bool) -> ModelPaths:
    """Paths of both stacks, or of the encoder alone."""
    first = StackPaths(
        "encoder.block",
        (_attention("layer.0", "SelfAttention"), _feed_forward("layer.1", gated=gated)),
        final_norm="encoder.final_layer_norm",
    )
    second = StackPaths(
        "decoder.block",
        (
            _attention("layer.0", "SelfAttention"),
            _attention("layer.1", "EncDecAttention"),
            _feed_forward("layer.2", gated=gated),
        ),
        final_norm="decoder.final_layer_norm",
    )
    inputs = {"tokens": "input_ids", "keep": "attention_mask"}
    return ModelPaths(
        stacks=(first, second) if decoder else (first,),
        token="shared",
        classifiers=("classifier", "classification_head.out_proj"),
        inputs=inputs | ({"decoder_tokens": "decoder_input_ids"} if decoder else {}),
    )


FAMILY = Family(
    model_type="t5",
    defaults={
        "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8,
        "dropout_rate": 0.1, "layer_norm_epsilon": 1e-6, "feed_forward_proj": "relu", "n_positions": 512,
    },
    fields=fields,
    paths=tuple(paths(gated=gated, decoder=decoder) for decoder in (True, False) for gated in (False, True)),
    initialisation=Initialisation(weights, tables=1.0, setting="initializer_factor", usual=1.0, gains=True),
    encoder_classes=("T5EncoderModel",),
    tied_head_scale=lambda a: a.d_model**-0.5,
)  # fmt: skip

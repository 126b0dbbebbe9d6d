"""Where the signal runs in Hugging Face models: one row of module paths per family.

Paths are relative to a layer (sublayers), to the base model (stacks, embeddings), or to the whole model
(heads). A family has several rows where its modules moved between versions of transformers, or differ with
its configuration; the first that fits the model is taken. Branches end behind the output dropout, as
`SublayerMap` wants, where that dropout is a module; OPT, Falcon, BART, Whisper and Speech2Text drop out by a
function call that no hook sees, so in training mode their branches are seen before it.
"""

from __future__ import annotations

from collections.abc import Mapping as Dictionary
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Row:
    """A sublayer: paths in its layer. `fused` is the module that holds query, key and value together.

    `call` of `calls`: see SublayerMap. `by_depth`: path of a flag that divides the scores by the layer's number.
    `scaling`, `dropout`, `reads`, `post_norm`: see SublayerMap; a `scaling` that the installed transformers does not
    have counts as none, and `reads` of "" is the layer itself. `attention`, `activation`: see SublayerMap; no
    `attention`: the family has one of its own that no other function can take the place of (Gemma 3 sees only a window
    in some layers), or a relative bias.
    """

    norm: str
    branch: str
    weights: Dictionary[str, str]
    fused: str = ""
    call: int = 0
    calls: int = 1
    by_depth: str = ""
    scaling: str = ""
    dropout: str = ""
    reads: str | None = None
    post_norm: str = ""
    attention: str = ""
    activation: str = ""


@dataclass(frozen=True)
class StackRow:
    """A stack: paths in the base model, and the rows of a layer in order."""

    layers: str
    rows: tuple[Row, ...]
    final_norm: str | None = None


@dataclass(frozen=True)
class Family:
    """A family.

    Attributes:
        fused_order: query, key, value as three `blocks`, or by turns in `groups` (query heads of a key, the key, its
            value).
        position, decoder_position: the tables, or root mean squares of ones that the model computes.
        transform, transform_activation: the dense layer before the head, and its activation where that is a module.
        convolutions: the maps that read frames, or lists of them. features_first: frames are (batch, features, frames).
        padding: the argument that holds the mask of what the (first) stack reads.
    """

    stacks: tuple[StackRow, ...]
    token: str
    position: str | float | None = None
    segment: str | None = None
    embedding_norm: str | None = None
    decoder_position: str | float | None = None
    decoder_norm: str | None = None
    class_tokens: tuple[str, ...] = ()
    convolutions: tuple[str, ...] = ()
    features_first: bool = False
    fused_order: str = "blocks"
    transform: str | None = None
    transform_activation: str | None = None
    classifiers: tuple[str, ...] = ("classifier",)
    gain_offset: float = 0.0
    padding: str = "attention_mask"
    inputs: Dictionary[str, str] = field(default_factory=lambda: {"tokens": "input_ids", "keep": "attention_mask"})


def _separate(prefix: str, names: str, output: str) -> dict[str, str]:
    roles = zip(("query", "key", "value"), names.split(), strict=True)
    return {role: f"{prefix}{name}" for role, name in roles} | {"output": output}


def _bert(transform: str, activation: str | None = None) -> Family:
    attention = Row(
        norm="attention.output.LayerNorm",
        branch="attention.output.dropout",
        weights=_separate("attention.self.", "query key value", "attention.output.dense"),
        scaling="attention.self.scaling",
        attention="attention.self",
    )
    feed_forward = Row(
        norm="output.LayerNorm",
        branch="output.dropout",
        weights={"up": "intermediate.dense", "down": "output.dense"},
        activation="intermediate.intermediate_act_fn",
    )
    return Family(
        stacks=(StackRow("encoder.layer", (attention, feed_forward)),),
        token="embeddings.word_embeddings",
        position="embeddings.position_embeddings",
        segment="embeddings.token_type_embeddings",
        embedding_norm="embeddings.LayerNorm",
        transform=transform,
        transform_activation=activation,
        classifiers=("classifier", "classifier.out_proj"),
        inputs={"tokens": "input_ids", "keep": "attention_mask", "segments": "token_type_ids"},
    )


def _mpnet() -> Family:
    bert = _bert("lm_head.dense")
    _, feed_forward = bert.stacks[0].rows
    attention = Row(
        norm="attention.LayerNorm",
        branch="attention.dropout",
        weights=_separate("attention.attn.", "q k v", "attention.attn.o"),
    )
    return replace(
        bert,
        stacks=(StackRow("encoder.layer", (attention, feed_forward)),),
        segment=None,
        inputs={"tokens": "input_ids", "keep": "attention_mask"},
    )


_GPT2 = Family(
    stacks=(
        StackRow(
            "h",
            (
                Row(
                    "ln_1",
                    "attn.resid_dropout",
                    {"output": "attn.c_proj"},
                    fused="attn.c_attn",
                    by_depth="attn.scale_attn_by_inverse_layer_idx",
                    scaling="attn.scaling",
                    attention="attn",
                ),
                Row("ln_2", "mlp.dropout", {"up": "mlp.c_fc", "down": "mlp.c_proj"}, activation="mlp.act"),
            ),
            final_norm="ln_f",
        ),
    ),
    token="wte",
    position="wpe",
    classifiers=("score", "classifier"),
)


def _llama(**changes: Any) -> Family:
    weights = _separate("self_attn.", "q_proj k_proj v_proj", "self_attn.o_proj")
    attention = Row("input_layernorm", "self_attn", weights, scaling="self_attn.scaling", attention="self_attn")
    gated = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
    feed_forward = Row("post_attention_layernorm", "mlp", gated, activation="mlp.act_fn")
    stack = StackRow("layers", (attention, feed_forward), final_norm="norm")
    return Family(stacks=(stack,), token="embed_tokens", classifiers=("score", "classifier"), **changes)


_GEMMA3 = Family(
    stacks=(
        StackRow(
            "layers",
            (
                Row(
                    "input_layernorm",
                    "post_attention_layernorm",
                    _separate("self_attn.", "q_proj k_proj v_proj", "self_attn.o_proj"),
                    scaling="self_attn.scaling",
                    post_norm="post_attention_layernorm",
                ),
                Row(
                    "pre_feedforward_layernorm",
                    "post_feedforward_layernorm",
                    {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"},
                    post_norm="post_feedforward_layernorm",
                    activation="mlp.act_fn",
                ),
            ),
            final_norm="norm",
        ),
    ),
    token="embed_tokens",
    classifiers=("score", "classifier"),
    gain_offset=1.0,
)


def _vit(layers: str, attention: Row, feed_forward: Row, *more: str) -> Family:
    return Family(
        stacks=(StackRow(layers, (attention, feed_forward), final_norm="layernorm"),),
        token="embeddings.patch_embeddings.projection",
        position="embeddings.position_embeddings",
        class_tokens=("embeddings.cls_token", *(f"embeddings.{name}" for name in more)),
        classifiers=("classifier", "cls_classifier"),
        inputs={"patches": "pixel_values"},
    )


_VIT_5 = (
    "layers",
    # one dropout module serves both branches of a layer
    Row(
        "layernorm_before",
        "dropout",
        _separate("attention.", "q_proj k_proj v_proj", "attention.o_proj"),
        calls=2,
        scaling="attention.scaling",
        attention="attention",
    ),
    Row(
        "layernorm_after",
        "dropout",
        {"up": "mlp.fc1", "down": "mlp.fc2"},
        call=1,
        calls=2,
        activation="mlp.activation_fn",
    ),
)
_VIT_4 = (  # transformers 4
    "encoder.layer",
    Row(
        "layernorm_before",
        "attention.output.dropout",
        _separate("attention.attention.", "query key value", "attention.output.dense"),
        scaling="attention.attention.scaling",
        attention="attention.attention",
    ),
    Row(
        "layernorm_after",
        "output.dropout",
        {"up": "intermediate.dense", "down": "output.dense"},
        activation="intermediate.intermediate_act_fn",
    ),
)


def _t5(*, gated: bool, decoder: bool) -> Family:
    def attention(place: str, name: str) -> Row:
        weights = _separate(f"{place}.{name}.", "q k v", f"{place}.{name}.o")
        return Row(f"{place}.layer_norm", f"{place}.dropout", weights, scaling=f"{place}.{name}.scaling")

    def feed_forward(place: str) -> Row:
        inner = {"gate": "wi_0", "up": "wi_1", "down": "wo"} if gated else {"up": "wi", "down": "wo"}
        weights = {role: f"{place}.DenseReluDense.{name}" for role, name in inner.items()}
        return Row(f"{place}.layer_norm", f"{place}.dropout", weights, activation=f"{place}.DenseReluDense.act")

    first = StackRow(
        "encoder.block", (attention("layer.0", "SelfAttention"), feed_forward("layer.1")), "encoder.final_layer_norm"
    )
    second = StackRow(
        "decoder.block",
        (attention("layer.0", "SelfAttention"), attention("layer.1", "EncDecAttention"), feed_forward("layer.2")),
        "decoder.final_layer_norm",
    )
    inputs = {"tokens": "input_ids", "keep": "attention_mask"} | (
        {"decoder_tokens": "decoder_input_ids"} if decoder else {}
    )
    classifiers = ("classifier", "classification_head.out_proj")
    return Family((first, second) if decoder else (first,), "shared", classifiers=classifiers, inputs=inputs)


_GPT_NEOX = Family(
    stacks=(
        StackRow(
            "layers",
            (
                Row(
                    "input_layernorm",
                    "post_attention_dropout",
                    {"output": "attention.dense"},
                    fused="attention.query_key_value",
                    scaling="attention.scaling",
                    attention="attention",
                ),
                Row(
                    "post_attention_layernorm",
                    "post_mlp_dropout",
                    {"up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"},
                    activation="mlp.act",
                ),
            ),
            final_norm="final_layer_norm",
        ),
    ),
    token="embed_in",
    fused_order="groups",
    classifiers=("score", "classifier"),
)


def _llama_like(final: str, attention: Row, feed_forward: Row) -> Family:
    stack = StackRow("layers", (attention, feed_forward), final_norm=final)
    return Family(stacks=(stack,), token="embed_tokens", classifiers=("score", "classifier"))


_OLMO2 = _llama_like(
    "norm",
    Row(
        "post_attention_layernorm",
        "post_attention_layernorm",
        _separate("self_attn.", "q_proj k_proj v_proj", "self_attn.o_proj"),
        scaling="self_attn.scaling",
        reads="",
        attention="self_attn",
    ),
    Row(
        "post_feedforward_layernorm",
        "post_feedforward_layernorm",
        {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"},
        reads="mlp",
        activation="mlp.act_fn",
    ),
)
_PHI = _llama_like(
    "final_layernorm",
    Row(
        "input_layernorm",
        "resid_dropout",  # one dropout module serves both branches of a layer
        _separate("self_attn.", "q_proj k_proj v_proj", "self_attn.dense"),
        calls=2,
        scaling="self_attn.scaling",
        attention="self_attn",
    ),
    Row(
        "input_layernorm",
        "resid_dropout",
        {"up": "mlp.fc1", "down": "mlp.fc2"},
        call=1,
        calls=2,
        activation="mlp.activation_fn",
    ),
)


def _falcon(first: str, second: str) -> Family:
    """Paths by the names of the two norms. The sum of both branches is dropped out where they are parallel."""
    attention = Row(
        first,
        "self_attention",
        {"output": "self_attention.dense"},
        fused="self_attention.query_key_value",
        dropout="hidden_dropout",
    )
    feed_forward = Row(
        second,
        "mlp",
        {"up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"},
        dropout="hidden_dropout",
        activation="mlp.act",
    )
    return Family(
        stacks=(StackRow("h", (attention, feed_forward), final_norm="ln_f"),),
        token="word_embeddings",
        fused_order="groups",
        classifiers=("score", "classifier"),
    )


def _fairseq_stack(name: str, *, final_norm: bool, cross: bool = False) -> StackRow:
    """A stack of OPT, BART, Whisper or Speech2Text, which all have fairseq's names."""

    def attention(norm: str, place: str) -> Row:
        weights = _separate(f"{place}.", "q_proj k_proj v_proj", f"{place}.out_proj")
        return Row(norm, place, weights, scaling=f"{place}.scaling", dropout="dropout", attention=place)

    rows = [attention("self_attn_layer_norm", "self_attn")]
    if cross:
        rows.append(attention("encoder_attn_layer_norm", "encoder_attn"))
    names = {"up": "fc1", "down": "fc2"}
    rows.append(Row("final_layer_norm", "fc2", names, dropout="dropout", activation="activation_fn"))
    return StackRow(f"{name}.layers", tuple(rows), f"{name}.layer_norm" if final_norm else None)


_OPT = Family(
    stacks=(replace(_fairseq_stack("decoder", final_norm=False), final_norm="decoder.final_layer_norm"),),
    token="decoder.embed_tokens",
    position="decoder.embed_positions",
    classifiers=("score",),
)
_BART = Family(
    stacks=(
        _fairseq_stack("encoder", final_norm=False),
        _fairseq_stack("decoder", final_norm=False, cross=True),
    ),
    token="shared",
    position="encoder.embed_positions",
    embedding_norm="encoder.layernorm_embedding",
    decoder_position="decoder.embed_positions",
    decoder_norm="decoder.layernorm_embedding",
    classifiers=("classification_head.out_proj",),
    inputs={"tokens": "input_ids", "keep": "attention_mask", "decoder_tokens": "decoder_input_ids"},
)
_SINUSOIDS = 0.5**0.5  # root mean square of sines and cosines
_WHISPER = Family(
    stacks=(_fairseq_stack("encoder", final_norm=True), _fairseq_stack("decoder", final_norm=True, cross=True)),
    token="decoder.embed_tokens",
    position="encoder.embed_positions",
    decoder_position="decoder.embed_positions",
    convolutions=("encoder.conv1", "encoder.conv2"),
    features_first=True,
    padding="",  # the model ignores its mask: silence is heard
    inputs={"frames": "input_features", "decoder_tokens": "decoder_input_ids"},
)
_SPEECH_TO_TEXT = replace(
    _WHISPER,
    position=_SINUSOIDS,
    decoder_position=_SINUSOIDS,
    convolutions=("encoder.conv.conv_layers",),
    features_first=False,
    padding="attention_mask",
)

FAMILIES: dict[str, tuple[Family, ...]] = {
    "bert": (_bert("cls.predictions.transform.dense", "cls.predictions.transform.transform_act_fn"),),
    "roberta": (_bert("lm_head.dense"),),
    "gpt2": (_GPT2,),
    "llama": (_llama(),),
    "mistral": (_llama(),),
    "qwen2": (_llama(),),
    "qwen3": (_llama(),),
    "gemma": (_llama(gain_offset=1.0),),
    "gemma3_text": (_GEMMA3,),
    "mpnet": (_mpnet(),),
    "vit": (_vit(*_VIT_5), _vit(*_VIT_4)),
    "deit": (_vit(*_VIT_5, "distillation_token"), _vit(*_VIT_4, "distillation_token")),
    "t5": tuple(_t5(gated=gated, decoder=decoder) for decoder in (True, False) for gated in (False, True)),
    "gpt_neox": (_GPT_NEOX,),
    "opt": (_OPT,),
    "olmo2": (_OLMO2,),
    "phi": (_PHI,),
    # with two norms, sequential, with one norm
    "falcon": tuple(
        _falcon("ln_attn" if second == "ln_mlp" else "input_layernorm", second)
        for second in ("ln_mlp", "post_attention_layernorm", "input_layernorm")
    ),
    "bart": (_BART,),
    "whisper": (_WHISPER,),
    "speech_to_text": (_SPEECH_TO_TEXT,),
}

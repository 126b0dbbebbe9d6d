"""Where the signal runs in Hugging Face models: one row of module paths per family, and the Mapping made from it.

Paths are relative to a layer (sublayers), to the base model (stacks, embeddings), or to the whole model
(heads). A family has several rows where its modules moved between versions of transformers, or differ with
its configuration; the first that fits the model is taken. Branches end behind the output dropout, as
`SublayerMap` wants.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from signalprop.architecture import Architecture
from signalprop.data import Batch
from signalprop.errors import InputError
from signalprop.hf_configs import READERS, read
from signalprop.inputs import IntArray
from signalprop.probes.mapping import EmbeddingMap, HeadMap, Mapping, SublayerMap, Weight


@dataclass(frozen=True)
class Row:
    """A sublayer: paths in its layer. `fused` is the module that holds query, key and value together.

    `call` of `calls`: see SublayerMap. `by_depth`: path of a flag that divides the scores by the layer's number.
    """

    norm: str
    branch: str
    weights: Dictionary[str, str]
    fused: str = ""
    call: int = 0
    calls: int = 1
    by_depth: str = ""


@dataclass(frozen=True)
class StackRow:
    """A stack: paths in the base model, and the rows of a layer in order."""

    layers: str
    rows: tuple[Row, ...]
    final_norm: str | None = None


@dataclass(frozen=True)
class Family:
    """A family. `fused_order`: query, key, value as three `blocks`, or interleaved by `heads`."""

    stacks: tuple[StackRow, ...]
    token: str
    position: str | None = None
    segment: str | None = None
    embedding_norm: str | None = None
    fused_order: str = "blocks"
    transform: str | None = None
    classifiers: tuple[str, ...] = ("classifier",)
    gain_offset: float = 0.0
    inputs: Dictionary[str, str] = field(default_factory=lambda: {"tokens": "input_ids", "keep": "attention_mask"})


def _separate(prefix: str, names: str, output: str) -> dict[str, str]:
    roles = zip(("query", "key", "value"), names.split(), strict=True)
    return {role: f"{prefix}{name}" for role, name in roles} | {"output": output}


def _bert(transform: str) -> Family:
    attention = Row(
        norm="attention.output.LayerNorm",
        branch="attention.output.dropout",
        weights=_separate("attention.self.", "query key value", "attention.output.dense"),
    )
    feed_forward = Row(
        norm="output.LayerNorm", branch="output.dropout", weights={"up": "intermediate.dense", "down": "output.dense"}
    )
    return Family(
        stacks=(StackRow("encoder.layer", (attention, feed_forward)),),
        token="embeddings.word_embeddings",
        position="embeddings.position_embeddings",
        segment="embeddings.token_type_embeddings",
        embedding_norm="embeddings.LayerNorm",
        transform=transform,
        classifiers=("classifier", "classifier.out_proj"),
        inputs={"tokens": "input_ids", "keep": "attention_mask", "segments": "token_type_ids"},
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
                ),
                Row("ln_2", "mlp.dropout", {"up": "mlp.c_fc", "down": "mlp.c_proj"}),
            ),
            final_norm="ln_f",
        ),
    ),
    token="wte",
    position="wpe",
    classifiers=("score", "classifier"),
)


def _llama(**changes: Any) -> Family:
    attention = Row("input_layernorm", "self_attn", _separate("self_attn.", "q_proj k_proj v_proj", "self_attn.o_proj"))
    gated = {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
    stack = StackRow("layers", (attention, Row("post_attention_layernorm", "mlp", gated)), final_norm="norm")
    return Family(stacks=(stack,), token="embed_tokens", classifiers=("score", "classifier"), **changes)


def _vit(layers: str, attention: Row, feed_forward: Row) -> Family:
    return Family(
        stacks=(StackRow(layers, (attention, feed_forward), final_norm="layernorm"),),
        token="embeddings.patch_embeddings.projection",
        position="embeddings.position_embeddings",
        inputs={"patches": "pixel_values"},
    )


_VIT = _vit(
    "layers",
    # one dropout module serves both branches of a layer
    Row("layernorm_before", "dropout", _separate("attention.", "q_proj k_proj v_proj", "attention.o_proj"), calls=2),
    Row("layernorm_after", "dropout", {"up": "mlp.fc1", "down": "mlp.fc2"}, call=1, calls=2),
)
_VIT_4 = _vit(  # transformers 4
    "encoder.layer",
    Row(
        "layernorm_before",
        "attention.output.dropout",
        _separate("attention.attention.", "query key value", "attention.output.dense"),
    ),
    Row("layernorm_after", "output.dropout", {"up": "intermediate.dense", "down": "output.dense"}),
)


def _t5(*, gated: bool, decoder: bool) -> Family:
    def attention(place: str, name: str) -> Row:
        weights = _separate(f"{place}.{name}.", "q k v", f"{place}.{name}.o")
        return Row(f"{place}.layer_norm", f"{place}.dropout", weights)

    def feed_forward(place: str) -> Row:
        inner = {"gate": "wi_0", "up": "wi_1", "down": "wo"} if gated else {"up": "wi", "down": "wo"}
        weights = {role: f"{place}.DenseReluDense.{name}" for role, name in inner.items()}
        return Row(f"{place}.layer_norm", f"{place}.dropout", weights)

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
                ),
                Row(
                    "post_attention_layernorm",
                    "post_mlp_dropout",
                    {"up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"},
                ),
            ),
            final_norm="final_layer_norm",
        ),
    ),
    token="embed_in",
    fused_order="heads",
    classifiers=("score", "classifier"),
)

FAMILIES: dict[str, tuple[Family, ...]] = {
    "bert": (_bert("cls.predictions.transform.dense"),),
    "roberta": (_bert("lm_head.dense"),),
    "gpt2": (_GPT2,),
    "llama": (_llama(),),
    "mistral": (_llama(),),
    "qwen2": (_llama(),),
    "qwen3": (_llama(),),
    "gemma": (_llama(gain_offset=1.0),),
    "vit": (_VIT, _VIT_4),
    "t5": tuple(_t5(gated=gated, decoder=decoder) for decoder in (True, False) for gated in (False, True)),
    "gpt_neox": (_GPT_NEOX,),
}


def mapping_for(model: nn.Module, mapping: Mapping | None) -> Mapping:
    """The mapping that is given, or the model's own, or its family's."""
    if mapping is not None:
        return mapping
    own = getattr(model, "signalprop_mapping", None)
    found: Mapping = own() if own is not None else mapping_of(model)
    return found


def mapping_of(model: nn.Module) -> Mapping:
    """The Mapping of a Hugging Face model of a known family, with or without a head.

    Raises:
        InputError: no such family (the message lists them and says how to map an own model), or modules are
            not where the family has them.
    """
    config = getattr(model, "config", None)
    family = getattr(config, "model_type", None)
    if family not in FAMILIES:
        what = f"the model family {family!r}" if family else f"{type(model).__name__}"
        raise InputError(
            f"{what} is not known; known families: {', '.join(sorted(READERS))}. For a model of your own give "
            "mapping=, or a method signalprop_mapping() (docs/measuring.md)"
        )
    base = getattr(model, str(getattr(model, "base_model_prefix", "")), model)
    prefix = next((f"{name}." for name, module in model.named_modules() if module is base and name), "")
    row = next((row for row in FAMILIES[family] if _fits(base, row)), None)
    if row is None:
        raise InputError(
            f"{type(model).__name__}: the modules are not where family {family!r} has them "
            f"(expected {FAMILIES[family][0].stacks[0].layers}); give mapping="
        )
    architecture = read(model)
    token = _get(base, row.token)
    head = _head(model, row, architecture)
    if architecture.head == "lm" and isinstance(head.weight, nn.Module):
        tied = getattr(head.weight, "weight", None) is getattr(token, "weight", 0)
        architecture = architecture.replace(tied_embeddings=tied)
    sublayers = [
        _sublayer(architecture, row, item, layer, f"{prefix}{stack.layers}.{i}", i)
        for stack in row.stacks
        for i, layer in enumerate(_get(base, stack.layers))
        for item in stack.rows
    ]
    finals = [None if stack.final_norm is None else prefix + stack.final_norm for stack in row.stacks]

    def optional(path: str | None) -> str | None:
        return None if path is None or _get(base, path) is None else prefix + path

    return Mapping(
        architecture=architecture,
        sublayers=sublayers,
        final_norm=finals[-1],
        encoder_final_norm=finals[0] if len(finals) > 1 else None,
        embedding=EmbeddingMap(
            token=optional(row.token),
            position=optional(row.position),
            segment=optional(row.segment) if architecture.n_segments else None,
            norm=optional(row.embedding_norm),
            scale=architecture.embedding_scale,
        ),
        head=head,
        gain_offset=row.gain_offset,
        arguments=_arguments(row, architecture, model, getattr(token, "padding_idx", None)),
    )


def _sublayer(a: Architecture, family: Family, row: Row, layer: nn.Module, place: str, index: int) -> SublayerMap:
    weights: dict[str, Weight] = {role: f"{place}.{path}" for role, path in row.weights.items()}
    if row.fused:
        weights |= {role: (f"{place}.{row.fused}", rows) for role, rows in fused_rows(a, family.fused_order).items()}
    qk_norm = a.qk_norm and "query" in weights
    return SublayerMap(
        branch=f"{place}.{row.branch}",
        norm=f"{place}.{row.norm}",
        # post-norm: the first layer is the first to read the stream; later ones follow a norm
        reads=place if index == 0 and a.placements[0] == "post" and "query" in weights else None,
        writes=None,
        weights=weights,
        score_scale=a.score_scale / (index + 1) if row.by_depth and _get(layer, row.by_depth) else None,
        query_norm=f"{place}.self_attn.q_norm" if qk_norm else None,
        key_norm=f"{place}.self_attn.k_norm" if qk_norm else None,
        call=row.call,
        calls=row.calls,
    )


def fused_rows(a: Architecture, order: str) -> dict[str, slice | list[int]]:
    """Output features that are query, key and value in a fused map: three `blocks`, or by turns in each head."""
    q, kv = a.n_heads * a.d_head, a.n_kv_heads * a.d_head
    if order == "blocks":
        return {"query": slice(0, q), "key": slice(q, q + kv), "value": slice(q + kv, q + 2 * kv)}
    rows = np.arange(3 * q).reshape(a.n_heads, 3, a.d_head)
    return {role: rows[:, i].ravel().tolist() for i, role in enumerate(("query", "key", "value"))}


def _head(model: nn.Module, row: Family, a: Architecture) -> HeadMap:
    if a.head == "none":
        return HeadMap()
    if a.head == "classes":
        found = [path for path in row.classifiers if hasattr(_get(model, path), "weight")]
        return HeadMap(weight=found[0] if found else None)
    scale = 1.0
    config: Any = model.config
    if a.family == "t5" and getattr(config, "scale_decoder_outputs", config.tie_word_embeddings):
        scale = a.d_model**-0.5
    head: nn.Module | None = model.get_output_embeddings()  # type: ignore[operator]
    return HeadMap(weight=head, scale=scale, transform=row.transform if a.head_transform else None)


def _fits(base: nn.Module, family: Family) -> bool:
    for stack in family.stacks:
        layers = _get(base, stack.layers)
        if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
            return False
        for row in stack.rows:
            paths = (row.norm, row.branch, row.fused, *row.weights.values())
            if any(path and _get(layers[0], path) is None for path in paths):
                return False
    return True


def _get(place: Any, path: str) -> Any:
    for step in path.split("."):
        place = getattr(place, step, None)
        if place is None:
            return None
    return place


# --- from a Batch to the arguments of a model ------------------------------------------------------------


def _arguments(
    family: Family, a: Architecture, model: nn.Module, padding_id: int | None
) -> Callable[[Batch], dict[str, Any]]:
    dtype = next(model.parameters()).dtype

    def arguments(batch: Batch) -> dict[str, Any]:
        values = {
            "tokens": _free_of(padding_id, batch.tokens, a.vocab_size) if batch.keep is None else batch.tokens,
            "keep": batch.keep,
            "decoder_tokens": batch.decoder_tokens,
            "segments": batch.segments,
        }
        out: dict[str, Any] = {}
        for name, argument in family.inputs.items():
            value = values.get(name)
            if name == "patches":
                assert batch.patches is not None
                out[argument] = images(batch.patches, a).to(dtype)
            elif value is not None:
                out[argument] = torch.as_tensor(np.ascontiguousarray(value, dtype=np.int64))
        return out

    return arguments


def _free_of(padding_id: int | None, ids: IntArray | None, vocab_size: int) -> IntArray | None:
    """The ids with the model's padding id renamed to the highest id that is not among them.

    A batch without `keep` has no padding. The row of the padding id is zero (and RoBERTa gives it no position), so
    where a numbering of words uses that id for a word, the model would read a hole.
    """
    if ids is None or padding_id is None or not (ids == padding_id).any():
        return ids
    unused = np.setdiff1d(np.arange(max(0, vocab_size - ids.size - 1), vocab_size), ids)
    return np.where(ids == padding_id, unused[-1], ids) if unused.size else ids


def images(patches: Any, a: Architecture) -> Tensor:
    """Patches (batch, n, channels * side * side) as images (batch, channels, height, width) of a square grid.

    Raises:
        InputError: the patches do not form a square.
    """
    n, width = patches.shape[1], patches.shape[2]
    grid = round(n**0.5)
    channels = 3 if width % 3 == 0 and round((width // 3) ** 0.5) ** 2 * 3 == width else 1
    side = round((width // channels) ** 0.5)
    if grid * grid != n or channels * side * side != width or n + a.class_token != a.seq_len:
        raise InputError(f"{n} patches of {width} numbers are no square image for a model of {a.seq_len} tokens")
    blocks = torch.as_tensor(patches, dtype=torch.float32).reshape(-1, grid, grid, channels, side, side)
    return blocks.permute(0, 3, 1, 4, 2, 5).reshape(-1, channels, grid * side, grid * side)

"""The Mapping of a Hugging Face model, from its family's file in `signalprop.families`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from torch import nn

from signalprop.attachment.arguments import batch_arguments
from signalprop.attachment.found import mapping_found
from signalprop.attachment.mapping import EmbeddingMap, HeadMap, Mapping, SublayerMap, Weight
from signalprop.errors import InputError
from signalprop.families import find, unknown
from signalprop.families.base import Family, ModelPaths, StackPaths
from signalprop.families.reading import read
from signalprop.network.architecture import Architecture
from signalprop.network.kinds import kind_named
from signalprop.network.layout import fan
from signalprop.streams.arguments import text_config
from signalprop.streams.replay import fused_rows
from signalprop.streams.streams import Streams
from signalprop.streams.wrappers import adds_tokens


def mapping_for(model: nn.Module, mapping: Mapping | None, look: Callable[[], Streams]) -> Mapping:
    """The mapping given, or that of the model or its family; or, of a model or a variant of one that no family's file
    knows, what a look at its streams finds. The model is without wrappers."""
    own = getattr(model, "signalprop_mapping", None)
    given = own() if mapping is None and own is not None else mapping
    if given is not None:
        return checked(model, given)
    family = find(getattr(getattr(model, "config", None), "model_type", None))
    if family is None:
        return mapping_of_streams(model) or mapping_found(model, look())
    try:
        known = mapping_of(model)
        if _is_called_so(model, family) and not adds_tokens(model):
            return known
        words = f"is called otherwise than {known.architecture.family}: the start of its stream has to be proved"
        note = f"{type(model).__name__} {words}"
        return replace(known, stream_only=True, arguments=None, notes=(*known.notes, note))
    except InputError as refusal:  # a variant that its family's file does not know
        try:
            return mapping_found(model, look())
        except InputError:
            raise refusal from None


def checked(model: nn.Module, mapping: Any) -> Mapping:
    """The mapping that the user gave."""
    if not isinstance(mapping, Mapping):
        raise InputError(f"the mapping of a {type(model).__name__} is a {type(mapping).__name__}; expected a Mapping")
    return mapping


def _is_called_so(model: nn.Module, family: Family) -> bool:
    """Whether a model's forward takes what its family reads; Chronos-Bolt has T5's configuration and reads numbers."""
    taken = inspect.signature(model.forward).parameters
    names = {name for paths in family.paths for name in paths.inputs.values()}
    anything = any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in taken.values())
    return not names or anything or bool(names & taken.keys() - {"attention_mask"})


def mapping_of(model: nn.Module) -> Mapping:
    """The Mapping of a Hugging Face model of a known family, with or without a head."""
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    family = find(model_type)
    if family is None:
        what = unknown(model_type) if model_type else f"no family knows {type(model).__name__}"
        raise InputError(f"give a mapping, or the model a method signalprop_mapping() (docs/measuring.md): {what}")
    architecture = read(model)
    if not family.paths:
        of_streams = mapping_of_streams(model, architecture)
        if of_streams is None:
            raise InputError(f"{type(model).__name__}: no layers with several residual streams; give a mapping")
        return of_streams
    base: nn.Module = getattr(model, str(getattr(model, "base_model_prefix", "")), model)  # without its head
    paths = next((one for one in family.paths if not _missing(base, one, architecture)), None)
    if paths is None:
        raise InputError(
            f"{type(model).__name__}: the modules are not where family {model_type!r} has them "
            f"(expected {family.paths[0].stacks[0].layers}); give a mapping"
        )
    return _mapping_at(model, family, architecture, base, paths)


def _mapping_at(
    model: nn.Module, family: Family, architecture: Architecture, base: nn.Module, paths: ModelPaths
) -> Mapping:
    """The mapping of a model whose modules are at these paths in `base`."""
    prefix = next((f"{name}." for name, module in model.named_modules() if module is base and name), "")
    token = _get(base, paths.token)
    ending = _head(model, family, paths, architecture)
    if architecture.head == "lm" and isinstance(ending.weight, nn.Module):
        tied = getattr(ending.weight, "weight", None) is getattr(token, "weight", 0)
        if architecture.tied_embeddings != tied:
            architecture = architecture.replace(tied_embeddings=tied)
    sublayers = [
        _sublayer(architecture, paths, stack, layer, f"{prefix}{stack.layers}.{i}", i, k, kinds)
        for stack, branches in _stacks(paths, architecture)
        for i, (layer, kinds) in enumerate(zip(_get(base, stack.layers), branches, strict=False))
        for k, kind in enumerate(kinds)
    ]

    def optional(path: str | None) -> str | None:
        return None if path is None or _get(base, path) is None else prefix + path

    def position(given: str | float | None) -> str | float | None:
        return given / architecture.embedding_scale if isinstance(given, float) else optional(given)

    finals = [optional(stack.final_norm) for stack in paths.stacks]
    lists = [(path, _get(base, path)) for path in paths.convolutions]

    return Mapping(
        architecture=architecture,
        sublayers=sublayers,
        final_norm=finals[-1],
        encoder_final_norm=finals[0] if len(finals) > 1 else None,
        embedding=EmbeddingMap(
            token=optional(paths.token),
            position=position(paths.position),
            segment=optional(paths.segment) if architecture.n_segments else None,
            norm=optional(paths.embedding_norm),
            scale=architecture.embedding_scale,
            decoder_position=position(paths.decoder_position),
            decoder_norm=optional(paths.decoder_norm),
            class_tokens=[prefix + path for path in paths.class_tokens],
            convolutions=[
                f"{prefix}{path}.{i}" if isinstance(found, nn.ModuleList) else prefix + path
                for path, found in lists
                for i in range(len(found) if isinstance(found, nn.ModuleList) else 1)
            ],
        ),
        head=ending,
        gain_offset=paths.gain_offset,
        arguments=batch_arguments(model, architecture, paths.inputs, token, features_first=paths.features_first),
        padding=paths.padding,
        padding_stride=architecture.n_frames // architecture.seq_len if architecture.input == "frames" else 1,
        layers=[f"{prefix}{stack.layers}.{i}" for stack in paths.stacks for i in range(len(_get(base, stack.layers)))],
    )


def _stacks(paths: ModelPaths, a: Architecture) -> Iterator[tuple[StackPaths, tuple[tuple[str, ...], ...]]]:
    """Every stack, with the kinds of the sublayers of its layers."""
    branches = a.layer_branches
    for stack in paths.stacks:
        n = a.n_layers if len(branches) == a.n_layers_total else len(branches)
        yield stack, branches[:n]
        branches = branches[n:]


def _sublayer(
    a: Architecture, paths: ModelPaths, stack: StackPaths, layer: nn.Module, place: str, index: int, k: int,
    kinds: tuple[str, ...],
) -> SublayerMap:  # fmt: skip
    """Sublayer `k` of a layer of these kinds at `place`, which is number `index` in its stack."""
    kind, row, last = kinds[k], stack.of(k, kinds[k]), k + 1 == len(kinds)
    # post-norm: the first layer is the first to read the stream; later ones follow a norm
    bare = isinstance(_get(layer, row.norm), nn.Identity)
    reads = "" if bare or (index == 0 and k == 0 and a.placements[0] == "post") else row.reads
    weights: dict[str, Weight] = {role: f"{place}.{path}" for role, path in row.weights.items()}
    if row.fused:
        together = paths.fused_order == "blocks"
        for role, rows in fused_rows(a.n_heads, a.n_kv_heads, a.d_head, paths.fused_order).items():
            weights[role] = f"{place}.{row.fused}", slice(rows[0], rows[-1] + 1) if together else rows
    for path, roles in row.blocks.items():
        turns = row.turns[path](a) if path in row.turns else 1
        weights |= {role: (f"{place}.{path}", rows) for role, rows in _rows_of(a, roles, turns).items()}
    scalar = _number(layer, stack.scalar) if last and stack.scalar else 1.0
    qk_norm = a.qk_norm and kind_named(kind).attends
    return SublayerMap(
        branch=f"{place}.{row.branch}",
        norm=None if bare else f"{place}.{row.norm}",
        post_norm=f"{place}.{row.post_norm}" if row.post_norm else None,
        reads=None if reads is None else f"{place}.{reads}" if reads else place,
        writes=place if last and not a.has_final_norm and a.placements[0] != "post" else None,
        weights=weights,
        skip=scalar,
        multiplier=a.branch_scale_of(kind) * scalar,
        score_scale=a.score_scale / (index + 1) if row.by_depth and _get(layer, row.by_depth) else None,
        query_norm=f"{place}.{row.query_norm}" if qk_norm else None,
        key_norm=f"{place}.{row.key_norm}" if qk_norm else None,
        call=row.call,
        calls=row.calls,
        dropout=f"{place}.{row.dropout}" if row.dropout else None,
        scaling=f"{place}.{row.scaling}" if row.scaling and _get(layer, row.scaling) is not None else None,
        activation=f"{place}.{row.activation}" if row.activation else None,
    )


def _number(layer: nn.Module, path: str) -> float:
    """The one number of a tensor; 1 where it is not there, or on the meta device."""
    found = _get(layer, path)
    return 1.0 if found is None or found.is_meta else float(found)


def _rows_of(a: Architecture, roles: Sequence[str], turns: int) -> dict[str, slice | list[int]]:
    """Output features that are each of several weights in one module, as `SublayerPaths` says of `blocks`."""
    sizes = [fan(a, role)[1] // turns for role in roles]
    if turns > 1 and set(sizes) == {1}:
        return {role: slice(j, None, len(roles)) for j, role in enumerate(roles)}
    ends = np.cumsum([0, *sizes]).tolist()
    if turns == 1:
        return {role: slice(*two) for role, two in zip(roles, pairwise(ends), strict=True)}
    rows = np.arange(turns * ends[-1]).reshape(turns, -1)
    return {role: rows[:, slice(*two)].ravel().tolist() for role, two in zip(roles, pairwise(ends), strict=True)}


def _head(model: nn.Module, family: Family, paths: ModelPaths, a: Architecture) -> HeadMap:
    if a.head == "none":
        return HeadMap()
    if a.head == "classes":
        found = [path for path in paths.classifiers if hasattr(_get(model, path), "weight")]
        return HeadMap(weight=found[0] if found else None)
    scale = a.head_scale
    config: Any = getattr(model, "config", None)
    tied = getattr(config, "tie_word_embeddings", False)
    if family.tied_head_scale and getattr(config, "scale_decoder_outputs", tied):
        scale = family.tied_head_scale(a)
    tells = hasattr(model, "get_output_embeddings")
    head: nn.Module | None = model.get_output_embeddings() if tells else _get(model, "lm_head")  # type: ignore[operator]
    if not a.head_transform:
        return HeadMap(weight=head, scale=scale)
    return HeadMap(weight=head, scale=scale, transform=paths.transform, activation=paths.transform_activation)


def _missing(base: nn.Module, paths: ModelPaths, a: Architecture) -> str:
    """The first path that the model does not have; '' where it has all. Of equal layers, one is checked."""
    for stack, branches in _stacks(paths, a):
        layers = _get(base, stack.layers)
        if not isinstance(layers, nn.ModuleList) or len(layers) == 0:
            return stack.layers
        for kinds, layer in dict(reversed([*zip(branches, layers, strict=False)])).items():
            for row in (stack.of(k, kind) for k, kind in enumerate(kinds)):
                wanted = (row.norm, row.post_norm, row.branch, row.fused, *row.blocks, *row.weights.values())
                for path in wanted:
                    if path and _get(layer, path) is None:
                        return path
    return ""


def _get(place: Any, path: str) -> Any:
    for step in path.split("."):
        place = getattr(place, step, None)
        if place is None:
            return None
    return place


# --- several residual streams: for measuring alone ---------------------------------------------------------------

# Layers of transformers' models with several streams keep one module per branch that collapses them, `attn_hc` before
# `self_attn` and `ffn_hc` before `mlp` (DeepSeek-V4, GLM-5.3, Hy4), and reads streams, (batch, tokens, n, features).
_BRANCHES = (("attn_hc", "self_attn"), ("ffn_hc", "mlp"))


def mapping_of_streams(model: nn.Module, architecture: Architecture | None = None) -> Mapping | None:
    """The mapping of a model all of whose layers have those modules; None of any other.

    Args:
        architecture: the model's, where its family is known; default: what its configuration says of its streams.
    """
    names = {name for pair in _BRANCHES for name in pair}
    lists = ((path, module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList))
    for path, layers in lists:
        held = [set() if layer is None else dict(layer.named_children()).keys() for layer in layers]
        if held and all(names <= children for children in held):
            return _mapping_of_layers(model, path, layers, architecture or _architecture(model, len(layers)))
    return None


def _architecture(model: Any, n_layers: int) -> Architecture:
    text = text_config(model)
    fields: dict[str, Any] = {
        "kind": "decoder",
        "n_layers": n_layers,
        "d_model": text.hidden_size,
        "n_heads": 1,
        "norm": "rmsnorm",
        "streams": {"n": text.hc_mult, "mixing": "mhc" if hasattr(text, "hc_sinkhorn_iters") else "independent"},
        "positions": "none",
        "vocab_size": text.vocab_size,
        "tied_embeddings": False,
        "head": "none" if model.get_output_embeddings() is None else "lm",
        "family": model.config.model_type,
    }
    return Architecture(**fields)


def _mapping_of_layers(model: Any, path: str, layers: nn.ModuleList, architecture: Architecture) -> Mapping:
    last = f"{path}.{len(layers) - 1}"
    inputs = {"tokens": "input_ids", "keep": "attention_mask"}
    return Mapping(
        architecture=architecture,
        sublayers=[
            SublayerMap(
                branch=f"{path}.{i}.{branch}",
                norm=f"{path}.{i}.{norm}",
                reads=f"{path}.{i}.{gates}",
                writes=last if i == len(layers) - 1 and gates == "ffn_hc" else None,
            )
            for i in range(len(layers))
            for (gates, branch), norm in zip(_BRANCHES, ("input_layernorm", "post_attention_layernorm"), strict=True)
        ],
        arguments=batch_arguments(model, architecture, inputs, model.get_input_embeddings()),
        notes=("several residual streams: moments are means over them",),
        stream_only=True,
    )

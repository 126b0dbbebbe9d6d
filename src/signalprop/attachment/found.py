"""The Mapping of a model that no family knows: its stream and its branches, as `signalprop.streams` finds them."""

from __future__ import annotations

import inspect
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import nn

from signalprop.attachment.arguments import BatchArguments, batch_arguments
from signalprop.attachment.mapping import Mapping, Number, SublayerMap, number
from signalprop.errors import InputError
from signalprop.network.activations import UNKNOWN_ACTIVATION
from signalprop.network.architecture import Architecture
from signalprop.network.layer_inputs import INPUT
from signalprop.streams.arguments import text_config
from signalprop.streams.parts import Layer, Place, Placement, Stack
from signalprop.streams.roles import HEADS
from signalprop.streams.streams import Streams

UNKNOWN = 2  # words, where no configuration says how many
_IDENTITY = "let it pass through an nn.Identity() of the layer, where hooks see it"
_INNER = ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim")
_LENGTH = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "block_size", "max_target_positions")


def mapping_found(model: nn.Module, found: Streams) -> Mapping:
    """The mapping of a model's largest stack, or of encoder and decoder; its weights are not known."""
    stacks = taken(model, found)
    layers = [layer for stack in stacks for layer in stack.layers]
    for layer in layers:
        _check(layer, stacks, found)
    _check_last_dimension(model, found, stacks)
    a = _architecture(model, found, stacks)
    items = [item for stack in stacks for item in _items_of(model, stack, a)]
    offsets = {norm.offset for norm in found.norms if norm.offset is not None}
    once = len({layer.path for layer in layers}) == len(layers) and all(stack.called for stack in stacks)
    return Mapping(
        architecture=a,
        sublayers=items,
        final_norm=stacks[-1].final_norm,
        encoder_final_norm=stacks[0].final_norm if len(stacks) > 1 else None,
        gains_differ=len(offsets) > 1,
        gain_offset=offsets.pop() if len(offsets) == 1 else 0.0,
        arguments=_arguments(model, found, a),
        layers=[layer.path for layer in layers] if once else (),
        notes=tuple(_notes(found, stacks)),
        found=found,
        tokens_first=_tokens_first(found, stacks),
        reads_tokens_first=stacks[0].reads_tokens_first,
        stream_only=True,
        rewired=changed_between(stacks),
    )


def _tokens_first(found: Streams, stacks: list[Stack]) -> bool:
    """Whether streams are (tokens, batch, features); raises InputError where that differs from stack to stack."""
    ways = {stack.tokens_first for stack in stacks}
    if len(ways) > 1:
        raise InputError(
            f"give a mapping for one of {' and '.join(stack.path for stack in stacks)}: of {found.model} one stream is "
            "(tokens, batch, features), the other (batch, tokens, features)"
        )
    return ways.pop()


def taken(model: nn.Module, found: Streams) -> list[Stack]:
    """Encoder and decoder, or the largest stack alone."""
    both = list(found.stacks[:2])
    for encoder, decoder in (both, both[::-1]) if len(both) == 2 else ():
        if decoder.memory == encoder.path:
            return [encoder, decoder]
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and len(both) == 2:
        return sorted(both, key=lambda stack: "decoder" in stack.path)
    return both[:1]


def _check(layer: Layer, stacks: list[Stack], found: Streams) -> None:
    """Raise InputError for a layer that cannot be measured."""
    why = layer.why
    for branch in layer.branches:
        if branch.output is None:
            why = why or f"no module outputs the branch that is added after {branch.reads or 'its stream'}; {_IDENTITY}"
    first, last = (layer.branches[0], layer.branches[-1]) if layer.branches else (None, None)
    if first is not None and last is not None and (first.stream_in is None or last.stream_out is None):
        why = why or f"no module reads or outputs its stream; {_IDENTITY}"
    if why.endswith(_IDENTITY):
        raise InputError(f"of {found.model} {layer.path} was not understood: {why}")
    if why or not layer.branches:
        raise InputError(
            f"give a mapping, which names the branches (docs/measuring.md; `signalprop anatomy` shows them): "
            f"of {found.model} {layer.path} was not understood: {why}"
        )


def _check_last_dimension(model: nn.Module, found: Streams, stacks: list[Stack]) -> None:
    """Raise InputError for a stream whose last dimension is not its features: a map writes other ones to it."""
    for stack in stacks:
        written: dict[int, str] = {}
        maps = [(one, path, model.get_submodule(path)) for one in stack.branches for path in one.modules if path]
        features_last = any(one.proved and getattr(m, "out_features", None) == stack.width for one, _, m in maps)
        for branch, path, module in maps:
            channels = getattr(module, "out_channels", None)
            # of a linear map entries may be put in another order: a Mixer turns tokens to the end and back
            if not branch.proved and not features_last:
                channels = getattr(module, "out_features", channels)
            if channels is not None:
                written.setdefault(channels, path)
        if written and stack.width not in written:  # patches that are merged make streams of several widths
            channels, path = next(iter(written.items()))
            raise InputError(
                "only streams whose last dimension is the features can be measured: of "
                f"{found.model} {path} writes {channels} features, and the stream of {stack.path} ends in "
                f"{stack.width}: its tokens come last"
            )


def _items_of(model: nn.Module, stack: Stack, a: Architecture) -> list[SublayerMap]:
    """One per branch of all layers. A factor on the stream between two layers is part of the sum before it.

    Not where more than factors stands between layers: there streams are those that leave layers.
    """
    items: list[SublayerMap] = []
    factors = not changed_between([stack])
    for layer in stack.layers:
        own = _items(model, layer, a)
        if layer.scale != 1.0 and factors and items and own:
            last = items[-1]
            skip, multiplier = (layer.scale * number(value) for value in (last.skip, last.multiplier))
            items[-1] = replace(last, skip=skip, multiplier=multiplier, leaves=own[0].enters)
        items += own
    return items


def changed_between(stacks: list[Stack]) -> str:
    """The first place where the stream that enters a layer is not a multiple of the one that left the last; or ''.

    Before all a final norm that reads more than what left the last layer.

    Nor is it known what a factor does to a sum under a norm, or to one of several branches at once.
    """
    if ends := [f"{stack.final_norm}: {stack.after}" for stack in stacks if stack.after]:
        return ends[0]
    for layers in (stack.layers for stack in stacks):
        for before, after in pairwise(layers):
            last = before.branches[-1] if before.branches else None
            carried = last is not None and last.placement != "post" and not last.parallel
            if after.rewired or (after.between and not carried):
                return f"{after.path}: {after.between}"
    return ""


def layer_inputs(stacks: list[Stack]) -> tuple[dict[int, float], ...] | None:
    """What enters every layer of the only stack, where those are sums of streams that were there; None: they are not.

    As `Architecture.layer_inputs` has it, with a 1 in layer 0. A norm on the sums before would stand between.
    """
    layers = stacks[0].layers
    known = all(layer.sources or not layer.between for layer in layers)
    post = any(branch.placement == "post" for branch in stacks[0].branches)
    if len(stacks) > 1 or stacks[0].after or post or not known:
        return None
    rows = []
    for k, layer in enumerate(layers):
        others = layer.sources.keys() - set(layer.reads)
        if others - {0}:
            return None
        row = layer.sources or {k: 1.0}
        rows.append({INPUT if source in others else source: factor for source, factor in row.items()})
    if any(INPUT in row for row in rows):
        if any(0 in row for row in rows[1:]):
            return None
        rows[0] = {INPUT: 1.0}
    return tuple(rows)


def _items(model: nn.Module, layer: Layer, a: Architecture) -> list[SublayerMap]:
    """One per branch. A stream that no module sees between two of them is taken from before and after both."""
    branches = layer.branches
    enters: list[Place | None] = []
    for branch in branches:
        enters.append(branch.stream_in if branch.stream_in is not None else enters[-1])
    leaves: list[Place | None] = [None] * len(branches)
    for i in reversed(range(len(branches))):
        leaves[i] = branches[i].stream_out if branches[i].stream_out is not None else leaves[i + 1]
    items = []
    placed = _placement(layer)
    for i, branch in enumerate(branches):
        assert branch.output is not None
        virtual = a.parallel and i + 1 < len(branches) and branches[i + 1].parallel
        items.append(
            SublayerMap(
                branch=branch.output.path,
                call=branch.output.call,
                calls=branch.output.calls,
                norm=branch.post_norm if placed == "res-post" else branch.norm,
                normed=branch.normed,
                post_norm=branch.post_norm if placed == "sandwich" else None,
                carrier=branch.modules[0],
                skip=_number(model, branch.skip),
                multiplier=_number(model, branch.multiplier),
                enters=enters[i],
                leaves=None if virtual else leaves[i],
            )
        )
    return items


def _placement(layer: Layer) -> Placement:
    """A layer has one, that of its first norm on the stream or on a branch: what stands elsewhere is left out."""
    first = layer.branches[0].placement
    return "post" if first == "none" and any(b.placement == "post" for b in layer.branches) else first


def _number(model: nn.Module, factor: Any) -> Number:
    if factor.parameter:
        return model.get_parameter(factor.parameter)
    return 1.0 if factor.value is None else float(factor.value)


def _architecture(model: nn.Module, found: Streams, stacks: list[Stack]) -> Architecture:
    """The architecture as the stream shows it; the rest from the configuration, or usual values."""
    config, text = getattr(model, "config", None), text_config(model)

    def known(names: tuple[str, ...]) -> int | None:
        values = (getattr(place, name, None) for place in (text, model) for name in names)
        return next((int(value) for value in values if isinstance(value, int) and value > 0), None)

    two = len(stacks) > 1
    single = "CausalLM" in found.model or "LMHead" in found.model or found.model.endswith("ForConditionalGeneration")
    images = "pixel_values" in found.inputs and "input_ids" not in found.inputs
    causal = two or (single if stacks[-1].causal is None or images else stacks[-1].causal)
    layers = [layer for stack in stacks for layer in stack.layers]
    width, heads = stacks[-1].width, known(HEADS) or 1
    pairs = [len(layer.branches) == 2 and layer.branches[1].parallel for layer in layers]
    placements = tuple(_placement(layer) for layer in layers)
    norms = [norm.kind for norm in found.norms if norm.kind != "unknown"]
    fields: dict[str, Any] = {
        "kind": "encoder-decoder" if two else "decoder" if causal else "encoder",
        "n_layers": len(stacks[0].layers),
        "n_decoder_layers": len(stacks[1].layers) if two else None,
        "d_model": width,
        "n_heads": heads if width % heads == 0 else 1,
        "d_ff": known(_INNER) or 4 * width,
        "norm": "rmsnorm" if norms.count("rmsnorm") > len(norms) / 2 else "layernorm",
        "activation": UNKNOWN_ACTIVATION,
        "norm_placement": placements[0] if len(set(placements)) == 1 else placements,
        "parallel": not two and all(pairs) and set(placements) <= {"pre", "none"},
        "branches": tuple(_sorts(layer, two and i >= len(stacks[0].layers)) for i, layer in enumerate(layers)),
        "final_norm": bool(stacks[-1].final_norm or stacks[-1].final_reads),
        "positions": "none",
        "vocab_size": max(UNKNOWN, known(("vocab_size",)) or UNKNOWN),
        "seq_len": known(_LENGTH) or 512,
        "input": "tokens",
        "head": "lm" if two or single or found.model.endswith("MaskedLM") else "none",
        "tied_embeddings": False,
        "family": getattr(config, "model_type", None),
    }
    return Architecture(**fields | (_patches(model, config) if images else {}))


def _patches(model: nn.Module, config: Any) -> dict[str, Any]:
    """What a model that reads images says of its patches: one square image, where its configuration says which."""
    side, patch = (getattr(config, name, None) for name in ("image_size", "patch_size"))
    if not (isinstance(side, int) and isinstance(patch, int) and patch and side >= patch):
        return {"input": "patches"}
    names = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    token = bool(names & {"class_embedding", "cls_token"})
    channels = getattr(config, "num_channels", 3)
    sizes = {"seq_len": (side // patch) ** 2 + token, "patch_dim": channels * patch * patch, "class_token": token}
    return {"input": "patches", **sizes}


def _sorts(layer: Layer, reads_memory: bool) -> tuple[str, ...]:
    """Kinds of a layer's branches; of two attentions in the decoder after an encoder the second reads the encoder."""
    names = [branch.sort for branch in layer.branches]
    across = [reads_memory and name == "attention" and name in names[:i] for i, name in enumerate(names)]
    return tuple("cross_attention" if other else name for name, other in zip(names, across, strict=True))


def _notes(found: Streams, stacks: list[Stack]) -> list[str]:
    branches = [branch for stack in stacks for branch in stack.branches]
    proved = [branch for branch in branches if branch.proved]
    errors = [branch.error for branch in proved if branch.error is not None]
    largest = f", largest error {max(errors):.1e}" if errors else ""
    notes = [
        f"{found.model}: the stream was found by following additions, {len(proved)} of {len(branches)} sums proved"
        f"{largest} (signalprop anatomy); of the architecture only layers, branches, norms and width are known"
    ]
    notes += which(found, stacks)
    if any(branch.stream_in is None or branch.stream_out is None for branch in branches):
        notes.append(
            "where no module sees the stream between two branches, stream_in is the stream before both, and stream_out "
            "the stream after both"
        )
    notes += [
        f"the model changes the stream between layers: {layer.path}: {layer.between}"
        for stack in stacks
        for layer in stack.layers
        if layer.between
    ][:3]
    entries = [layer for stack in stacks for layer in stack.layers if layer.entry_norm is not None]
    if entries:
        which_ones = "the layers" if len(entries) > 1 else entries[0].path
        notes.append(
            f"{which_ones} begin{'s' * (len(entries) == 1)} with a norm on the stream ({entries[0].entry_norm}): "
            "stream_in is what leaves it"
        )
    hidden: dict[str, list[str]] = {}
    for branch in branches:
        if not branch.proved:
            hidden.setdefault(branch.caveat or "the sum differs", []).append(branch.module)
    return notes + [
        f"not proved: {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}: {why}" for why, names in hidden.items()
    ]


def which(found: Streams, stacks: list[Stack]) -> list[str]:
    """Of several stacks, which was taken; in a note."""
    others = [stack.path for stack in found.stacks if stack not in stacks]
    others += [f"{path} (the input does not reach it)" for path in found.not_run]
    if not others:
        return []
    taken = " and ".join(stack.path for stack in stacks)
    return [f"measured: {taken}; not measured: {', '.join(others)}; give the model inside (--inside PATH) for another"]


def _arguments(model: nn.Module, found: Streams, a: Architecture) -> BatchArguments | None:
    """Makes the arguments of a model of tokens."""
    known = {"input_ids": "tokens", "decoder_input_ids": "decoder_tokens"}
    if found.inputs == ("pixel_values",):
        return batch_arguments(model, a, {"patches": "pixel_values"})
    if "input_ids" not in found.inputs or (found.invented and not set(found.inputs) - {"use_cache"} <= set(known)):
        return None
    inputs = {held: name for name, held in known.items() if name in found.inputs}
    taken_by = inspect.signature(model.forward).parameters.values()
    if any(p.name == "attention_mask" or p.kind is p.VAR_KEYWORD for p in taken_by):
        inputs["keep"] = "attention_mask"
    token = None
    with suppress(AttributeError, NotImplementedError):  # a model that does not say which table it reads
        token = model.get_input_embeddings()  # type: ignore[operator]
    made = batch_arguments(model, a, inputs, token)
    return replace(made, tokens_first=True) if taken(model, found)[0].reads_tokens_first else made

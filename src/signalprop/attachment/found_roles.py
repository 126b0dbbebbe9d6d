"""The Mapping of a found model with its weights: the roles of every branch, and the two ends, proved by replay."""

from __future__ import annotations

from collections.abc import Mapping as Dictionary
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.attachment.arguments import BatchArguments, batch_arguments
from signalprop.attachment.found import changed_between, layer_inputs, mapping_found, taken, which
from signalprop.attachment.found_ends import embedding_of, head_of
from signalprop.attachment.mapping import Mapping, SublayerMap, Weight
from signalprop.attachment.rows import PACKED
from signalprop.errors import InputError
from signalprop.families.base import pattern
from signalprop.network.architecture import Architecture
from signalprop.network.layer_inputs import INPUT
from signalprop.streams.arguments import text_config, tiny_arguments
from signalprop.streams.calls import first_sequence
from signalprop.streams.experts import SPARSE
from signalprop.streams.feed_forwards import CLAMPED
from signalprop.streams.found import as_it_was, streams_of
from signalprop.streams.live_model import device_of
from signalprop.streams.multi_head import bias_beside
from signalprop.streams.parts import Branch, Place, Stack
from signalprop.streams.proof import epsilon, gain_and_bias
from signalprop.streams.replay import AttentionShape, Replayed
from signalprop.streams.roles import Proof, prove_roles
from signalprop.streams.streams import Streams

_DROPOUTS = ("hidden_dropout_prob", "resid_pdrop", "hidden_dropout", "residual_dropout", "dropout", "dropout_rate")
_ATTENTION_DROPOUTS = ("attention_probs_dropout_prob", "attn_pdrop", "attention_dropout", "dropout_rate")


@dataclass(frozen=True)
class Roles:
    """What the weights of a model's branches are, as far as that is proved.

    Attributes:
        found: the streams. stacks: those that are taken. labels: of every branch, `layers.3 attention`.
        proof: of every branch. arguments: of the forward.
    """

    found: Streams
    stacks: list[Stack]
    labels: list[str]
    proof: Proof
    arguments: dict[str, Any]

    @property
    def branches(self) -> list[Branch]:
        """Of the stacks, in the order of the stream."""
        return [branch for stack in self.stacks for branch in stack.branches]


def roles_of(model: nn.Module, arguments: Dictionary[str, Any] | None = None, found: Streams | None = None) -> Roles:
    """What every weight of every branch is, or the one line why that is not known: by a small forward pass.

    Args:
        model: in single precision (replays in half precision would prove anything).
        arguments: of its forward; default: random ones. found: its streams; default: looked for.
    """
    given = tiny_arguments(model) if arguments is None else first_sequence(arguments)
    found = streams_of(model, arguments) if found is None or not found.numbers else found
    stacks = taken(model, found)
    labels = [f"{layer.path} {b.sort.replace('_', '-')}" for s in stacks for layer in s.layers for b in layer.branches]
    _refuse_all(model, found, stacks)
    if stacks[0].reads_tokens_first:  # one sequence of several tokens, not several of one token
        given = {k: _one_sequence(v) if isinstance(v, Tensor) and v.ndim > 1 else v for k, v in given.items()}
    device = device_of(model)
    given = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in given.items()}
    with as_it_was(model):
        proof = prove_roles(model, given, stacks, found.norms)
    return Roles(found, stacks, labels, proof, given)


def mapping_with_roles(
    model: nn.Module, arguments: Dictionary[str, Any] | None = None, found: Streams | None = None
) -> Mapping:
    """The mapping of a model that no family knows, with what every weight is; arguments as of `roles_of`."""
    return mapping_of_roles(model, roles_of(model, arguments, found))


def mapping_of_roles(model: nn.Module, roles: Roles) -> Mapping:
    """The same, of what `roles_of` gave."""
    found, stacks, proof, branches = roles.found, roles.stacks, roles.proof, roles.branches
    mapping = mapping_found(model, found)
    _refuse(model, found, stacks, roles.labels)
    for label, replayed in zip(roles.labels, proof.branches, strict=True):
        if not isinstance(replayed, Replayed):
            raise unknown_weights(model, f"{label}: {replayed}")
        if not sayable(replayed):
            raise unknown_weights(model, f"{label}: {replayed.words}: proved, but no Architecture can describe it")
    known = [one for one in proof.branches if isinstance(one, Replayed)]
    fields = _fields(model, found, stacks, branches, known)
    embedding, more = embedding_of(model, roles.arguments, stacks, proof)
    if isinstance(embedding, str):
        raise unknown_weights(model, f"embedding: {embedding}")
    more |= _layer_inputs(model, stacks, more.pop("factor", 1.0))
    head, last, note = head_of(model, stacks, proof, embedding, {**fields, **more})
    a = mapping.architecture
    try:
        whole = a.replace(**{**fields, **more, **last, "branches": _kinds(mapping, known)})
    except ValueError as error:
        raise unknown_weights(model, f"its layers are not those of one Architecture ({error})") from None
    items = [_item(item, one, whole) for item, one in zip(mapping.sublayers, known, strict=True)]
    offsets = {norm.offset for norm in found.norms if norm.offset is not None}
    if mapping.arguments is None and isinstance(embedding.token, str):
        mapping = replace(mapping, arguments=_arguments(model, roles, embedding.token, whole, mapping))
    return replace(
        mapping,
        architecture=whole,
        sublayers=items,
        embedding=embedding,
        head=head,
        gain_offset=offsets.pop() if offsets else 0.0,
        notes=(*_notes(found, known), *which(found, stacks), *note),
        stream_only=False,
    )


def _arguments(model: nn.Module, roles: Roles, token: str, a: Architecture, mapping: Mapping) -> BatchArguments | None:
    """What makes the arguments of a Batch, where one of them (for each stack) holds what the token table reads."""
    names = (a.input, "decoder_tokens") if a.kind == "encoder-decoder" else (a.input,)
    read: dict[str, str] = {}
    for name, tensors in zip(names, (roles.proof.tensors, roles.proof.decoder), strict=False):
        ids = tensors.get(Place(token, "input"))
        named = [k for k, v in roles.arguments.items() if isinstance(v, Tensor) and ids is not None and _same(v, ids)]
        if len(named) != 1:
            return None
        read[name] = named[0]
    if "targets" in roles.arguments:
        read["targets"] = "targets"
    made = batch_arguments(model, a, read, model.get_submodule(token))
    fixed = {k: v for k, v in roles.arguments.items() if k not in read.values() and not isinstance(v, Tensor)}
    return replace(made, others=fixed, tokens_first=mapping.reads_tokens_first)


def _layer_inputs(model: nn.Module, stacks: list[Stack], factor: float) -> dict[str, Any]:
    """The field of the architecture; `factor`: on what a norm gives before the first layer."""
    if not changed_between(stacks) and factor == 1.0:
        return {}
    rows = layer_inputs(stacks)
    if factor != 1.0 and (rows is None or any(0 in row for row in rows[1:])):
        raise unknown_weights(model, f"the embedding's norm is followed by a factor of {factor:.4g}")
    assert rows is not None
    if factor != 1.0:
        rows = tuple({k: x * factor if k == INPUT else x for k, x in row.items()} for row in rows)
        rows = ({INPUT: factor}, *rows[1:])
    return {"layer_inputs": rows}


def _one_sequence(rows: Tensor) -> Tensor:
    """One sequence of ids (tokens, batch): the first, or a random one as (1, tokens)."""
    return (rows.transpose(0, 1) if len(rows) == 1 else rows[:, :1]).contiguous()


def _same(given: Tensor, ids: Tensor) -> bool:
    """Whether a model's argument is what its table reads, or that with tokens and sequences exchanged."""
    return given.equal(ids) or (given.ndim == 2 and given.T.equal(ids))


def sayable(replayed: Replayed) -> bool:
    """Whether an Architecture has a word for what was proved."""
    routing = replayed.routing
    return replayed.activation != CLAMPED and (routing is None or routing.scores != SPARSE)


def with_proved_weights(mapping: Mapping, roles: Roles) -> Mapping:
    """A mapping that knows the stream alone, with the weights of those branches of which they are proved."""
    items = [
        replace(item, weights=_weights(one)) if isinstance(one, Replayed) else item
        for item, one in zip(mapping.sublayers, roles.proof.branches, strict=True)
    ]
    return replace(mapping, sublayers=items)


def _weights(known: Replayed) -> dict[str, Weight]:
    return {role: path if rows is None else (path, rows) for role, (path, rows) in known.weights.items()}


def unknown_weights(model: nn.Module, why: str) -> InputError:
    """The one line for a model whose stream is known and whose weights are not."""
    return InputError(
        "give a mapping, which says what every weight is (docs/measuring.md); of "
        f"{type(model).__name__} only the stream is known: {why}"
    )


def without_replay(model: nn.Module, found: Streams) -> str:
    """Why replays on the model itself would prove nothing; '' where they can."""
    if not found.numbers:
        return "its weights are identified by their numbers, which the meta device does not hold"
    packed = next((n for n, p in model.named_parameters() if not p.is_floating_point()), None)
    if packed is not None:
        return f"its weights are identified by their numbers, and {PACKED.format(packed)}"
    half = next((n for n, p in model.named_parameters() if p.dtype.itemsize < 4), None)
    return f"its weights are identified in single precision; {half} has less, so give model.float()" if half else ""


def _refuse_all(model: nn.Module, found: Streams, stacks: Sequence[Stack]) -> None:
    """Raise InputError where replays could not prove anything."""
    if why := without_replay(model, found):
        raise unknown_weights(model, why)
    if len({layer.path for stack in stacks for layer in stack.layers}) < sum(len(s.layers) for s in stacks):
        raise unknown_weights(model, f"{stacks[0].layers[0].path} serves several layers")


def _refuse(model: nn.Module, found: Streams, stacks: Sequence[Stack], labels: Sequence[str]) -> None:
    """Raise InputError where one Architecture could not say what was found."""
    for label, branch in zip(labels, (b for s in stacks for b in s.branches), strict=True):
        if not branch.proved:
            raise unknown_weights(model, f"{label}: its sum is not proved: {branch.caveat or 'it differs'}")
    for layer in (layer for stack in stacks for layer in stack.layers):
        if len({branch.placement for branch in layer.branches}) > 1:
            raise unknown_weights(model, f"{layer.path}: the norms of its branches stand at different places")
    if (between := changed_between(list(stacks))) and layer_inputs(list(stacks)) is None:
        raise unknown_weights(model, f"{between}; measure it, or watch it in training")
    unknown = next((norm.path for norm in found.norms if norm.kind == "unknown"), None)
    if unknown is not None:
        raise unknown_weights(model, f"{unknown} is a norm of an unknown kind")
    for what in ("kind", "offset"):
        values = {getattr(norm, what) for norm in found.norms} - {None}
        if len(values) > 1:
            raise unknown_weights(model, f"its norms differ in {what}: {', '.join(map(str, sorted(values)))}")


def _item(item: SublayerMap, known: Replayed, a: Architecture) -> SublayerMap:
    """A sublayer with its weights."""
    norms = [path or None for path in known.norms or ("", "")]
    scale = None if known.shape is None or abs(known.shape.scale / a.score_scale - 1) < 1e-6 else known.shape.scale
    return replace(item, weights=_weights(known), score_scale=scale, query_norm=norms[0], key_norm=norms[1])


def _fields(
    model: nn.Module, found: Streams, stacks: Sequence[Stack], branches: Sequence[Branch], known: Sequence[Replayed]
) -> dict[str, Any]:
    """What the replays say of the architecture; layers that differ are refused."""
    modules: dict[str, Any] = dict(model.named_modules())
    attentions = [one for one in known if one.shape is not None]
    shapes = [one.shape for one in attentions if one.shape is not None]
    feeds = [one for one in known if "down" in one.weights]
    routed = [one for one in known if one.routing is not None]
    own = [one.shape for one in attentions if one.shape is not None and not one.across]

    def only(what: str, values: Sequence[Any], usual: Any) -> Any:
        different = list(dict.fromkeys(values))
        if len(different) > 1:
            raise unknown_weights(model, f"its layers differ in {what}: {', '.join(map(str, different[:4]))}")
        return different[0] if different else usual

    def width(one: Replayed, role: str) -> int:
        path, rows = one.weights[role]
        weight = modules[path].weight if path in modules else model.get_parameter(path)
        size = weight.shape[1 if type(modules.get(path)).__name__ == "Conv1D" else 0]
        return int(size) if rows is None else len(torch.arange(size)[rows])

    def biased(roles: tuple[str, ...]) -> bool:
        paths = (path for one in known for role, (path, _) in one.weights.items() if role in roles)
        homes = [(modules.get(path), *path.rpartition(".")) for path in paths]
        of_modules = any(isinstance(getattr(module, "bias", None), Tensor) for module, *_ in homes)
        return of_modules or any(bias_beside(modules.get(place), name) is not None for _, place, _, name in homes)

    heads = only("heads", [s.heads for s in shapes], 1)
    rotations = [s.rotation for s in own if s is not None and s.rotation is not None]
    causal = only("masks", [s.causal for s in own[-len(stacks[-1].layers) :]], False)
    norms = [modules[norm.path] for norm in found.norms if not norm.function]
    epsilons = [*map(epsilon, norms), *(norm.eps for norm in found.norms if norm.function)]
    qk_norms = [bool(one.norms) and (one.per_head or "whole") for one in attentions]
    own_rates = [module.dropout for module in modules.values() if isinstance(module, nn.MultiheadAttention)]
    fields: dict[str, Any] = {
        "kind": "encoder-decoder" if len(stacks) > 1 else "decoder" if causal else "encoder",
        "n_heads": heads,
        "n_kv_heads": only("heads of keys", [s.kv_heads for s in shapes], heads),
        "d_head": only("features of a head", [width(one, "query") // heads for one in attentions], stacks[0].width),
        "d_ff": only("features inside", [width(one, "up") for one in feeds], 4 * stacks[0].width),
        "gated": only("gates", [one.gated for one in (*feeds, *routed)], False),
        "activation": only("activations", [one.activation for one in (*feeds, *routed)], "gelu"),
        "attention_scale": None,
        "qk_norm": only("norms of queries", qk_norms, False),
        "bias": biased(("output", "up", "down")),
        "qkv_bias": biased(("query", "key", "value")),
        "norm": next((norm.kind for norm in found.norms), "layernorm"),
        "norm_bias": any(isinstance(gain_and_bias(module)[1], Tensor) for module in norms),
        "norm_eps": next((e for e in epsilons if e is not None), 1e-5),
        "positions": "none",
        "dropout": _dropout(model, branches, modules),
        "attention_dropout": max(own_rates) if own_rates else _setting(model, _ATTENTION_DROPOUTS),
        "family": None,
        "settings": {},
    }
    filters = [modules[one.weights["conv_filter"][0]] for one in known if "conv_filter" in one.weights]
    if filters:
        width_of_filter = only("taps of a convolution", [int(m.weight.shape[-1]) for m in filters], 0)
        fields["settings"]["gated_convolution"] = {"width": width_of_filter, "bias": filters[0].bias is not None}
    if routed:
        own_settings = [_experts(one, width(one, "shared_up") if "shared_up" in one.weights else 0) for one in routed]
        only("experts", [str(one) for one in own_settings], "")
        fields["settings"]["experts"] = own_settings[0]
    if any(layer.branches[-1].parallel for stack in stacks for layer in stack.layers):
        fields["shared_norm"] = all(len({b.norm for b in layer.branches}) == 1 for s in stacks for layer in s.layers)
    if shapes and shapes[0] is not None and abs(shapes[0].scale * fields["d_head"] ** 0.5 - 1) > 1e-6:
        fields["attention_scale"] = shapes[0].scale
    if seeing := _own_shapes(stacks, known):
        windows = pattern([(s.window if s.causal else 2 * s.window - 1) * bool(s.window) for s in seeing])
        turns = pattern([s.rotation is not None for s in seeing]) if rotations else True
        fields["settings"]["attention"] = {"window": windows, "rotates": turns}
    if rotations:
        n = len(rotations[0].frequencies)
        base = rotations[0].frequencies[1] ** -n if n > 1 else 10_000.0
        fields |= {"positions": "rotary", "rotary_base": max(1.0, float(f"{base:.6g}"))}
        fields["rotary_fraction"] = 2 * n / fields["d_head"]
    elif any(s is not None and s.slopes for s in own):
        fields["positions"] = "alibi"
    elif any(s is not None and s.table for s in own):
        fields["positions"] = "relative"
    return fields


def _experts(one: Replayed, shared: int) -> dict[str, Any]:
    """The settings of the kind `experts`."""
    r = one.routing
    assert r is not None
    same = ("n_experts", "top_k", "width", "scores", "normalised", "scale", "n_groups", "top_groups")
    more = {"router_bias": r.router_biased, "shared_width": shared, "shared_gated": "shared_router" in one.weights}
    return {name: getattr(r, name) for name in same} | more


def _kinds(mapping: Mapping, known: Sequence[Replayed]) -> tuple[tuple[str, ...], ...]:
    """What the sublayers of every layer are."""
    left = list(known)
    kinds = []
    for layer in mapping.architecture.layer_branches:
        ones = [(kind, left.pop(0)) for kind in layer]
        kinds.append(tuple(
            "experts" if one.routing is not None else "gated_convolution" if "conv_filter" in one.weights else kind
            for kind, one in ones
        ))  # fmt: skip
    return tuple(kinds)


def _own_shapes(stacks: Sequence[Stack], known: Sequence[Replayed]) -> list[AttentionShape]:
    """Of every layer's self-attention; layers without one stand as the first that has one."""
    left, found = iter(known), []
    for layer in (layer for stack in stacks for layer in stack.layers):
        ones = [next(left) for _ in layer.branches]
        found.append([one.shape for one in ones if one.shape is not None and not one.across])
    first = next((shapes for shapes in found if shapes), [])
    return [shapes[0] for shapes in (here or first for here in found)] if max(map(len, found)) == 1 else []


def _setting(model: nn.Module, names: tuple[str, ...]) -> float:
    values = (getattr(text_config(model), name, None) for name in names)
    return next((float(value) for value in values if isinstance(value, (int, float)) and 0 <= value < 1), 0.0)


def _dropout(model: nn.Module, branches: Sequence[Branch], modules: Dictionary[str, Any]) -> float:
    """Of branches: what the modules say; where none does, the configuration."""
    rates = [modules[path].p for b in branches for path in b.modules if isinstance(modules[path], nn.Dropout)]
    return float(max(rates)) if rates else _setting(model, _DROPOUTS)


def _notes(found: Streams, known: Sequence[Replayed]) -> list[str]:
    notes = [
        f"{found.model}: the stream was found by following additions, and the roles of its weights by replaying "
        f"{len(known)} branches (largest error {max(one.error for one in known):.1e}); how the model was initialised "
        "is not known"
    ]
    turns = {one.shape.rotation for one in known if one.shape is not None and not one.across}
    if len(turns) > 1:
        notes.append("its layers rotate queries and keys differently; the first rotation is used for all")
    return notes

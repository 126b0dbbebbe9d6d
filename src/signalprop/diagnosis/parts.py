"""Parts of a model that are checked one by one: norms, tables, rotary frequencies, routers, equal layers, ties."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.attachment.anatomy import Anatomy
from signalprop.attachment.rows import AttachedRow, Held
from signalprop.data.batches import Batch
from signalprop.diagnosis import sentences
from signalprop.diagnosis.ends import gain_of, matrix_of
from signalprop.diagnosis.layers import groups, has_modules, lean
from signalprop.diagnosis.lost_numbers import lost_numbers
from signalprop.diagnosis.result import LayerSignal
from signalprop.diagnosis.sentences import fault
from signalprop.hooks import Hooks
from signalprop.measurement.measuring import arguments_of
from signalprop.results.findings import Finding
from signalprop.results.text import named, ranges
from signalprop.streams.live_model import weights_here

_EPSILON = 0.5  # of the variance of what a norm reads. Fresh models: 0.025, a table of deviation 0.02 and 1e-5
_COLLAPSED = 0.95  # share of tokens whose first choice is one expert
_TOKENS = 32  # that tell it
# Deviations of scores over tokens between an expert's and the last that is chosen, for all tokens: of few experts, and
# of many, which share out kinds of text.
_NEVER, _NEVER_OF_MANY, _MANY = 2.0, 6.0, 16


def parts_of(attached: Anatomy, short: Batch) -> tuple[Finding, ...]:
    """What is wrong with parts of a model; one pass of a short text where it has routers."""
    with weights_here(attached.model):
        found = [*_norms(attached), *_tables(attached), *_rotary(attached), *_ties(attached), *_equal(attached)]
        found += [*_scaling(attached), *lost_numbers(attached)]
    return (*found, *_routers(attached, short), *_dead_units(attached, short))


def _none(x: Any) -> bool:
    return isinstance(x, Tensor) and x.numel() > 0 and not bool(x.any())


def _norms(attached: Anatomy) -> Iterator[Finding]:
    """Norms before branches whose gains are all 0. Norms that end a branch may begin there."""
    norms = [(row.layer, row.norm) for row in attached.rows
             if row.norm is not row.post_norm and row.placement != "res-post"]  # fmt: skip
    dead = [
        (layer, f"{attached.path_of(norm, 'norm')}.weight")
        for layer, norm in (*norms, *((None, norm) for norm in attached.ends.final_norms))
        if _none(gain_of(norm, attached.mapping.gain_offset))
    ]
    yield from sentences.norms_of_zeros(dead, "tested: the gains were read")


def _tables(attached: Anatomy) -> Iterator[Finding]:
    ends = attached.ends
    position = ends.position if isinstance(ends.position, Held) else None  # else a number, so not a table
    places = {"token table": ends.token, "position table": position, "head": ends.head}
    own = attached.mapping.architecture.family is None and ends.head is None
    for word, held in places.items():
        if _none(_map_to_words(attached) if own and word == "head" else matrix_of(held)):
            at = "every word has the same logit" if word == "head" else "its output is 0 for every token"
            yield fault(
                name="head of zeros" if word == "head" else "table of zeros", severity="fault",
                text=f"the {word} is all 0: {at}",
                remedy="load it, or draw it with a standard deviation of 0.02"
                + ("; a fresh head of zeros trains" if word == "head" else ""),
                cause="tested: the weights were read",
            )  # fmt: skip


def _map_to_words(attached: Anatomy) -> Tensor | None:
    """The weight of the one map that gives as many numbers as there are words, where the head was not found."""
    words = attached.mapping.architecture.vocab_size
    found = [m.weight for m in attached.model.modules() if isinstance(m, nn.Linear) and m.out_features == words]
    return found[0] if len(found) == 1 else None


def epsilons_of(attached: Anatomy, signal: Sequence[LayerSignal]) -> tuple[Finding, ...]:
    """Norms whose epsilon is not small beside the mean square of what they read."""
    off: dict[int, tuple[float, float]] = {}
    for k, rows in enumerate(groups(attached.layout)):
        row, read = attached.rows[rows[0]], signal[k].variance_in
        eps = getattr(row.norm, "variance_epsilon", getattr(row.norm, "eps", None))
        if row.placement in ("pre", "sandwich") and isinstance(eps, float) and read:
            carried = read / row.units[0] ** 2
            if eps > _EPSILON * carried:
                off[k] = (eps, carried)
    if not off:
        return ()
    layer = max(off, key=lambda k: off[k][0] / off[k][1])
    eps, carried = off[layer]
    return (
        fault(
            name="norm epsilon", layers=tuple(off),
            text=f"{named(tuple(off))}: the epsilon of the first norm is {eps:.3g} and the stream that it reads has "
            f"variance {carried:.3g} (layer {layer}): branches read {math.sqrt(carried / (carried + eps)):.2f} times "
            "the usual output of a norm",
            remedy="an epsilon of 1e-5 or 1e-6, as the model was trained with, or a larger token table",
            cause="tested: the stream was measured",
        ),
    )  # fmt: skip


def _rotary(attached: Anatomy) -> Iterator[Finding]:
    """Buffers of rotary frequencies against those that the module computes anew from its configuration."""
    for path, module in attached.model.named_modules():
        buffers = {n: b for n, b in module.named_buffers(recurse=False) if "inv_freq" in n and not b.is_meta}
        if not buffers:
            continue
        anew = _anew(module)
        wanted = {} if anew is None else dict(anew.named_buffers(recurse=False))  # else only zeros are looked for
        for name, held in buffers.items():
            new = wanted.get(name)
            if not bool(torch.isfinite(held).all()):
                continue  # named as such
            zero = bool((held == 0).any()) and not (new is not None and bool((new == 0).any()))
            off = (
                new is not None
                and new.shape == held.shape
                and not torch.allclose(held.float().cpu(), new.float(), rtol=0.02, atol=1e-9)
            )
            if zero or off:
                what = "holds zeros" if zero else "is not what the configuration gives"
                now = "" if new is None else f"; computed anew they begin with {_begin(new)}"
                yield fault(
                    name="rotary frequencies",
                    text=f"{path}.{name} (buffer) {what}: its frequencies begin with {_begin(held)}{now}",
                    remedy="compute the buffer again: reload the model, or run what fills it after to_empty; rotary "
                    "frequencies stay in float32",
                    cause="tested: they were computed anew" if off else "tested: the buffer was read",
                )  # fmt: skip


def _scaling(attached: Anatomy) -> Iterator[Finding]:
    """Factors on scores against those of a module that is built anew from the same configuration."""
    off: dict[int, tuple[float, float]] = {}
    for row in attached.rows:
        owner, name = row.scaling or (None, "")
        held = getattr(owner, name, None)
        if not isinstance(held, float) or not isinstance(owner, nn.Module):
            continue
        with torch.device("meta"):
            wanted = getattr(_anew(owner, layer_idx=getattr(owner, "layer_idx", 0)), name, None)
        if isinstance(wanted, float) and wanted and abs(held / wanted - 1) > 0.01:
            off[row.layer] = (held, wanted)
    if off:
        held, wanted = next(iter(off.values()))
        yield fault(
            name="score scale", layers=tuple(off),
            text=f"{named(tuple(off))}: scores are multiplied by {held:.4g}; the configuration gives {wanted:.4g}",
            remedy="set the factor again, or the configuration that it comes from",
            cause="tested: the module was built anew from the configuration",
        )  # fmt: skip


def _anew(module: nn.Module, **options: Any) -> nn.Module | None:
    """The module as its class builds it from its configuration; None if it has none, or another signature."""
    with suppress(Exception):
        return None if module.config is None else type(module)(module.config, **options)
    return None


def _begin(x: Tensor) -> str:
    return ", ".join(f"{v:.3g}" for v in x.flatten()[:3].tolist())


def _ties(attached: Anatomy) -> Iterator[Finding]:
    """A head that is to be the table and is another parameter: by the configuration, or by its numbers."""
    model: Any = attached.model
    ties = bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))
    own = attached.mapping.architecture.family is None
    if own:
        table, head = matrix_of(attached.ends.token), matrix_of(attached.ends.head)
        head = _map_to_words(attached) if head is None else head
    else:
        try:
            table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        except (AttributeError, NotImplementedError):
            return
    if not isinstance(head, Tensor) or not isinstance(table, Tensor) or head.shape != table.shape or head.is_meta:
        return
    if head.data_ptr() == table.data_ptr() or not (own or ties):
        return
    equal = torch.equal(head, table) and bool(table.any())
    if ties or equal:
        said = "the configuration says tie_word_embeddings, but the head is a separate parameter"
        yield fault(
            name="head not tied", severity="warning",
            text=(said if ties else "the head is not the token table")
            + ("; their numbers are equal until training changes them" if equal else " with other numbers"),
            remedy="call model.tie_weights(), or set tie_word_embeddings to false" if ties
            else "make them one parameter after the weights are drawn and moved: head.weight = tokens.weight",
            cause="tested: the two parameters were compared",
        )  # fmt: skip


def _equal(attached: Anatomy) -> Iterator[Finding]:
    """Layers whose numbers are all the same, though they are not the same tensors."""
    if not has_modules(attached.mapping):
        return
    seen: dict[tuple[float, ...], list[int]] = {}
    states: list[dict[str, Tensor]] = []
    for k, layer in enumerate(attached.layers):
        own: dict[str, Tensor] = dict(layer.named_parameters()) if isinstance(layer, nn.Module) else {}
        states.append(own)
        maps = [p.detach() for p in own.values() if p.ndim > 1 and not p.is_meta and p.is_floating_point()]
        if not maps or any(not bool(p.isfinite().all()) for p in maps):
            continue
        seen.setdefault(tuple(float(p.sum(dtype=torch.float64)) for p in maps), []).append(k)
    for layers in seen.values():
        first, *others = layers
        same = [
            k for k in others
            if states[k].keys() == states[first].keys()
            and all(torch.equal(states[k][n], p) and states[k][n] is not p for n, p in states[first].items())
        ]  # fmt: skip
        if same:
            yield fault(
                name="equal layers", layers=(first, *same), severity="warning",
                text=sentences.equal_layers((first, *same)),
                remedy="draw or load each layer separately (nn.TransformerEncoder copies one layer); layers that are "
                "shared on purpose are one module",
                cause="tested: every weight was compared",
            )  # fmt: skip


def _routers(attached: Anatomy, short: Batch) -> Iterator[Finding]:
    """Which experts a text chooses, by the router's weights; and routers that no gradient reaches."""
    rows = [row for row in attached.rows if matrix_of(row.weights.get("router")) is not None]
    if not rows:
        return
    s: Any = attached.mapping.architecture.settings["experts"]
    if s.top_k == 1 and s.normalised and s.scores != "sigmoid" and s.n_experts > 1:
        yield fault(
            name="router gets no gradient", layers=tuple(row.layer for row in rows),
            text="every token has one expert, whose weight is divided by itself: it is always 1, so no gradient of "
            "the loss reaches the router",
            remedy="use the probability itself as the weight (norm_topk_prob=False), or two experts per token",
            cause="tested: by how the weights of chosen experts are computed",
        )  # fmt: skip
    zero = tuple(row.layer for row in rows if _none(matrix_of(row.weights["router"])))
    if zero:
        yield fault(
            name="router of zeros", layers=zero,
            text=f"{named(zero)}: the router's weights are all 0: every expert has the same score, and the first "
            f"{s.top_k} of {s.n_experts} get every token",
            remedy="load the router, or draw it with a standard deviation of 0.02",
            cause="tested: the weights were read",
        )  # fmt: skip
    if s.hashed or s.n_groups > 1:
        return
    scores = {k: v for k, v in _router_scores(attached, rows, short).items() if k not in zero}
    never = _NEVER if s.n_experts <= _MANY else _NEVER_OF_MANY
    full: dict[int, tuple[float, int]] = {}
    unused: dict[int, list[int]] = {}
    for layer, x in scores.items():
        counts = torch.bincount(x.argmax(-1), minlength=s.n_experts)
        share = float(counts.max() / counts.sum())
        if share > _COLLAPSED:
            full[layer] = (share, int(counts.argmax()))
            continue
        # below the last one that is chosen, for every token, in deviations of a score over tokens
        below = (x.topk(s.top_k, -1).values[:, -1:] - x).amin(0) / x.std(0).median().clamp_min(1e-12)
        unused |= {layer: found} if (found := torch.nonzero(below > never).flatten().tolist()) else {}
    if full:
        layer, (share, expert) = max(full.items(), key=lambda item: item[1])
        yield fault(
            name="router collapse", layers=tuple(full),
            text=f"{named(tuple(full))}: expert {expert} of {s.n_experts} is the first choice of "
            f"{share:.0%} of the tokens of a short text (layer {layer}); others learn nothing",
            remedy="a load-balancing loss or bias; draw the router anew with a small standard deviation",
            cause="tested: the router's weights on what it reads",
        )  # fmt: skip
    if unused:
        layer, experts = next(iter(unused.items()))
        yield fault(
            name="unused experts", layers=tuple(unused), severity="warning",
            text=f"{named(tuple(unused))}: no token comes near choosing expert {ranges(experts)} of "
            f"{s.n_experts} (layer {layer}): its scores lie more than {never:g} standard deviations below those that "
            "are chosen",
            remedy="a load-balancing loss or bias, from a checkpoint in which they were chosen; else prune them",
            cause="tested: the router's weights on what it reads",
        )  # fmt: skip


def _dead_units(attached: Anatomy, short: Batch) -> Iterator[Finding]:
    """Feed-forwards whose activation outputs nothing, whatever the token."""
    modules = {
        row.layer: row.activation.found for row in attached.rows if row.activation and not row.activation.problem
    }
    held = {k: m for k, m in modules.items() if isinstance(m, nn.Module) and list(modules.values()).count(m) == 1}
    dead: list[int] = []
    hooks = Hooks()
    for k, m in held.items():
        hooks.after(m, lambda _, args, __, out, k=k: dead.append(k) if _none(out) and not _none(args[0]) else None)
    _pass(attached, short, hooks)
    if dead:
        layers = tuple(sorted(set(dead)))
        yield fault(
            name="dead units", layers=layers,
            text=f"{named(layers)}: the activation of the feed-forward is 0 for every unit and every token of a short "
            "text: it adds its bias alone, and no gradient passes",
            remedy="look at the biases of its up map, and at the checkpoint that it came from",
        )  # fmt: skip


def _pass(attached: Anatomy, short: Batch, hooks: Hooks) -> None:
    """One pass with hooks."""
    with torch.inference_mode(), hooks:
        lean(attached.model, arguments_of(attached, short))


def _router_scores(attached: Anatomy, rows: list[AttachedRow], short: Batch) -> dict[int, Tensor]:
    """Scores by layer, (tokens, experts)."""
    read: dict[int, Tensor | None] = {}
    holders = {row.layer: row.weights["router"].found for row in rows}
    hooks = Hooks()
    for layer, holder in holders.items():
        if isinstance(holder, nn.Module):
            hooks.reads(holder, lambda x, layer=layer: read.update({layer: x}))  # type: ignore[misc]
    _pass(attached, short, hooks)
    out = {}
    for row in rows:
        weight, x = matrix_of(row.weights["router"]), read.get(row.layer)
        if weight is None or x is None or x.shape[-1] != weight.shape[-1] or x[..., 0].numel() < _TOKENS:
            continue
        logits = x.flatten(0, -2).float() @ weight.float().t()
        for bias in (row.weights["router"].bias, getattr(row.weights["router"].found, "e_score_correction_bias", None)):
            logits = logits if not isinstance(bias, Tensor) else logits + bias.detach().float()
        out[row.layer] = logits
    return out

"""Parts of a model that are looked at one by one: norms, tables, rotary frequencies, routers, equal layers, ties."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.attachment.arguments import read_by
from signalprop.attachment.attached import Attached, AttachedRow, Held
from signalprop.data.batches import Batch
from signalprop.diagnosis import sentences
from signalprop.diagnosis.ends import gain_of, matrix_of
from signalprop.diagnosis.layers import groups, has_modules, lean
from signalprop.diagnosis.result import LayerSignal
from signalprop.diagnosis.temporary_changes import part_of_bias
from signalprop.diagnosis.whole_model_values import Wired
from signalprop.hooks import first_tensor
from signalprop.measurement.measuring import arguments_of
from signalprop.results.text import named
from signalprop.streams.placement import weights_here

_EPSILON = 0.5  # of the variance of what a norm reads. Fresh models: 0.025, a table of deviation 0.02 and 1e-5
_COLLAPSED = 0.95  # share of tokens whose first choice is one expert
_TOKENS = 32  # that tell it


def parts_of(attached: Attached, short: Batch) -> tuple[Wired, ...]:
    """What is wrong with parts of a model; one pass of a short text where it has routers."""
    with weights_here(attached.model):
        found = [*_norms(attached), *_tables(attached), *_rotary(attached), *_ties(attached), *_equal(attached)]
        found += [*_scaling(attached), *_biases(attached)]
    return (*found, *_routers(attached, short))


def _none(x: Tensor | None) -> bool:
    return x is not None and x.numel() > 0 and not bool(x.any())


def _norms(attached: Attached) -> Iterator[Wired]:
    """Norms before branches whose gains are all 0. Norms that end a branch may begin there."""
    offset = attached.mapping.gain_offset
    dead: dict[int, list[str]] = {}
    for row in attached.rows:
        if row.norm is row.post_norm or row.placement == "res-post":
            continue
        if _none(gain_of(row.norm, offset)):
            dead.setdefault(row.layer, []).append(attached.path_of(row.norm, "norm"))
    for norm in attached.ends.final_norms:
        if _none(gain_of(norm, offset)):
            path = attached.path_of(norm, "norm")
            yield Wired(
                name="norm of zeros", layers=(),
                text=sentences.norm_of_zeros((), [path]),
                advice="gains start at 1 (at 0 where 1 is added to them); load or initialise them again",
                cause="tested: the gains were read",
            )  # fmt: skip
    if dead:
        paths = [path for each in dead.values() for path in each]
        yield Wired(
            name="norm of zeros", layers=tuple(dead),
            text=sentences.norm_of_zeros(tuple(dead), paths),
            advice="gains start at 1 (at 0 where 1 is added to them); load or initialise them again",
            cause="tested: the gains were read",
        )  # fmt: skip


def _tables(attached: Attached) -> Iterator[Wired]:
    ends = attached.ends
    position = ends.position if isinstance(ends.position, Held) else None  # else a number: it is no table
    places = {"token table": ends.token, "position table": position, "head": ends.head}
    own = attached.mapping.architecture.family is None and ends.head is None
    for word, held in places.items():
        if _none(_map_to_words(attached) if own and word == "head" else matrix_of(held)):
            at = "every word has the same logit" if word == "head" else "its output is 0 for every token"
            yield Wired(
                name="head of zeros" if word == "head" else "table of zeros", layers=(), severity="fault",
                text=f"the {word} is all 0: {at}",
                advice="load it, or draw it with a standard deviation of 0.02"
                + ("; a fresh head of zeros trains" if word == "head" else ""),
                cause="tested: the weights were read",
            )  # fmt: skip


def _map_to_words(attached: Attached) -> Tensor | None:
    """The weight of the one map that gives as many numbers as there are words, where the head was not found."""
    words = attached.mapping.architecture.vocab_size
    found = [m.weight for m in attached.model.modules() if isinstance(m, nn.Linear) and m.out_features == words]
    return found[0] if len(found) == 1 else None


def _biases(attached: Attached) -> Iterator[Wired]:
    """Biases of queries and values that are all 0 in a model whose gains were trained."""
    gains = [g for row in attached.rows if (g := gain_of(row.norm, 0.0)) is not None]
    if attached.mapping.architecture.input != "tokens" or not any(bool((g != g[0]).any()) for g in gains):
        return
    held = [part_of_bias(row.weights.get(role)) for row in attached.rows for role in ("query", "value")]
    biases = [b for b in held if b is not None]
    if biases and all(_none(b) for b in biases):
        yield Wired(
            name="biases of zeros", layers=(), severity="warning",
            text="the biases of queries and values are 0 in every layer, while other parameters were trained",
            advice="look for biases among the checkpoint's unexpected or missing keys; a model without them says so in "
            "its configuration",
            cause="possible, not tested: a converter that carried weights alone",
        )  # fmt: skip


def epsilons_of(attached: Attached, signal: Sequence[LayerSignal]) -> tuple[Wired, ...]:
    """Norms whose epsilon is not small beside the mean square of what they read."""
    off: dict[int, tuple[float, float]] = {}
    for k, rows in enumerate(groups(attached.layout)):
        row, read = attached.rows[rows[0]], signal[k].variance_in
        eps = getattr(row.norm, "variance_epsilon", getattr(row.norm, "eps", None))
        if row.placement in ("pre", "sandwich") and isinstance(eps, float) and read:
            carried = read / row.item.units[0] ** 2
            if eps > _EPSILON * carried:
                off[k] = (eps, carried)
    if not off:
        return ()
    layer = max(off, key=lambda k: off[k][0] / off[k][1])
    eps, carried = off[layer]
    return (
        Wired(
            name="norm epsilon", layers=tuple(off),
            text=f"{named(tuple(off))}: the epsilon of the first norm is {eps:.3g} and the stream that it reads has "
            f"variance {carried:.3g} (layer {layer}): branches read {math.sqrt(carried / (carried + eps)):.2f} times "
            "what a norm gives",
            advice="an epsilon of 1e-5 or 1e-6, as the model was trained with, or a larger token table",
            cause="tested: the stream was measured",
        ),
    )  # fmt: skip


def _rotary(attached: Attached) -> Iterator[Wired]:
    """Buffers of rotary frequencies against those that the module computes anew from its configuration."""
    for path, module in attached.model.named_modules():
        buffers = {n: b for n, b in module.named_buffers(recurse=False) if "inv_freq" in n and not b.is_meta}
        if not buffers:
            continue
        config, wanted = getattr(module, "config", None), {}
        if config is not None:
            try:
                wanted = dict(type(module)(config).named_buffers(recurse=False))
            except Exception:  # a class of another signature: only zeros are looked for
                wanted = {}
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
                yield Wired(
                    name="rotary frequencies", layers=(),
                    text=f"{path}.{name} (buffer) {what}: its frequencies begin with {_begin(held)}{now}",
                    advice="compute the buffer again: reload the model, or run what fills it after to_empty; rotary "
                    "frequencies stay in float32",
                    cause="tested: they were computed anew" if off else "tested: the buffer was read",
                )  # fmt: skip


def _scaling(attached: Attached) -> Iterator[Wired]:
    """Factors on scores against those of a module that is built anew from the same configuration."""
    off: dict[int, tuple[float, float]] = {}
    for row in attached.rows:
        owner, name = row.scaling or (None, "")
        config, held = getattr(owner, "config", None), getattr(owner, name, None)
        if config is None or not isinstance(held, float) or not isinstance(owner, nn.Module):
            continue
        try:
            with torch.device("meta"):
                wanted = getattr(type(owner)(config, layer_idx=getattr(owner, "layer_idx", 0)), name)
        except Exception:  # a class of another signature
            continue
        if isinstance(wanted, float) and wanted and abs(held / wanted - 1) > 0.01:
            off[row.layer] = (held, wanted)
    if off:
        held, wanted = next(iter(off.values()))
        yield Wired(
            name="score scale", layers=tuple(off),
            text=f"{named(tuple(off))}: scores are multiplied by {held:.4g}; the configuration gives {wanted:.4g}",
            advice="set the factor again, or the configuration that it comes from",
            cause="tested: the module was built anew from the configuration",
        )  # fmt: skip


def _begin(x: Tensor) -> str:
    return ", ".join(f"{v:.3g}" for v in x.flatten()[:3].tolist())


def _ties(attached: Attached) -> Iterator[Wired]:
    """A configuration that ties the head to the table, and a head that is another parameter."""
    model: Any = attached.model
    config = getattr(model, "config", None)
    if not getattr(config, "tie_word_embeddings", False):
        return
    try:
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    except (AttributeError, NotImplementedError):
        return
    alike = isinstance(head, Tensor) and isinstance(table, Tensor) and head.shape == table.shape
    if alike and head is not table and not head.is_meta and head.data_ptr() != table.data_ptr():
        equal = torch.equal(head, table)
        yield Wired(
            name="head not tied", layers=(), severity="warning",
            text="the configuration says tie_word_embeddings, but the head is a parameter of its own"
            + (", with the same numbers for now: training takes them apart" if equal else " with other numbers"),
            advice="call model.tie_weights(), or set tie_word_embeddings to false",
            cause="tested: the two parameters were compared",
        )  # fmt: skip


def _equal(attached: Attached) -> Iterator[Wired]:
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
            yield Wired(
                name="equal layers", layers=(first, *same), severity="warning",
                text=sentences.equal_layers((first, *same)),
                advice="draw or load each by itself (nn.TransformerEncoder copies one layer); layers that are shared "
                "on purpose are one module",
                cause="tested: every weight was compared",
            )  # fmt: skip


def _routers(attached: Attached, short: Batch) -> Iterator[Wired]:
    """Which experts a text chooses, by the router's own weights; and routers that no gradient reaches."""
    rows = [row for row in attached.rows if matrix_of(row.weights.get("router")) is not None]
    if not rows:
        return
    s: Any = attached.mapping.architecture.settings["experts"]
    if s.top_k == 1 and s.normalised and s.scores != "sigmoid" and s.n_experts > 1:
        yield Wired(
            name="router gets no gradient", layers=tuple(row.layer for row in rows),
            text="every token has one expert, whose weight is divided by itself: it is 1 whatever the router says, so "
            "that no gradient of the loss reaches the router",
            advice="use the probability itself as the weight (norm_topk_prob=False), or two experts per token",
            cause="tested: by how the weights of chosen experts are made",
        )  # fmt: skip
    zero = tuple(row.layer for row in rows if _none(matrix_of(row.weights["router"])))
    if zero:
        yield Wired(
            name="router of zeros", layers=zero,
            text=f"{named(zero)}: the router's weights are all 0: every expert has the same score, and the first "
            f"{s.top_k} of {s.n_experts} get every token",
            advice="load the router, or draw it with a standard deviation of 0.02",
            cause="tested: the weights were read",
        )  # fmt: skip
    if s.hashed or s.n_groups > 1:
        return
    shares = {k: v for k, v in _shares(attached, rows, short).items() if k not in zero}
    full = {layer: share for layer, (share, _) in shares.items() if share > _COLLAPSED}
    if full:
        layer, share = max(full.items(), key=lambda item: item[1])
        yield Wired(
            name="router collapse", layers=tuple(full),
            text=f"{named(tuple(full))}: expert {shares[layer][1]} of {s.n_experts} is the first choice of "
            f"{share:.0%} of the tokens of a short text (layer {layer}); others learn nothing",
            advice="a load-balancing loss or bias; draw the router anew with a small standard deviation",
            cause="tested: the router's weights on what it reads",
        )  # fmt: skip


def _shares(attached: Attached, rows: list[AttachedRow], short: Batch) -> dict[int, tuple[float, int]]:
    """By layer: the share of tokens whose first choice is the busiest expert, and its number."""
    read: dict[int, Tensor] = {}
    hooks = []
    for row in rows:
        holder = row.weights["router"].found
        if isinstance(holder, nn.Module):
            hooks.append(
                holder.register_forward_pre_hook(
                    lambda _, args, layer=row.layer: read.update({layer: first_tensor(args).detach()})  # type: ignore
                )
            )
    try:
        with torch.inference_mode():
            lean(
                attached.model,
                arguments_of(attached.model, attached.mapping, read_by(attached.mapping.arguments, short)),
            )
    finally:
        for hook in hooks:
            hook.remove()
    out = {}
    for row in rows:
        weight, x = matrix_of(row.weights["router"]), read.get(row.layer)
        if weight is None or x is None or x.shape[-1] != weight.shape[-1] or x[..., 0].numel() < _TOKENS:
            continue
        logits = x.flatten(0, -2).float() @ weight.float().t()
        for bias in (row.weights["router"].bias, getattr(row.weights["router"].found, "e_score_correction_bias", None)):
            logits = logits if not isinstance(bias, Tensor) else logits + bias.detach().float()
        counts = torch.bincount(logits.argmax(-1), minlength=logits.shape[-1])
        out[row.layer] = (float(counts.max() / counts.sum()), int(counts.argmax()))
    return out

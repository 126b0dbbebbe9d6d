"""The largest |activation| at every place of a model that a factor could move, and at those that none can."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from collections.abc import Mapping as Dictionary
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.attachment.anatomy import Anatomy
from signalprop.attachment.rows import AttachedRow, Held
from signalprop.errors import InputError
from signalprop.hooks import Hooks, Products, Site, logits_of
from signalprop.measurement.passes import output_of
from signalprop.network.kinds import ROLE
from signalprop.streams.live_model import evaluating
from signalprop.sublayers.experts.roles import Settings as ExpertsSettings

# Who divides by what: of attention and cross-attention, of feed-forwards, and of experts.
INNER = {"value": "output", "up": "down", "expert_up": "expert_down", "shared_up": "shared_down"}


@dataclass(frozen=True)
class Place:
    """A tensor of the forward pass.

    Attributes:
        where: `layer 3 attention`. what: `stream`, `branch`, `norm`, or the role whose output it is (`mixed values` and
            `hidden`: what the output and down maps read).
        site, rows: where it is seen, and the features there (None: all).
        stream: whether the stream's factor divides it. inner: the sublayer whose inner factor does.
        weight: a parameter of the site's module, which holds it for all experts: what is multiplied by it, or made so.
    """

    where: str
    what: str
    site: Site
    rows: slice | Sequence[int] | None = None
    stream: bool = False
    inner: int | None = None
    weight: Tensor | None = None


def places_of(attached: Anatomy, *, along: bool, tied: nn.Module | None) -> list[Place]:
    """Every place that is watched, each once.

    Args:
        along: what the norms of branches, queries and keys read is divided with the stream. tied: the norm whose output
            is multiplied, for a head that shares its weight with the embedding.
    """
    found: dict[tuple[Any, ...], Place] = {}
    for place in (*_rows(attached, along=along), *_ends(attached, along=along, tied=tied)):
        site = place.site
        found.setdefault((id(site.module), site.side, site.call, str(place.rows), id(place.weight)), place)
    return list(found.values())


def _rows(attached: Anatomy, *, along: bool) -> Iterator[Place]:
    plan = attached.plan
    owners = {id(p): module for module in attached.model.modules() for p in module.parameters(recurse=False)}
    for i, row in enumerate(attached.rows):
        stream = {"stream_in": "stream", "branch": "branch", "stream_out": "stream"}
        for column, what in stream.items():
            index = getattr(plan, column)[i]
            if index >= 0:
                yield Place(row.label, what, plan.sites[index], stream=True)
        on_branch = row.placement == "res-post"
        if row.norm is not None and (on_branch or not reads_bare(row)):
            yield Place(row.label, "norm", Site(row.norm, "output"), stream=on_branch)
        moves = moves_inner(attached, row)
        for role, held in row.weights.items():
            if held.copies and id(held.holder) not in owners:  # a module that holds experts sees none of what they make
                continue
            weight = held.holder if held.copies else None
            module = owners[id(weight)] if held.copies else held.module(f"{row.label} {role}")
            site, divided = Site(module, "output"), False
            inner = i if moves and role in INNER else None
            if ROLE[role].writes:
                divided = along or row.placement in ("pre", "none")
                what = {"output": "mixed values", "down": "hidden"}.get(role, f"input of {role}")
                entry = Site(site.module, "input")
                yield Place(row.label, what, entry, inner=i if moves else None, weight=weight)
            elif role not in INNER and {"query": row.query_norm, "key": row.key_norm}.get(role) is not None:
                divided = along
            yield Place(row.label, role, site, held.rows, divided, inner, weight)


def _ends(attached: Anatomy, *, along: bool, tied: nn.Module | None) -> Iterator[Place]:
    ends = attached.ends
    for norm in (ends.norm, ends.decoder_norm):
        if norm is not None:
            yield Place("embedding", "sum", Site(norm, "input"), stream=along)
    for norm in ends.final_norms:
        yield Place("after the last layer", "final norm", Site(norm, "output"))
    if tied is not None:  # not always the final norm
        yield Place("head", "norm", Site(tied, "output"))
    if ends.head is not None and isinstance(ends.head.holder, nn.Module):
        yield Place("head", "logits", Site(ends.head.holder, "output"))


def reads_bare(row: AttachedRow) -> bool:
    """Whether the branch reads the stream without a norm."""
    absent = (row.norm is None and not row.normed) or isinstance(row.norm, nn.Identity)
    return row.placement in ("res-post", "none") or (row.placement == "pre" and absent)


def moves_inner(attached: Anatomy, row: AttachedRow) -> bool:
    """Whether a factor on values, or on up, comes out again after what is between them and the last map."""
    a = attached.mapping.architecture
    gated = not row.weights.keys().isdisjoint(("gate", "expert_gate")) and not ExpertsSettings.of(a).up_shift
    pairs, last = inner_maps(row), sum(ROLE[role].writes for role in row.weights)
    return (row.kind.attends or gated or a.activation == "relu") and bool(pairs) and len(pairs) == last


def inner_maps(row: AttachedRow) -> list[tuple[Held, Held]]:
    """The maps that make what is inside a branch and those that end it: values and output, up and down."""
    return [(row.weights[one], row.weights[last]) for one, last in INNER.items() if {one, last} <= row.weights.keys()]


def largest(attached: Anatomy, places: Sequence[Place], arguments: Dictionary[str, Any]) -> tuple[list[float], Tensor]:
    """The largest |activation| at every place, and the first output, of one forward pass in evaluation mode."""
    seen = [0.0] * len(places)
    hooked = [index for index, place in enumerate(places) if place.weight is None]
    held = list({id(place.weight): place.weight for place in places if place.weight is not None}.values())

    def look(index: int, x: Tensor | None) -> None:
        if x is not None and x.numel():
            rows = places[index].rows
            top = float((x if rows is None else x[..., rows]).detach().abs().amax())
            seen[index] = max(seen[index], top) if top == top else math.inf

    def beside(side: str, number: int, x: Tensor) -> None:
        for index, place in enumerate(places):
            if place.weight is held[number] and place.site.side == side:
                look(index, x)

    hooks = Hooks()
    hooks.sites([places[index].site for index in hooked], lambda number, x: look(hooked[number], x))
    products = Products(held, partial(beside, "input"), partial(beside, "output"))
    with evaluating(attached.model), torch.no_grad(), hooks, products if held else nullcontext():
        output = logits_of(output_of(attached.outer, arguments))
    for place, value in zip(places, seen, strict=True):
        if value == math.inf:
            raise InputError(
                f"{place.where}: {place.what} is not finite in the model's type; give the model in float32"
            )
    return seen, output

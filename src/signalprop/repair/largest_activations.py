"""The largest |activation| at every place of a model that a factor could move, and at those that none can."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.attachment.attached import Attached, AttachedRow, Held
from signalprop.attachment.live_model import evaluating
from signalprop.errors import InputError
from signalprop.hooks import Hooks, Site, first_tensor
from signalprop.network.kinds import ROLE

# Who divides by what: of attention and cross-attention, and of feed-forwards.
INNER = {"value": "output", "up": "down"}


@dataclass(frozen=True)
class Place:
    """A tensor of the forward pass.

    Attributes:
        where: `layer 3 attention`. what: `stream`, `branch`, `norm`, or the role whose output it is (`mixed values` and
            `hidden`: what the output and down maps read).
        site, rows: where it is seen, and the features there (None: all).
        stream: the power of the stream's factor in it: -1, 0, or 1. inner: the sublayer whose inner factor divides it.
    """

    where: str
    what: str
    site: Site
    rows: slice | Sequence[int] | None = None
    stream: int = 0
    inner: int | None = None


def norm_of_tied_head(attached: Attached, arguments: Dictionary[str, Any]) -> nn.Module | None:
    """The norm whose output a head reads that shares its weight with the embedding; None where it has its own.

    Where something stands between them (a factor), the final norm.
    """
    ends, model = attached.ends, attached.model
    own: Any = getattr(model, "get_output_embeddings", lambda: None)()
    head = own if ends.head is None else ends.head.holder
    if not any(getattr(head, "weight", head) is table.weight for table in ends.tables):
        return None
    made: dict[int, tuple[nn.Module, Any]] = {}
    read: list[Any] = []
    hooks = Hooks(attached.outer)
    for norm in model.modules():
        if "norm" in type(norm).__name__.lower():
            hooks.after(norm, lambda norm, args, kwargs, output: made.update({id(output): (norm, output)}))
    if isinstance(head, nn.Module):
        hooks.before(head, lambda _, args, kwargs: read.extend((*args, *kwargs.values())[:1]))
    with evaluating(model), torch.no_grad(), hooks:
        attached.outer(**arguments)
    found = made.get(id(read[-1])) if read else None
    return ends.final_norm if found is None else found[0]


def places_of(attached: Attached, *, along: bool, tied: nn.Module | None) -> list[Place]:
    """Every place that is watched, each once.

    Args:
        along: what the norms of branches, queries and keys read is divided with the stream. tied: the norm whose output
            is multiplied, for a head that shares its weight with the embedding.
    """
    found: dict[tuple[Any, ...], Place] = {}
    for place in (*_rows(attached, along=along), *_ends(attached, along=along, tied=tied)):
        site = place.site
        found.setdefault((id(site.module), site.side, site.call, str(place.rows)), place)
    return list(found.values())


def _rows(attached: Attached, *, along: bool) -> Iterator[Place]:
    plan = attached.plan
    for i, row in enumerate(attached.rows):
        stream = {"stream_in": "stream", "branch": "branch", "stream_out": "stream"}
        for column, what in stream.items():
            index = getattr(plan, column)[i]
            if index >= 0:
                yield Place(row.label, what, plan.sites[index], stream=-1)
        yield Place(row.label, "norm", Site(_module(row.norm), "output"))
        moves = moves_inner(attached, row)
        for role, held in row.weights.items():
            if held.copies:  # no module sees what one expert makes
                continue
            site, power, inner = Site(_module(held.holder), "output"), 0, None
            if ROLE[role].writes:
                power = -1 if along or row.placement == "pre" else 0
                what = {"output": "mixed values", "down": "hidden"}.get(role, f"input of {role}")
                yield Place(row.label, what, Site(site.module, "input"), inner=i if moves else None)
            elif role in INNER:
                inner = i if moves else None
            elif {"query": row.query_norm, "key": row.key_norm}.get(role) is not None:
                power = -1 if along else 0
            yield Place(row.label, role, site, held.rows, power, inner)


def _ends(attached: Attached, *, along: bool, tied: nn.Module | None) -> Iterator[Place]:
    ends = attached.ends
    for norm in (ends.norm, ends.decoder_norm):
        if norm is not None:
            yield Place("embedding", "sum", Site(norm, "input"), stream=-1 if along else 0)
    for norm in ends.final_norms:
        yield Place("after the last layer", "final norm", Site(norm, "output"), stream=int(norm is tied))
    if tied is not None:  # not always the final norm
        yield Place("head", "norm", Site(tied, "output"), stream=1)
    if ends.head is not None and isinstance(ends.head.holder, nn.Module):
        yield Place("head", "logits", Site(ends.head.holder, "output"))


def moves_inner(attached: Attached, row: AttachedRow) -> bool:
    """Whether a factor on values, or on up, comes out again after what is between them and the last map."""
    linear = row.kind.attends or "gate" in row.weights or attached.mapping.architecture.activation == "relu"
    return linear and all(isinstance(found, Held) for found in inner_maps(row))


def inner_maps(row: AttachedRow) -> tuple[Held | None, Held | None]:
    """The maps that make what is inside a branch and that end it: values and output, up and down."""
    first = "value" if row.kind.attends else "up"
    return row.weights.get(first), row.weights.get(INNER[first])


def _module(found: Any) -> nn.Module:
    if not isinstance(found, nn.Module):
        raise InputError("fit needs norms and weights that modules hold; the mapping names a bare parameter or none")
    return found


def largest(
    attached: Attached, places: Sequence[Place], arguments: Dictionary[str, Any]
) -> tuple[list[float], Tensor | None]:
    """The largest |activation| at every place, and the first output, of one forward pass in evaluation mode.

    Raises:
        InputError: one is not finite in the model's own type.
    """
    sites: dict[tuple[int, str, int], Site] = {}
    groups: dict[tuple[int, str, int], list[int]] = {}
    for index, place in enumerate(places):
        key = (id(place.site.module), place.site.side, place.site.call)
        sites.setdefault(key, place.site)
        groups.setdefault(key, []).append(index)
    at = list(groups.values())
    seen = [0.0] * len(places)

    def see(number: int, x: Tensor | None) -> None:
        for index in at[number] if x is not None and x.numel() else ():
            rows = places[index].rows
            part = x if rows is None else x[..., rows]  # type: ignore[index]
            top = float(part.detach().abs().amax())  # type: ignore[union-attr]
            seen[index] = max(seen[index], top) if top == top else math.inf

    hooks = Hooks(attached.outer)
    hooks.sites(list(sites.values()), see)
    with evaluating(attached.model), torch.no_grad(), hooks:
        output = first_tensor(attached.outer(**arguments))
    for place, value in zip(places, seen, strict=True):
        if value == math.inf:
            raise InputError(
                f"{place.where}: {place.what} is not finite in the model's own type; give the model in float32"
            )
    return seen, output

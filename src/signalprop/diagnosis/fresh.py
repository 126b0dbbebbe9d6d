"""A model with fresh weights: compared with its initialiser, and which sublayers a gradient reaches."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from signalprop.attachment.anatomy import Anatomy, require_roles
from signalprop.data.batches import Batch
from signalprop.diagnosis.whole_model_values import Fresh, Off, Reached
from signalprop.errors import InputError
from signalprop.measurement.losses import lent_gradients, loss_of
from signalprop.measurement.measuring import arguments_of
from signalprop.repair.check_result import Row
from signalprop.repair.checks import check_attached
from signalprop.schemes import scheme


def fresh_of(attached: Anatomy, batch: Batch, *, backward: bool) -> Fresh:
    """What deviates from the family's initialiser, and the sublayers that add nothing.

    Args:
        attached: a model whose weights are fresh. batch: a short text.
        backward: run a backward pass too, for `Fresh.reached`.
    """
    off: tuple[Off, ...] = ()
    note = ""
    try:
        known = require_roles(attached)
        wanted = scheme("huggingface")(known.mapping.architecture)
        off = tuple(_grouped(check_attached(known, wanted).wrong))
    except InputError as error:
        note = str(error)
    return Fresh(off=off, reached=_reached(attached, batch) if backward else (), not_checked=note)


def _grouped(rows: Iterable[Row]) -> list[Off]:
    """The rows that are wrong, those of one role together."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.kind or row.place, row.name), []).append(row)
    out = []
    for (place, name), members in groups.items():
        first = members[0]
        layers = tuple(row.layer for row in members if row.layer is not None)
        zeros = all(row.measured == 0 for row in members)
        out.append(
            Off(
                place=place, name=name, layers=layers, wanted=first.wanted, measured=first.measured, zeros=zeros,
                paths=tuple(row.path for row in members[:1] if row.path),
            )
        )  # fmt: skip
    return out


def _reached(attached: Anatomy, batch: Batch) -> tuple[Reached, ...]:
    """Of every sublayer, how many of its norm's and maps' parameters get a gradient that is not 0."""
    parts: list[list[Tensor]] = []
    for row in attached.rows:
        held = row.tensors + [p for norm in (row.norm, row.post_norm) if norm is not None for p in norm.parameters()]
        parts.append(list({id(p): p for p in held}.values()))
    with torch.inference_mode(False), torch.enable_grad(), lent_gradients(attached.model):
        leaves = list({id(p): p for group in parts for p in group if p.requires_grad}.values())
        if not leaves:
            return ()
        loss = loss_of(attached.model(**arguments_of(attached, batch)), batch, None)
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
    alive = {id(p) for p, g in zip(leaves, found, strict=True) if g is not None and bool((g != 0).any())}
    return tuple(
        Reached(layer=row.layer, kind=row.kind.name, reached=sum(id(p) in alive for p in group), n=len(group))
        for row, group in zip(attached.rows, parts, strict=True)
    )

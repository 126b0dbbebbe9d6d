"""Multipliers in the initial weights, modules left alone: which parameter is multiplied with what."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from signalprop.attachment.attached import Attached, Held
from signalprop.errors import InputError
from signalprop.repair.plan import Plan
from signalprop.repair.record import Record
from signalprop.repair.surgery import needed
from signalprop.repair.undoing import all_or_nothing


def absorbed_factors(attached: Attached, plan: Plan, carriers: tuple[str, ...]) -> dict[str, float]:
    """What each parameter is multiplied with, by name, in absorbed mode."""
    factors: dict[str, float] = {}
    names = {id(q): name for name, q in attached.model.named_parameters()}

    def scale(owner: Any, factor: float, *, bias: bool = True) -> None:
        held = Held(owner)
        for tensor in (held.weight, held.bias if bias else None):
            if tensor is not None and factor != 1:
                factors[names[id(tensor)]] = factors.get(names[id(tensor)], 1.0) * factor

    scaled: set[int] = set()
    for here, row, carrier in zip(attached.rows, plan.rows, carriers, strict=True):
        if attached.mapping.gain_offset and (row.norm_scale != 1 or here.placement in ("sandwich", "res-post")):
            raise InputError(
                f"{here.label}: gains here are 1 + weight, which no factor on the weight scales; use mode='gauge'"
            )
        several = here.kind.has_copies  # their carrier and reader is the branch, which has no weight
        for owner in here.holders(lambda role: role.writes) if several else [attached.model.get_submodule(carrier)]:
            scale(owner, row.scale)
        for reader in here.holders(lambda role: role.reads) if several else here.readers:
            scale(reader, row.input_scale, bias=False)
        if row.norm_scale != 1 and here.norm is not None and id(here.norm) not in scaled:
            if getattr(here.norm, "weight", None) is None:
                raise InputError(
                    f"{here.label}: its norm has no weight to absorb {row.norm_scale:.3g} into; use mode='gauge'"
                )
            scaled.add(id(here.norm))
            scale(here.norm, row.norm_scale)
        if row.score_ratio != 1:
            query = here.weights["query"]
            if query.rows is not None:
                raise InputError(
                    f"{here.label}: queries are fused with keys and values, so one weight would need two factors"
                )
            scale(query.holder if here.query_norm is None else here.query_norm, row.score_ratio)
    if plan.head_ratio != 1:
        scale(needed(attached.ends.head, "head").holder, plan.head_ratio, bias=False)
    if plan.embedding_ratio != 1:
        for table in attached.ends.tables:
            scale(table.holder, plan.embedding_ratio)
    return factors


def multiply_weights(model: nn.Module, record: Record) -> None:
    """All factors, or none of them where it is interrupted."""
    parameters = dict(model.named_parameters())
    with torch.no_grad(), all_or_nothing(model, [parameters[name] for name in record.factors]):
        for name, factor in record.factors.items():
            parameters[name].mul_(factor)

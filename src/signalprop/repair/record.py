"""What `apply` leaves on a model: the record of what it did, and the model in the Parametrization's units."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from signalprop.attachment.anatomy import Anatomy, attach
from signalprop.attachment.families import mapping_of
from signalprop.attachment.mapping import Mapping, find_any, number
from signalprop.attachment.rows import AttachedRow
from signalprop.errors import InputError
from signalprop.network.parametrization import Parametrization
from signalprop.repair.plan import Plan
from signalprop.repair.splices import refuse_adapters, restore


@dataclass
class Record:
    """What was done to a model.

    Attributes:
        parametrization: what the model now is.
        plan: what was done, row by row.
        mapping: of the vanilla model, where it was given by hand; None: that of the model or its family.
        changed: plain attributes that were set: (path of the module, attribute, value before).
        matched_eps: whether the epsilons of norms were rescaled with the stream.
        eps_error: bound on the relative change of a norm's output where they were not.
        ties: names of parameters that are one, per parameter: `to_empty` makes two of a tied one on the meta device.
        pending: the weights have not been drawn yet (the model was on the meta device).
        kept: the weights are those that the model had before; the scheme has drawn none.
        function_changed: how far logits on a small batch moved, in words, where something had been learnt; '' not.
    """

    parametrization: Parametrization
    plan: Plan
    mapping: Mapping | None = None
    changed: list[tuple[str, str, Any]] = field(default_factory=list)
    matched_eps: bool = False
    eps_error: float = 0.0
    ties: tuple[tuple[str, ...], ...] = ()
    pending: bool = False
    kept: bool = False
    function_changed: str = ""


def is_pretrained(model: type[nn.Module]) -> bool:
    """Whether it is a class of transformers' models."""
    return any(
        f"{cls.__module__}.{cls.__name__}" == "transformers.modeling_utils.PreTrainedModel" for cls in model.__mro__
    )


def take_off(model: nn.Module, record: Record) -> None:
    """Give a model and its modules their vanilla classes and attributes back; weights stay as they are."""
    for module in list(model.modules()):
        restore(module)
    for path, name, value in reversed(record.changed):
        setattr(find_any(model, path, "module"), name, value)


def record_of(model: nn.Module) -> Record | None:
    """The record of an applied model; None for a model that carries no scheme."""
    found: Record | None = getattr(model, "signalprop_record", None)
    return found


def the_record(model: nn.Module, *, drawn_before: str = "") -> Record:
    """The record of an applied model, whose weights have been drawn `drawn_before` something, in words."""
    record = record_of(model)
    if record is None:
        raise InputError(f"this {type(model).__name__} carries no scheme; expected a model after signalprop.apply")
    if record.pending and drawn_before:
        raise InputError(
            f"the weights have not been drawn yet; call signalprop.initialize(model) before {drawn_before}"
        )
    return record


def attached_vanilla(model: nn.Module) -> Anatomy:
    """An applied model as it was before, in the units of its code; raises where adapters would miss multipliers."""
    refuse_adapters(model)
    record = the_record(model)
    own = getattr(model, "signalprop_mapping", None)
    return attach(model, record.mapping or (own() if own is not None else mapping_of(model)))


def attached_applied(model: nn.Module) -> Anatomy:
    """An applied model in the units of the Parametrization: the same places, multipliers as they are now."""
    vanilla, record = attached_vanilla(model), the_record(model)
    mapping = replace(
        vanilla.mapping,
        architecture=record.parametrization.architecture,
        embedding=replace(
            vanilla.mapping.embedding, scale=vanilla.mapping.embedding.scale * record.plan.embedding_ratio
        ),
        head=replace(vanilla.mapping.head, scale=vanilla.mapping.head.scale * record.plan.head_ratio),
    )
    rows = tuple(_row(vanilla, record, i) for i in range(len(vanilla.rows)))
    return vanilla.but(described=mapping, changed=rows)


def _row(vanilla: Anatomy, record: Record, i: int) -> AttachedRow:
    row, p, done = vanilla.rows[i], record.parametrization, record.plan.rows[i]
    carrier, trained = row.ending, p.branch_trainable != "fixed"
    learnt = (number(v) if isinstance(v, Tensor) else 1.0 for v in (row.skip, row.multiplier))
    own = (1.0, 1.0) if record.kept else tuple(learnt)  # of weights that were kept, the table holds them
    return replace(
        row,
        carrier=carrier,
        skip=float(p.skip[i]) * own[0],
        multiplier=carrier.multiplier if trained else float(p.branch[i]) * own[1],
        norm_scale=done.norm_scale,
        units=(done.before, 1.0 if trained else 1 / done.scale, done.behind),
        score_scale=row.score_scale * done.score_ratio,
        **({"branch": carrier.point, "call": 0, "calls": 1} if trained else {}),
    )

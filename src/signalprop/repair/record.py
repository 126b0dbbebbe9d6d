"""What `apply` leaves on a model: the record of what it did, and the mapping in the Parametrization's units."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from signalprop.attachment.attached import Attached, attach
from signalprop.attachment.families import mapping_for, mapping_of
from signalprop.attachment.mapping import Mapping, SublayerMap, find_any, number
from signalprop.errors import InputError
from signalprop.network.parametrization import Parametrization
from signalprop.repair.plan import Plan
from signalprop.repair.splices import Splice, refuse_adapters, restore


@dataclass
class Record:
    """What was done to a model.

    Attributes:
        parametrization: what the model now is.
        plan: what was done, row by row.
        carriers: path of every row's carrier in the model.
        mapping: of the vanilla model, where it was given by hand; None: the model's own, or its family's.
        changed: plain attributes that were set: (path of the module, attribute, value before).
        added: paths of parameters that the vanilla model does not have.
        matched_eps: whether the epsilons of norms were rescaled with the stream.
        eps_error: bound on the relative change of a norm's output where they were not.
        ties: names of parameters that are one, per parameter: `to_empty` makes two of a tied one on the meta device.
        pending: the weights have not been drawn yet (the model was on the meta device).
        kept: the weights are those that the model had before; the scheme has drawn none.
        function_changed: how far logits on a small batch moved, in words, where something had been learnt; '' not.
    """

    parametrization: Parametrization
    plan: Plan
    carriers: tuple[str, ...]
    mapping: Mapping | None = None
    changed: list[tuple[str, str, Any]] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
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
    """Give all modules inside a model their vanilla classes and attributes back; weights stay as they are."""
    for module in list(model.modules()):
        if module is not model:
            restore(module)
    for path, name, value in reversed(record.changed):
        setattr(find_any(model, path, "module"), name, value)


def record_of(model: nn.Module) -> Record | None:
    """The record of an applied model; None for a model that carries no scheme."""
    found: Record | None = getattr(model, "signalprop_record", None)
    return found


def the_record(model: nn.Module) -> Record:
    """The record of an applied model."""
    record = record_of(model)
    if record is None:
        raise InputError(f"this {type(model).__name__} carries no scheme; expected a model after signalprop.apply")
    return record


def vanilla_mapping(model: nn.Module) -> Mapping:
    """The mapping of a model as it was before a scheme was applied."""
    record = record_of(model)
    if record is None:
        return mapping_for(model, None)
    if record.mapping is not None:
        return record.mapping
    own = getattr(model._vanilla, "signalprop_mapping", None) if isinstance(model, Splice) else None
    return own(model) if own is not None else mapping_of(model)


def attached_vanilla(model: nn.Module) -> Attached:
    """A model with its mapping as it was before a scheme was applied; raises where adapters would miss multipliers."""
    refuse_adapters(model)
    return attach(model, vanilla_mapping(model))


def applied_mapping(attached: Attached, record: Record) -> Mapping:
    """The mapping of an applied model: the same places, multipliers as they are now, streams in paper units.

    Args:
        attached: the model by its vanilla mapping.
    """
    p, vanilla = record.parametrization, attached.mapping
    return replace(
        vanilla,
        architecture=p.architecture,
        sublayers=[_row(attached, item, record, i) for i, item in enumerate(vanilla.sublayers)],
        embedding=replace(vanilla.embedding, scale=vanilla.embedding.scale * record.plan.embedding_ratio),
        head=replace(vanilla.head, scale=vanilla.head.scale * record.plan.head_ratio),
    )


def _row(attached: Attached, item: SublayerMap, record: Record, i: int) -> SublayerMap:
    p, done, path = record.parametrization, record.plan.rows[i], record.carriers[i]
    carrier: Any = attached.model.get_submodule(path)
    rewired = done.treatment == "rewired"
    trained = (number(v) if isinstance(v, Tensor) else 1.0 for v in (item.skip, item.multiplier))
    own = (1.0, 1.0) if record.kept else tuple(trained)  # of weights that were kept, the table holds them
    changes: dict[str, Any] = {
        "skip": carrier.skip if p.skip_trainable != "fixed" and rewired else float(p.skip[i]) * own[0],
        "multiplier": carrier.multiplier if rewired else float(p.branch[i]) * own[1],
        "norm_scale": done.norm_scale,
        "units": (done.before, 1.0 if rewired else 1 / done.scale, done.behind),
    }
    if done.score_ratio != 1:
        changes["score_scale"] = attached.rows[i].score_scale * done.score_ratio
    if rewired:
        changes |= {"branch": f"{path}.point", "call": 0, "calls": 1}
    return replace(item, **changes)

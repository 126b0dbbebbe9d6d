"""`check`: does a model carry the initial weights and the multipliers that a scheme asks for?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.attachment.anatomy import Anatomy, attach, require_roles
from signalprop.attachment.arguments import statistics_in
from signalprop.attachment.mapping import Mapping, SublayerMap
from signalprop.attachment.parameters_by_role import Part, walk
from signalprop.attachment.parametrization_of import SHAPE, multipliers_of, trainable
from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.hooks import whole
from signalprop.network.inputs import InputStatistics
from signalprop.network.layer_inputs import changed
from signalprop.network.layout import PLACEMENTS
from signalprop.network.parametrization import Parametrization, Shaping
from signalprop.repair.check_result import Check, Row
from signalprop.repair.goodness_of_fit import SMALLEST, fault, sample, standard_error
from signalprop.repair.plan import check_shape
from signalprop.repair.record import Record, record_of
from signalprop.results.text import ranges
from signalprop.schemes import Scheme
from signalprop.schemes import scheme as scheme_of
from signalprop.streams.live_model import weights_here
from signalprop.streams.proof import gain_and_bias

FALSE_ALARM = 1e-4  # chance that a right model fails
_EXACT = 1e-6  # relative, of multipliers that Python or float32 holds: a product of a few float32 numbers


@typed
def check(
    model: nn.Module | Anatomy,
    scheme: str | Scheme | Parametrization | None = None,
    *,
    mapping: Mapping | None = None,
    inputs: Any = None,
    **options: Any,
) -> Check:
    """Compare the weights and multipliers that a model really has with those that a scheme asks for.

    Of drawn weights, the standard deviation is tested against the scatter of as many draws (chi-squared, with the
    degrees of freedom that the distribution's kurtosis gives), and the mean against its standard error. The bounds let
    one correct model in 10,000 fail, whatever its number of weights. Differences below 0.1 % never fail. Zeros, gains
    and multipliers are compared directly. Fused maps are taken apart by rows. A tied head is the token table.

    Parameters that no scheme sets fail only if they are not finite.

    A model that carries a scheme (`signalprop.apply`) is checked in the units of the Parametrization, with the
    multipliers that its modules have now. Learning rates belong to the optimizer and are not checked, nor are weights
    that `apply` kept. Gains and multipliers in tensors may differ by the rounding of the tensor's type, and of the one
    that the checkpoint keeps.

    Args:
        scheme: a name (with `options`), a Scheme, or a Parametrization; None: the scheme that the model carries.
        mapping: for a model that signalprop cannot read.
        inputs: what the model is called with, as `measure` takes it; or InputStatistics, for schemes that depend on
            them (default: those of its tokens, else Zipf's law).

    Raises:
        InputError: unknown scheme, family or option; no scheme given, and none applied; a parametrization of another
            shape; weights on the meta device.
    """
    attached = require_roles(attach(model, mapping, inputs))
    mapping = attached.mapping
    statistics = statistics_in(mapping, inputs, attached.arguments)
    table = _table(scheme, options, mapping, record_of(attached.model), statistics)
    check_shape(mapping.architecture, table.architecture)
    return check_attached(attached, table)


def check_attached(attached: Anatomy, table: Parametrization) -> Check:
    """As `check`, of a model that is attached, with what its weights are, and a table of its shape."""
    model, record = attached.model, record_of(attached.model)
    with weights_here(model):
        found, others = _entries(attached, table)
        kept = record is not None and record.kept
        if kept:
            found = [item for item in found if item.tensor is not None and not bool(item.tensor.isfinite().all())]
            others = []
        drawn = sum(item.part.std > 0 for item in found)
        deviations = NormalDist().inv_cdf(1 - FALSE_ALARM / (4 * max(1, drawn)))  # two sides, of deviation and of mean
        coarsest = _coarsest(model)
        rows = [(item.part.row, _judged(attached, item, deviations, coarsest)) for item in found]
        rows += _multipliers(attached, table, record, coarsest)
        rows += _not_finite(attached, others)
        last = len(attached.rows)
        rows.sort(key=lambda item: (-1 if item[1].place == "embedding" else last) if item[0] is None else item[0])
        notes = []
        if kept:
            kept_ones = "the weights, which `apply` kept"
            notes.append(f"only multipliers were checked, not {kept_ones}")
        if others:
            more = f" and {len(others) - 6} more" if len(others) > 6 else ""
            notes.append(f"not checked, since no scheme sets them: {', '.join(others[:6])}{more}")
        if any((column != 1).any() for column in table.learning_rates.values()):
            notes.append("not checked, since a model does not hold them: the scheme's learning rates")
        if (read := attached.mapping.architecture.layer_inputs) is not None:
            layers = ranges(list(changed(read)))
            notes.append(f"layers {layers} read earlier streams too, which no scheme is derived for: see predict")
        name = type(model).__name__
        return Check(table.scheme, dict(table.options), name, tuple(row for _, row in rows), deviations, tuple(notes))


def _table(
    scheme: str | Scheme | Parametrization | None,
    options: dict[str, Any],
    mapping: Mapping,
    record: Record | None,
    inputs: InputStatistics | None,
) -> Parametrization:
    """The numbers that are asked for."""
    applied = None if record is None else record.parametrization
    if scheme is None:
        if applied is None or options:
            raise InputError(f"{'options are of a scheme' if options else 'the model carries no scheme'}; name one")
        return applied
    chosen = scheme_of(scheme, **options) if isinstance(scheme, str) else scheme
    if isinstance(chosen, Parametrization):
        chosen.rows()  # refuses a sweep
        return chosen
    if applied is not None and hasattr(chosen, "profiled") and applied.scheme == chosen.name:
        return applied  # it was measured on a batch that nobody has any more
    return chosen(mapping.architecture, inputs)


@dataclass(frozen=True)
class _Entry:
    """A role, with the numbers that play it.

    Attributes:
        path: the parameter's name in the model.
        tensor: of a fused map only the role's rows; None if there is none. twice: the role that has them already.
    """

    part: Part
    path: str = ""
    tensor: Tensor | None = None
    twice: str = ""


def _entries(attached: Anatomy, p: Parametrization) -> tuple[list[_Entry], list[str]]:
    """Every role that a scheme is checked by, and the names of the parameters that no role speaks of."""
    names = {id(tensor): name for name, tensor in attached.model.named_parameters()}
    scores = [norm for row in attached.rows for norm in (row.query_norm, row.key_norm) if norm is not None]
    # the gains of these are part of the score scale
    taken: dict[int, list[Part]] = {id(gain_and_bias(norm)[0]): [] for norm in scores}
    found: list[_Entry] = []
    for part in walk(attached, p):
        if not part.checked:
            continue
        if part.tensor is None:
            found.append(_Entry(part))
            continue
        if part.tensor.is_meta:
            raise InputError(
                f"{part.where} {part.name}: the parameter is on the meta device and holds no numbers; load or "
                "initialise the model first"
            )
        before = taken.setdefault(id(part.tensor), [])
        if part.role == "norm" and any(other.role == "norm" for other in before):
            continue  # one norm that two branches read
        chosen = part.outputs
        twice = next((f"{other.where} {other.name}" for other in before if (other.outputs & chosen).any()), "")
        before.append(part)
        if part.padding is not None and chosen.size > 1:
            chosen[part.padding] = False
        tensor = whole(part.tensor)
        if not chosen.all():
            tensor = part.of(tensor, chosen)
        path = names.get(id(part.tensor), "")
        found.append(_Entry(part, path, tensor, twice))
    return found, [name for name, tensor in attached.model.named_parameters() if id(tensor) not in taken]


def _place(attached: Anatomy, i: int | None, end: str = "") -> dict[str, Any]:
    """The first fields of a Row, of a sublayer or an `end`."""
    if i is None:
        return {"place": end, "stack": None, "layer": None, "kind": None}
    row = attached.rows[i]
    return {"place": row.label, "stack": row.stack, "layer": row.layer, "kind": row.kind.name}


def _coarsest(model: nn.Module) -> float:
    """The largest epsilon of the types that the model's numbers have or, in its checkpoint, had."""
    kept = str(getattr(getattr(model, "config", None), "dtype", None)).removeprefix("torch.")
    types = {q.dtype for q in model.parameters()}
    types |= {dtype for dtype in [getattr(torch, kept, None)] if isinstance(dtype, torch.dtype)}
    return max((torch.finfo(dtype).eps for dtype in types if dtype.is_floating_point), default=0.0)


def _judged(attached: Anatomy, item: _Entry, deviations: float, coarsest: float) -> Row:
    part = item.part
    offset, shape = part.offset, part.distribution
    wanted = part.std if part.constant is None else part.constant + offset
    row = _place(attached, part.row, part.where) | {"name": part.name, "path": item.path, "wanted": wanted}
    if item.tensor is None:
        return Row(**row, entries=0, verdict="missing", note=part.problem)
    seen = sample(item.tensor)
    row |= {"entries": seen.n, "mean": seen.mean + offset, "kurtosis": seen.kurtosis, "measured": seen.std}
    if not math.isfinite(seen.std):
        row |= {"mean": None, "kurtosis": None, "measured": None}
        return Row(**row, verdict="off", note="NaN or infinite numbers")
    if part.constant is None:
        row["standard_error"] = standard_error(seen, shape)
        note = fault(seen, wanted, shape, deviations)
    else:
        row["measured"] = measured = math.copysign(math.hypot(seen.mean + offset, seen.std), seen.mean + offset)
        tolerance = max(SMALLEST, coarsest) * (abs(wanted) + abs(offset))
        uneven = f"not all equal: they scatter by {seen.std:.3g}" if seen.n > 1 and seen.std > tolerance else ""
        note = f"expected {wanted:.4g} everywhere" if abs(measured - wanted) > tolerance else uneven
    if item.twice:
        return Row(**row, verdict="twice", note=f"the same numbers as {item.twice}")
    return Row(**row, verdict="off" if note else "ok", note=note)


def _not_finite(attached: Anatomy, names: Sequence[str]) -> list[tuple[int | None, Row]]:
    """(sublayer, row) of every parameter that no role speaks of and that holds NaN or infinite numbers.

    A_log of -inf, say: a recurrence whose rates were drawn from 0 on in half precision (transformers 47831).
    """
    of = {id(q): i for i, row in enumerate(attached.rows) for q in row.branch.parameters()}
    rows: list[tuple[int | None, Row]] = []
    for name in names:
        q = attached.model.get_parameter(name)
        if not bool(q.isfinite().all()):
            place = _place(attached, of.get(id(q)), name) | {"name": name.rpartition(".")[2], "path": name}
            rows.append((of.get(id(q)), Row(**place, verdict="off", note="NaN or infinite numbers")))
    return rows


# --- multipliers ---------------------------------------------------------------------------------------------


def _multipliers(
    attached: Anatomy, p: Parametrization, record: Record | None, coarsest: float
) -> list[tuple[int | None, Row]]:
    """(sublayer, row) of every multiplier, placement and end."""
    rows: list[tuple[int | None, Row]] = []
    mapping, a = attached.mapping, attached.mapping.architecture

    def put(row: int | None, place: str, name: str, wanted: float, measured: float, roundings: int = 0) -> None:
        # rounding to a type changes a number by half of its epsilon at most, relatively
        tolerance = _EXACT + roundings * coarsest / 2
        same = math.isclose(wanted, measured, rel_tol=tolerance, abs_tol=1e-12)
        where, verdict = _place(attached, row, place), "ok" if same else "off"
        rows.append((row, Row(**where | {"name": name, "wanted": wanted, "measured": measured, "verdict": verdict})))

    def differ(row: int | None, name: str, mine: str, theirs: str) -> None:
        if mine != theirs:
            note = f"the model has {mine}, the scheme {theirs}"
            rows.append((row, Row(**_place(attached, row, "head"), name=name, verdict="off", note=note)))

    shaped = mapping.shaping.kind != "none"
    for i, here in enumerate(attached.rows):
        kind = here.kind
        names = ["branch", "norm_scale"] if p.parallel[i] else ["skip", "branch", "norm_scale"]
        names += ["value_skip", "attention_gain", "score_scale"] if kind.attends else []
        names += SHAPE if kind.attends_itself and (shaped or p.shaping.kind != "none") else []
        now = _now(attached, record, i)
        for name in names:
            put(i, "", name, float(getattr(p, name)[i]), now[name], _roundings(here, name))
        if kind.activates:
            differ(i, "activation", a.activation, p.architecture.activation)
        differ(i, "norm placement", here.placement, PLACEMENTS[p.placement[i]])
    put(None, "embedding", "scale", p.embedding.scale, mapping.embedding.scale)
    if a.head != "none":
        put(None, "head", "scale", p.head.scale, mapping.head.scale)
    differ(None, "shaping of attention", _said(mapping.shaping), _said(p.shaping))
    differ(None, "branch multipliers", trainable([item.multiplier for item in attached.rows]), p.branch_trainable)
    differ(None, "skip multipliers", trainable([item.skip for item in attached.rows]), p.skip_trainable)
    yes_no = {True: "a final norm", False: "no final norm"}
    differ(None, "final norm", yes_no[a.has_final_norm], yes_no[p.architecture.has_final_norm])
    return rows


def _now(attached: Anatomy, record: Record | None, i: int) -> dict[str, float]:
    """The multipliers of a sublayer as the model has them now."""
    row = attached.rows[i]
    out = multipliers_of(row, attached.mapping.gain_offset, now=True)
    if record is None:
        return out
    # as the modules hold them: something that wrapped or replaced one may have lost its multiplier
    plan, carrier, norm = record.plan.rows[i], row.ending, row.norm
    if record.parametrization.branch_trainable == "fixed":
        installed = plan.scale * (plan.norm_scale if norm is carrier else 1.0)
        out["branch"] *= float(getattr(carrier, "branch_scale", 1.0)) / installed
    if norm is not None and norm is not carrier:
        out["norm_scale"] = float(getattr(norm, "branch_scale", 1.0))
    return out


def _roundings(item: SublayerMap, name: str) -> int:
    """How many numbers of tensors, each rounded to its type, are multiplied in one of a sublayer's multipliers."""
    if name == "score_scale":
        return sum(norm is not None for norm in (item.query_norm, item.key_norm))
    return int(isinstance(getattr(item, {"branch": "multiplier"}.get(name, name), None), torch.Tensor))


def _said(shaping: Shaping) -> str:
    """How attention is shaped, in words."""
    return " ".join(f"{name} {value}" for name, value in shaping.model_dump(exclude_defaults=True).items()) or "none"

"""`apply`: make a model that exists compute what a scheme asks for, in place, without touching its forward code."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping as Dictionary
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from signalprop.attachment.families import mapping_for
from signalprop.attachment.live_model import unwrapped
from signalprop.attachment.mapping import Mapping, SublayerMap, describe, find, find_any, number, reading_maps, split
from signalprop.attachment.parametrization_of import rms, tensors_of
from signalprop.data.batches import Batch
from signalprop.errors import InputError
from signalprop.measurement.measuring import measure
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics
from signalprop.network.layout import PLACEMENTS, layout
from signalprop.network.parametrization import Embedding, Parametrization
from signalprop.repair.initialisation import draw_table, draw_weights, set_gain, ties
from signalprop.repair.module_swaps import splice
from signalprop.repair.plan import Plan, RowPlan, make_plan
from signalprop.repair.record import (
    Record,
    applied_mixin,
    carrier_of,
    dropout_of,
    path_of,
    reader_of,
    record_of,
    take_off,
)
from signalprop.repair.shaped_models import (
    replace_activation,
    set_implementation,
    shape_attention,
    shapes_of,
)
from signalprop.repair.sites import confirm
from signalprop.repair.spliced_modules import Emitting, Mixing, Multiplied, Passed, Passing, Placed, Reading, Rewired
from signalprop.repair.tape import on_meta
from signalprop.schemes import Scheme
from signalprop.schemes import scheme as scheme_of

Mode = Literal["gauge", "absorbed"]


def apply(
    model: nn.Module,
    scheme: str | Scheme | Parametrization,
    *,
    data: Batch | Dictionary[str, Any] | None = None,
    inputs: InputStatistics | None = None,
    initialize: bool = True,
    mode: Mode = "gauge",
    match_eps: bool = False,
    seed: int | None = None,
    mapping: Mapping | None = None,
    **options: Any,
) -> Parametrization:
    """Make a model compute, and start at, what a scheme asks for. In place; its forward code stays as it is.

    Skip and branch multipliers become numbers on the last map of each branch (docs/theory/gauge.md): exact up to the
    epsilon of norms, neutral to every optimizer, no new state-dict keys except trainable multipliers and added norms.
    `fold` multiplies them into the weights again. On the meta device the multipliers are installed and
    `signalprop.initialize(model)` draws the weights after `to_empty`.

    Args:
        model: a supported Hugging Face model, one with `signalprop_mapping()`, or any with `mapping`.
        scheme: name, scheme, or the very numbers. options: of a scheme given by name.
        data: a batch (or the model's arguments) for schemes that profile the model (ADMIN); a `Batch` also gives the
            statistics of the input. inputs: those statistics (default: Zipf's law, or of the batch).
        initialize: draw the weights anew. False keeps them and only installs multipliers.
        mode: `gauge`; or `absorbed`, which multiplies everything into the initial weights and leaves the modules alone:
            train with the groups of `signalprop.parameter_groups`, whose learning rates make up for it (exact for AdamW
            and SGD until gradients are clipped by their global norm).
        match_eps: rescale the epsilons of norms with the stream, in memory, which makes the gauge exact; a folded
            checkpoint cannot keep that, since a config has one epsilon.
        seed: of the draws; the same seed gives the weights of `build(parametrization, seed=seed)`.

    Returns:
        The Parametrization that the model now has.

    Raises:
        InputError: a scheme was applied before, an unknown family, a sublayer that is not what the mapping says, a
            parametrization of another shape, or something that the model's forward code cannot be made to compute.
    """
    model = unwrapped(model)
    if record_of(model) is not None:
        raise InputError(
            f"this model already carries scheme {record_of(model).parametrization.scheme!r}; "  # type: ignore[union-attr]
            "fold(model) first, or load it again"
        )
    if mode not in ("gauge", "absorbed"):
        raise InputError(f"mode is {mode!r}; expected 'gauge' or 'absorbed'")
    if mode == "absorbed" and match_eps:
        raise InputError("match_eps changes norms, and mode='absorbed' leaves modules alone; choose one of the two")
    by_hand = mapping
    mapping = mapping_for(model, mapping)
    _refuse_multipliers(mapping)
    without_numbers = on_meta(model)
    if not without_numbers:
        confirm(model, mapping, data if isinstance(data, dict) else None)
    chosen = scheme_of(scheme, **options) if isinstance(scheme, str) else scheme
    if isinstance(data, Batch) and inputs is None:
        inputs = data.statistics(mapping.architecture)
    if data is not None and hasattr(chosen, "profiled"):
        chosen = _profiled(model, mapping, chosen, data, inputs, seed)
    table = chosen if isinstance(chosen, Parametrization) else chosen(mapping.architecture, inputs)
    table = with_fixed_positions(model, mapping, table)
    record = install(model, mapping, table, mode=mode, match_eps=match_eps, by_hand=by_hand)
    record.pending = without_numbers and initialize
    record.kept = not initialize
    if initialize and not without_numbers:
        draw_weights(model, record, seed)
    elif mode == "absorbed" and not without_numbers:
        _multiply_weights(model, record)
    return table


def install(
    model: nn.Module, mapping: Mapping, table: Parametrization, *, mode: str, match_eps: bool, by_hand: Mapping | None
) -> Record:
    """Install the multipliers of a Parametrization, and the record, in a vanilla model; weights stay as they are.

    Args:
        mapping: of the model. by_hand: the same, where it was given by hand.

    Raises:
        InputError: as `apply`; the model is then as it was.
    """
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    plan = make_plan(mapping, table, dtype=dtype, mode=mode)
    rows = layout(mapping.architecture)
    carriers = tuple(
        path_of(model, carrier_of(item, _left(rows.placement[i], table.placement[i])), f"{describe(rows, i)} carrier")
        for i, item in enumerate(mapping.sublayers)
    )
    record = Record(table, mode, plan, carriers, by_hand, matched_eps=match_eps)
    record.ties = ties(model)
    record.eps_error = 0.0 if match_eps else eps_bound(mapping.architecture, table, plan)
    if mode == "absorbed":
        record.factors = absorbed_factors(model, mapping, plan, carriers)
    else:
        try:
            _Surgeon(model, mapping, table, record).operate(match_eps)
        except BaseException:
            take_off(model, record)
            raise
    splice(model, applied_mixin(type(model)), signalprop_record=record)
    return record


def with_fixed_positions(model: nn.Module, mapping: Mapping, table: Parametrization) -> Parametrization:
    """The table with the root mean square of positions that the model computes or keeps, and no scheme can draw."""
    tables, e = mapping.embedding, table.embedding
    fixed: dict[str, float] = {}
    for name, reference in (("position", tables.position), ("decoder_position", tables.decoder_position)):
        if isinstance(reference, (int, float)):
            fixed[name] = float(reference)
        elif reference is not None:
            values, _ = tensors_of(model, reference, "positions")
            if not values.requires_grad:  # sines and cosines, whose squares add up to 1
                fixed[name] = math.sqrt(0.5) / tables.scale if values.is_meta else rms(values, "positions")
    if not fixed:
        return table
    if mapping.architecture.kind == "encoder-decoder":
        fixed.setdefault("decoder_position", e.position_of(decoder=True))
    return replace(table, embedding=Embedding(**e.model_dump() | fixed))


def _left(before: int, now: int) -> str:
    """The placement that says where a branch ends: where its norm is taken out, it ends before it."""
    return PLACEMENTS[now] if PLACEMENTS[now] == "none" else PLACEMENTS[before]


def _refuse_multipliers(mapping: Mapping) -> None:
    for i, item in enumerate(mapping.sublayers):
        if number(item.skip) != 1 or number(item.multiplier) != 1 or item.norm_scale != 1:
            raise InputError(
                f"{describe(layout(mapping.architecture), i)} has multipliers of its own (skip "
                f"{number(item.skip):.3g}, branch {number(item.multiplier):.3g}); apply needs a model without"
            )


def _profiled(
    model: nn.Module, mapping: Mapping, chosen: Any, data: Any, inputs: InputStatistics | None, seed: int | None
) -> Any:
    """A scheme with the branch variances that its profiling pass measures on the model.

    The pass runs the model as the scheme initialises it, every multiplier 1; weights are put back afterwards.
    """
    if on_meta(model):
        raise InputError(f"scheme {chosen.name!r} profiles the model, which is on the meta device; leave out data=")
    table = chosen.profiling(mapping.architecture)
    if not (table.placement == layout(mapping.architecture).placement).all():
        raise InputError(f"scheme {chosen.name!r} profiles a model with its own norm placement; leave out data=")
    kept = {name: q.detach().clone() for name, q in model.named_parameters()}
    training = model.training
    try:
        draw_table(model, mapping, table, 0 if seed is None else seed)
        profile = measure(model.eval(), data, mapping=mapping, backward=False)
    finally:
        model.train(training)
        with torch.no_grad():
            for name, q in model.named_parameters():
                q.copy_(kept[name])
    return chosen.profiled(profile)


class _Surgeon:
    """Does what a plan says, module by module."""

    def __init__(self, model: nn.Module, mapping: Mapping, table: Parametrization, record: Record) -> None:
        self.model, self.mapping, self.table, self.record = model, mapping, table, record
        self.rows = layout(mapping.architecture)
        self.scaled_norms: dict[int, float] = {}
        self.moved: set[int] = set()
        self.stream, self.values = Passed(), Passed()

    def operate(self, match_eps: bool) -> None:
        """All rows, then the ends."""
        plan = self.record.plan
        self.shape()
        kept = self.dropouts()
        for i, (item, row) in enumerate(zip(self.mapping.sublayers, plan.rows, strict=True)):
            self.row(i, item, row, kept.get(i, 0.0))
            if match_eps:
                self.rescale_eps(item.norm, row.eps_factor, describe(self.rows, i))
        finals = (self.mapping.encoder_final_norm, self.mapping.final_norm)
        present = [final for final in finals if final is not None]
        for final, factor in zip(present, plan.final_eps[-len(present) :] if present else (), strict=True):
            if plan.removes_final_norm:
                self.remove_norm(final, "final norm")
            elif match_eps:
                self.rescale_eps(final, factor, "final norm")
        if plan.head_activates:
            place = self.mapping.head.activation
            found = None if place is None else find_any(self.model, place, "head")
            replace_activation(found, plan.head_activates, "head")
        if plan.head_ratio != 1:
            head = self.owner(self.mapping.head.weight, "head")
            if isinstance(head, nn.Embedding):
                raise InputError(
                    "this scheme scales the head's input, and the mapping's head is an embedding table, which no "
                    "module reads; give the head a module of its own (nn.Linear with the same weight)"
                )
            multiply(head, input_scale=plan.head_ratio)
        if plan.embedding_ratio != 1:
            e = self.mapping.embedding
            if self.mapping.architecture.input != "tokens":
                raise InputError("this scheme scales the embeddings, which is not possible for patches or frames")
            for reference in (e.token, e.position, e.decoder_position, e.segment):
                if reference is not None and not isinstance(reference, (int, float)):
                    weight = self.owner(reference, "embedding").weight
                    for module in self.model.modules():  # an encoder and a decoder may share a table, not a module
                        if isinstance(module, nn.Embedding) and module.weight is weight:
                            multiply(module, branch_scale=plan.embedding_ratio)

    def shape(self) -> None:
        """Shape the attentions that the scheme shapes."""
        rows = [i for i, row in enumerate(self.record.plan.rows) if row.shapes]
        if not rows:
            return
        unnamed = [i for i in rows if self.mapping.sublayers[i].attention is None]
        if unnamed:
            raise InputError(
                f"{describe(self.rows, unnamed[0])}: the scheme shapes attention, and the mapping names no `attention` "
                "that goes through transformers' interface; choose another family (docs/families.md), or "
                "build(parametrization)"
            )
        p, shapes = self.table, shapes_of(self.table)
        self.record.changed.append(("config", "_attn_implementation", set_implementation(self.model)))
        for i in rows:
            where, reference, shape = describe(self.rows, i), self.mapping.sublayers[i].attention, shapes[i]
            assert reference is not None and shape is not None
            numbers = float(p.shape_in[i]), float(p.shape_out[i]), float(p.shape_gain[i])
            shape_attention(find(self.model, reference, where), shape, numbers, where)

    def dropouts(self) -> dict[int, float]:
        """Take the output dropout of rewired rows over: the probability by row; the model's own becomes 0."""
        targets = {}
        for i, (item, row) in enumerate(zip(self.mapping.sublayers, self.record.plan.rows, strict=True)):
            if row.treatment == "rewired":
                found = dropout_of(self.model, item)
                if found is not None:
                    targets[i] = found
        kept = {i: float(getattr(owner, name)) for i, (owner, name) in targets.items()}
        for owner, name in targets.values():
            if getattr(owner, name) != 0:
                self.change(owner, name, 0.0)
        return kept

    def row(self, i: int, item: SublayerMap, row: RowPlan, dropout_p: float) -> None:
        """One sublayer."""
        where = describe(self.rows, i)
        if row.activates:
            found = None if item.activation is None else find_any(self.model, item.activation, where)
            replace_activation(found, row.activates, where)
        placement = PLACEMENTS[self.rows.placement[i]]
        carrier = find(self.model, self.record.carriers[i])
        post_norm = None
        if row.adds_norm and item.norm is not None:  # of the model's own kind, copied before that one is changed
            post_norm = copy.deepcopy(find(self.model, item.norm, where))
            set_gain(post_norm, float(self.table.post_norm_gain[i]) - self.mapping.gain_offset)
        if row.norm_scale != 1:
            self.scale_norm(item, row, where)
        if row.mixes_values:
            self.mix_values(i, item, where)
        if row.score_ratio != 1:
            self.scale_scores(item, row.score_ratio, where)
        if row.input_scale != 1:
            for reader in reading_maps(self.model, item, cross=self.rows.kind[i] == 1):
                multiply(self.owner(reader, where), input_scale=row.input_scale)
        if row.treatment == "multiplied":
            multiply(carrier, branch_scale=row.scale)
            return
        stream = placed = None
        if row.places_norm or row.removes_norm:
            norm = self.remove_norm(item.norm, where, frozen=row.removes_norm)
            if row.removes_norm and item.post_norm is not None:
                self.remove_norm(item.post_norm, where)
            placed = Placed(norm) if row.places_norm else None
        if row.treatment == "none":
            return
        if row.reads_stream:
            stream = self.stream
            splice(self.owner(reader_of(item, placement), where), Reading, stream=stream)
        self.rewire(i, carrier, row, stream, placed, dropout_p, post_norm)

    def rewire(
        self,
        i: int,
        carrier: nn.Module,
        row: RowPlan,
        stream: Passed | None,
        placed: Placed | None,
        dropout_p: float,
        post_norm: nn.Module | None,
    ) -> None:
        """Splice a rewired carrier, with its parameters on the device and in the type of its weights."""
        p, a = self.table, self.table.architecture
        like = next(carrier.parameters())
        splice(
            carrier, Rewired, stream=stream, placed=placed, gauge=row.scale, dropout_p=dropout_p, post_norm=post_norm,
            point=nn.Identity(), after=nn.Identity(),
        )  # fmt: skip
        for name, start, trains in (
            ("multiplier", float(p.branch[i]), p.branch_trainable),
            ("skip", float(p.skip[i]), p.skip_trainable),
        ):
            size = {"fixed": 0, "scalar": 1, "channel": a.d_model}[trains]
            fixed = not size or (name == "skip" and not row.reads_stream)
            value = start if fixed else nn.Parameter(torch.full((size,), start, dtype=like.dtype, device=like.device))
            setattr(carrier, name, value)
            if not fixed:
                self.record.added.append(f"{self.record.carriers[i]}.{name}")
        if post_norm is not None:
            self.record.added.append(f"{self.record.carriers[i]}.post_norm")

    def scale_norm(self, item: SublayerMap, row: RowPlan, where: str) -> None:
        norm = find(self.model, item.norm, where) if item.norm is not None else None
        if norm is None:
            raise InputError(f"{where}: the scheme scales a norm, and the mapping names none")
        if id(norm) not in self.scaled_norms:
            multiply(norm, branch_scale=row.norm_scale)
        if self.scaled_norms.setdefault(id(norm), row.norm_scale) != row.norm_scale:
            raise InputError(f"{where}: it shares its norm with another branch, which has another norm_scale")

    def mix_values(self, i: int, item: SublayerMap, where: str) -> None:
        a, p = self.mapping.architecture, self.table
        if self.rows.kind[i] == 1:
            raise InputError(f"{where}: a value skip needs a value at every query, which cross-attention does not have")
        values = self.values
        source, taken = split(item.weights["value"])
        owner = self.owner(source, where)
        output = self.owner(item.weights["output"], where)
        like = next(output.parameters())
        splice(owner, Emitting, values=values)
        splice(output, Mixing, values=values, value_rows=taken, groups=a.n_heads // a.n_kv_heads, d_head=a.d_head)
        for name, start in (("value_skip", float(p.value_skip[i])), ("attention_gain", float(p.attention_gain[i]))):
            if p.attention_trainable:
                setattr(output, name, nn.Parameter(torch.full((1,), start, dtype=like.dtype, device=like.device)))
                self.record.added.append(f"{path_of(self.model, output, where)}.{name}")
            else:
                setattr(output, name, start)

    def scale_scores(self, item: SublayerMap, ratio: float, where: str) -> None:
        if item.scaling is not None:
            parent, _, name = item.scaling.rpartition(".")
            owner = find(self.model, parent, where)
            self.change(owner, name, float(getattr(owner, name)) * ratio)
        elif item.query_norm is not None:
            multiply(find(self.model, item.query_norm, where), branch_scale=ratio)
        elif isinstance(item.weights["query"], tuple):
            raise InputError(
                f"{where}: the scheme scales scores; this model has no number for it and fuses its queries"
            )
        else:
            multiply(self.owner(item.weights["query"], where), branch_scale=ratio)

    def remove_norm(self, reference: Any, where: str, *, frozen: bool = True) -> Passing:
        norm = find(self.model, reference, where)
        if id(norm) not in self.moved:
            self.moved.add(id(norm))
            splice(norm, Passing)
        if frozen:  # it takes no part in the function, and must not be waited for by data-parallel training
            for name, q in norm.named_parameters():
                self.record.changed.append(
                    (f"{path_of(self.model, norm, where)}.{name}", "requires_grad", q.requires_grad)
                )
                q.requires_grad_(False)
        assert isinstance(norm, Passing)
        return norm

    def rescale_eps(self, reference: Any, factor: float, where: str) -> None:
        if factor == 1 or reference is None:
            return
        norm = find(self.model, reference, where)
        name = "eps" if hasattr(norm, "eps") else "variance_epsilon"
        if not hasattr(norm, name):
            raise InputError(f"{where}: its norm has no epsilon to match ({type(norm).__name__}); use match_eps=False")
        here = path_of(self.model, norm, where)
        if not any(path == here and key == name for path, key, _ in self.record.changed):
            self.change(norm, name, float(getattr(norm, name)) * factor)

    def change(self, owner: nn.Module, name: str, value: float) -> None:
        self.record.changed.append((path_of(self.model, owner, name), name, getattr(owner, name)))
        setattr(owner, name, value)

    def owner(self, reference: Any, where: str) -> nn.Module:
        """The module that holds a weight.

        Raises:
            InputError: the mapping names a bare parameter, which cannot carry a multiplier.
        """
        found = find_any(self.model, split(reference)[0], where)
        if not isinstance(found, nn.Module):
            raise InputError(f"{where}: the mapping names a bare parameter; expected the module that holds it")
        return found


def multiply(module: nn.Module, *, input_scale: float = 1.0, branch_scale: float = 1.0) -> None:
    """Put fixed numbers on a module, beside those that it has."""
    if isinstance(module, Multiplied):
        module.input_scale *= input_scale
        module.branch_scale *= branch_scale
    else:
        splice(module, Multiplied, input_scale=input_scale, branch_scale=branch_scale)


def eps_bound(a: Architecture, p: Parametrization, plan: Plan) -> float:
    """Bound on the relative change of a norm's output where epsilons stay as they are.

    A norm that divides a stream of variance v / P^2 instead of v changes by eps (1/P^2 - 1) P^2 / (2 v), with v at
    least the variance with which the stream starts times P^2 (what the skip has left of it).
    """
    e = p.embedding
    start = e.norm_gain**2 if a.embedding_norm else (e.token**2 + e.position**2 + e.segment**2) * e.scale**2
    factors = [abs(row.eps_factor - 1) for row in plan.rows] + [abs(f - 1) for f in plan.final_eps]
    return a.norm_eps * max(factors, default=0.0) / (2 * start) if start > 0 else math.inf


def absorbed_factors(model: nn.Module, mapping: Mapping, plan: Plan, carriers: tuple[str, ...]) -> dict[str, float]:
    """What each parameter is multiplied with, by name, in absorbed mode."""
    factors: dict[str, float] = {}
    names = {id(q): name for name, q in model.named_parameters()}

    def scale(owner: Any, factor: float, *, bias: bool = True) -> None:
        tensors = [owner] if isinstance(owner, torch.Tensor) else [owner.weight]
        if bias and getattr(owner, "bias", None) is not None:
            tensors.append(owner.bias)
        for tensor in tensors:
            if factor != 1:
                factors[names[id(tensor)]] = factors.get(names[id(tensor)], 1.0) * factor

    def owner_of(reference: Any) -> Any:
        return find_any(model, split(reference)[0], "weight")

    rows = layout(mapping.architecture)
    scaled: set[int] = set()
    for i, (item, row, carrier) in enumerate(zip(mapping.sublayers, plan.rows, carriers, strict=True)):
        where = describe(rows, i)
        if mapping.gain_offset and (row.norm_scale != 1 or PLACEMENTS[rows.placement[i]] in ("sandwich", "res-post")):
            raise InputError(
                f"{where}: gains here are 1 + weight, which no factor on the weight scales; use mode='gauge'"
            )
        scale(find(model, carrier), row.scale)
        for reader in reading_maps(model, item, cross=rows.kind[i] == 1):
            scale(reader, row.input_scale, bias=False)
        if row.norm_scale != 1 and item.norm is not None and id(find(model, item.norm)) not in scaled:
            norm = find(model, item.norm)
            if getattr(norm, "weight", None) is None:
                raise InputError(
                    f"{where}: its norm has no weight to absorb {row.norm_scale:.3g} into; use mode='gauge'"
                )
            scaled.add(id(norm))
            scale(norm, row.norm_scale)
        if row.score_ratio != 1:
            if isinstance(item.weights["query"], tuple):
                raise InputError(
                    f"{where}: queries are fused with keys and values, so one weight would need two factors"
                )
            scale(owner_of(item.weights["query"]) if item.query_norm is None else find(model, item.query_norm),
                  row.score_ratio)  # fmt: skip
    if plan.head_ratio != 1:
        scale(owner_of(mapping.head.weight), plan.head_ratio, bias=False)
    if plan.embedding_ratio != 1:
        e = mapping.embedding
        for reference in (e.token, e.position, e.decoder_position, e.segment):
            if reference is not None and not isinstance(reference, (int, float)):
                scale(owner_of(reference), plan.embedding_ratio)
    return factors


def _multiply_weights(model: nn.Module, record: Record) -> None:
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, factor in record.factors.items():
            parameters[name].mul_(factor)

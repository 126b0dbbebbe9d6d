"""`apply`: make a model that exists compute what a scheme asks for, in place, without touching its forward code."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping as Dictionary
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from signalprop.attachment.attached import Attached, AttachedRow, Held, attach, require_roles, with_known_weights
from signalprop.attachment.live_model import adapters_in, unwrapped
from signalprop.attachment.mapping import Mapping, number
from signalprop.attachment.parametrization_of import rms, tensors_of
from signalprop.data.batches import Batch
from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.measurement.measuring import measure
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics
from signalprop.network.layout import PLACEMENTS
from signalprop.network.parametrization import Embedding, Parametrization
from signalprop.repair.initialisation import draw_table, draw_weights, set_gain, ties
from signalprop.repair.module_swaps import splice
from signalprop.repair.plan import Plan, RowPlan, make_plan, own_multipliers
from signalprop.repair.record import (
    Record,
    applied_mixin,
    record_of,
)
from signalprop.repair.shaped_models import (
    replace_activation,
    set_implementation,
    shape_attention,
    shapes_of,
)
from signalprop.repair.sites import confirm
from signalprop.repair.spliced_modules import Emitting, Mixing, Multiplied, Passed, Passing, Placed, Reading, Rewired
from signalprop.repair.tiny_pass import on_meta
from signalprop.repair.undoing import Saved, all_or_nothing, everything
from signalprop.schemes import Scheme
from signalprop.schemes import scheme as scheme_of

Mode = Literal["gauge", "absorbed"]


@typed
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
        initialize: draw the weights anew. False keeps them and only installs multipliers: those of a
            scheme times the model's own (Granite's). A Parametrization says all numbers, the model's own too.
        mode: `gauge`; or `absorbed`, which multiplies everything into the initial weights and leaves the modules alone:
            train with the groups of `signalprop.parameter_groups`, whose learning rates make up for it (exact for AdamW
            and SGD until gradients are clipped by their global norm).
        match_eps: rescale the epsilons of norms with the stream, in memory, which makes the gauge exact; a folded
            checkpoint cannot keep that, since a config has one epsilon.
        seed: of the draws; the same seed gives the weights of `build(parametrization, seed=seed)`.

    Returns:
        The Parametrization that the model now has.

    Whatever ends it midway, an error or an interrupt, the model is as it was, bit by bit: weights that are overwritten
    have a copy meanwhile (in memory, or in a temporary file where they take more than half of what is free).

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
    if adapted := adapters_in(model):
        raise InputError(
            f"the model has PEFT's adapters ({adapted[0]} and {len(adapted) - 1} more), whose start the scheme knows "
            "nothing of; apply the scheme to the plain model and add the adapters then, or merge_and_unload() first"
        )
    if mode not in ("gauge", "absorbed"):
        raise InputError(f"mode is {mode!r}; expected 'gauge' or 'absorbed'")
    if mode == "absorbed" and match_eps:
        raise InputError("match_eps changes norms, and mode='absorbed' leaves modules alone; choose one of the two")
    attached = attach(model, mapping, data if isinstance(data, dict) else None)
    other = isinstance(scheme, Parametrization) and scheme.architecture != attached.mapping.architecture
    if initialize or mode == "absorbed" or other:
        attached = require_roles(attached)
    attached = with_known_weights(attached)
    if torch.backends.mha.get_fastpath_enabled() and any(
        isinstance(module, nn.TransformerEncoderLayer) for module in model.modules()
    ):
        raise InputError(
            "call torch.backends.mha.set_fastpath_enabled(False) first: in evaluation PyTorch computes an "
            "nn.TransformerEncoderLayer from its weights, past its modules, which carry the multipliers"
        )
    if attached.mapping.found:  # in the vanilla model; nothing looks for it again
        mapping = attached.mapping
    architecture = attached.mapping.architecture
    if architecture is not None and architecture.streams is not None:
        raise InputError(
            "a scheme is put on one residual stream, and this model has several; build it with the scheme instead:"
            " sp.build(sp.scheme(NAME)(architecture))"
        )
    _refuse_multipliers(attached)
    without_numbers = on_meta(model)
    if not without_numbers:
        confirm(attached, data if isinstance(data, dict) else None)
    chosen = scheme_of(scheme, **options) if isinstance(scheme, str) else scheme
    if isinstance(data, Batch) and inputs is None:
        inputs = data.statistics(architecture)
    if data is not None and hasattr(chosen, "profiled"):
        chosen = _profiled(attached, chosen, data, seed)
    table = chosen if isinstance(chosen, Parametrization) else chosen(architecture, inputs)
    if not (initialize or isinstance(chosen, Parametrization)):
        table = _with_own(attached, table)
    table = with_fixed_positions(attached, table)
    with all_or_nothing(model):
        record = install(attached, table, mode=mode, match_eps=match_eps, by_hand=mapping)
        record.pending = without_numbers and initialize
        record.kept = not initialize
        if initialize and not without_numbers:
            with all_or_nothing(model, everything(model)):
                draw_weights(model, record, seed)
        elif mode == "absorbed" and not without_numbers:
            _multiply_weights(model, record)
    return table


def install(
    attached: Attached, table: Parametrization, *, mode: str, match_eps: bool, by_hand: Mapping | None
) -> Record:
    """Install the multipliers of a Parametrization, and the record, in a vanilla model; weights stay as they are.

    Args:
        by_hand: the mapping, where it was given by hand.

    Raises:
        InputError: as `apply`; the caller puts the model back (`all_or_nothing`).
    """
    model, mapping = attached.model, attached.mapping
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    plan = make_plan(mapping, table, dtype=dtype, mode=mode)
    # where a norm is taken out, the branch ends before it
    carriers = tuple(
        attached.path_of(row.carrier("none" if PLACEMENTS[now] == "none" else None), f"{row.label} carrier")
        for row, now in zip(attached.rows, table.placement, strict=True)
    )
    record = Record(table, mode, plan, carriers, by_hand, matched_eps=match_eps)
    record.ties = ties(model)
    record.eps_error = 0.0 if match_eps else eps_bound(mapping.architecture, table, plan)
    if mode == "absorbed":
        record.factors = absorbed_factors(attached, plan, carriers)
    else:
        _Surgeon(attached, table, record).operate(match_eps)
    splice(model, applied_mixin(type(model)), signalprop_record=record)
    return record


def with_fixed_positions(attached: Attached, table: Parametrization) -> Parametrization:
    """The table with the root mean square of positions that the model computes or keeps, and no scheme can draw."""
    ends, mapping, e = attached.ends, attached.mapping, table.embedding
    fixed: dict[str, float] = {}
    for name, held in (("position", ends.position), ("decoder_position", ends.decoder_position)):
        if isinstance(held, float):
            fixed[name] = held
        elif held is not None:
            values, _ = tensors_of(held, "positions")
            if not values.requires_grad:  # sines and cosines, whose squares add up to 1
                fixed[name] = math.sqrt(0.5) / mapping.embedding.scale if values.is_meta else rms(values, "positions")
    if not fixed:
        return table
    if mapping.architecture.kind == "encoder-decoder":
        fixed.setdefault("decoder_position", e.position_of(decoder=True))
    return replace(table, embedding=Embedding(**e.model_dump() | fixed))


def _refuse_multipliers(attached: Attached) -> None:
    for row in attached.rows:
        item = row.item
        trains = any(isinstance(value, Tensor) and number(value) != 1 for value in (item.skip, item.multiplier))
        if trains or item.norm_scale != 1 or 0 in (number(item.skip), number(item.multiplier)):
            raise InputError(
                f"{row.label} has multipliers of its own that train, are 0 or stand on a norm (skip "
                f"{number(item.skip):.3g}, branch {number(item.multiplier):.3g}); apply needs a model without"
            )


def _with_own(attached: Attached, table: Parametrization) -> Parametrization:
    """The table with a model's own fixed multipliers as factors on the scheme's, where the model stays as it is."""
    own = np.array([own_multipliers(row.item) for row in attached.rows])
    if (own == 1).all():
        return table
    return replace(table, skip=table.skip * own[:, 0], branch=table.branch * own[:, 1])


def _profiled(attached: Attached, chosen: Any, data: Any, seed: int | None) -> Any:
    """A scheme with the branch variances that its profiling pass measures on the model.

    The pass runs the model as the scheme initialises it, every multiplier 1; weights are put back afterwards.
    """
    model = attached.model
    if on_meta(model):
        raise InputError(f"scheme {chosen.name!r} profiles the model, which is on the meta device; leave out data=")
    table = chosen.profiling(attached.mapping.architecture)
    if not (table.placement == attached.layout.placement).all():
        raise InputError(f"scheme {chosen.name!r} profiles a model with its own norm placement; leave out data=")
    before = Saved(model, everything(model))
    try:
        draw_table(attached, table, 0 if seed is None else seed)
        profile = measure(model.eval(), data, mapping=attached.mapping, backward=False)
    finally:
        before.restore()
    return chosen.profiled(profile)


class _Surgeon:
    """Does what a plan says, module by module."""

    def __init__(self, attached: Attached, table: Parametrization, record: Record) -> None:
        self.attached, self.table, self.record = attached, table, record
        self.scaled_norms: dict[int, float] = {}
        self.moved: set[int] = set()
        self.stream, self.values = Passed(), Passed()

    def operate(self, match_eps: bool) -> None:
        """All rows, then the ends."""
        plan, ends = self.record.plan, self.attached.ends
        self.shape()
        kept = self.dropouts()
        for i, (here, row) in enumerate(zip(self.attached.rows, plan.rows, strict=True)):
            self.row(i, here, row, kept.get(i, 0.0))
            if match_eps:
                self.rescale_eps(here.norm, row.eps_factor, here.label)
        finals = ends.final_norms
        for final, factor in zip(finals, plan.final_eps[-len(finals) :] if finals else (), strict=True):
            if plan.removes_final_norm:
                self.remove_norm(final, "final norm")
            elif match_eps:
                self.rescale_eps(final, factor, "final norm")
        if plan.head_activates:
            replace_activation(ends.activation and ends.activation.holder, plan.head_activates, "head")
        if plan.head_ratio != 1:
            head = _needed(ends.head, "head").module("head")
            if isinstance(head, nn.Embedding):
                raise InputError(
                    "this scheme scales the head's input, and the mapping's head is an embedding table, which no "
                    "module reads; give the head a module of its own (nn.Linear with the same weight)"
                )
            multiply(head, input_scale=plan.head_ratio)
        if plan.embedding_ratio != 1:
            if self.attached.mapping.architecture.input != "tokens":
                raise InputError("this scheme scales the embeddings, which is not possible for patches or frames")
            for table in ends.tables:
                weight = table.module("embedding").weight
                for module in self.attached.model.modules():  # encoder and decoder may share a table, not a module
                    if isinstance(module, nn.Embedding) and module.weight is weight:
                        multiply(module, branch_scale=plan.embedding_ratio)

    def shape(self) -> None:
        """Shape the attentions that the scheme shapes."""
        rows = [i for i, row in enumerate(self.record.plan.rows) if row.shapes]
        if not rows:
            return
        unnamed = [i for i in rows if self.attached.rows[i].attention is None]
        if unnamed:
            raise InputError(
                f"{self.attached.rows[unnamed[0]].label}: the scheme shapes attention, and the mapping names no "
                "`attention` that goes through transformers' interface; choose another family (docs/families.md), or "
                "build(parametrization)"
            )
        p, shapes = self.table, shapes_of(self.table)
        self.record.changed.append(("config", "_attn_implementation", set_implementation(self.attached.model)))
        for i in rows:
            here, shape = self.attached.rows[i], shapes[i]
            assert here.attention is not None and shape is not None
            numbers = float(p.shape_in[i]), float(p.shape_out[i]), float(p.shape_gain[i])
            shape_attention(here.attention.module(here.label), shape, numbers, here.label)

    def dropouts(self) -> dict[int, float]:
        """Take the output dropout of rewired rows over: the probability by row; the model's own becomes 0."""
        rows = zip(self.attached.rows, self.record.plan.rows, strict=True)
        targets = {i: here.dropout for i, (here, row) in enumerate(rows) if here.dropout and row.treatment == "rewired"}
        kept = {i: float(getattr(owner, name)) for i, (owner, name) in targets.items()}
        for owner, name in targets.values():
            if getattr(owner, name) != 0:
                self.change(owner, name, 0.0)
        return kept

    def row(self, i: int, here: AttachedRow, row: RowPlan, dropout_p: float) -> None:
        """One sublayer."""
        where = here.label
        if row.activates:
            replace_activation(here.activation and here.activation.holder, row.activates, where)
        carrier = self.attached.model.get_submodule(self.record.carriers[i])
        post_norm = None
        if row.adds_norm and here.norm is not None:  # of the model's own kind, copied before that one is changed
            post_norm = copy.deepcopy(here.norm)
            set_gain(post_norm, float(self.table.post_norm_gain[i]) - self.attached.mapping.gain_offset)
        if row.norm_scale != 1:
            self.scale_norm(here, row)
        if row.mixes_values:
            self.mix_values(i, here)
        if row.score_ratio != 1:
            self.scale_scores(here, row.score_ratio)
        if row.input_scale != 1:
            for reader in here.readers:
                multiply(Held(reader).module(where), input_scale=row.input_scale)
        if row.treatment == "multiplied":
            multiply(carrier, branch_scale=row.scale)
            return
        stream = placed = None
        if row.places_norm or row.removes_norm:
            norm = self.remove_norm(here.norm, where, frozen=row.removes_norm)
            if row.removes_norm and here.post_norm is not None:
                self.remove_norm(here.post_norm, where)
            placed = Placed(norm) if row.places_norm else None
        if row.treatment == "none":
            return
        if row.reads_stream:
            stream = self.stream
            splice(Held(here.reader).module(where), Reading, stream=stream)
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
        like = next(carrier.parameters(), next(self.attached.model.parameters()))
        splice(
            carrier, Rewired, stream=stream, placed=placed, gauge=row.scale, dropout_p=dropout_p, post_norm=post_norm,
            point=nn.Identity(), after=nn.Identity(),
        )  # fmt: skip
        for name, start, trains in (
            ("multiplier", float(p.branch[i]), p.branch_trainable),
            ("skip", float(p.skip[i]), p.skip_trainable),
        ):
            size = {"fixed": 0, "scalar": 1, "channel": a.d_model}[trains]
            channels = getattr(carrier, "out_features", None) or getattr(carrier, "normalized_shape", (size,))[-1]
            if size > 1 and channels != size:  # streams whose width changes from layer to layer
                raise InputError(
                    f"{self.record.carriers[i]} gives {channels} channels, and the scheme has a multiplier for each of "
                    f"{size}; take a scheme with one multiplier per branch, such as rezero"
                )
            fixed = not size or (name == "skip" and not row.reads_stream)
            value = start if fixed else nn.Parameter(torch.full((size,), start, dtype=like.dtype, device=like.device))
            setattr(carrier, name, value)
            if not fixed:
                self.record.added.append(f"{self.record.carriers[i]}.{name}")
        if post_norm is not None:
            self.record.added.append(f"{self.record.carriers[i]}.post_norm")

    def scale_norm(self, here: AttachedRow, row: RowPlan) -> None:
        """Multiply the output of a norm, once."""
        if here.norm is None:
            raise InputError(f"{here.label}: the scheme scales a norm, and the mapping names none")
        if id(here.norm) not in self.scaled_norms:
            multiply(here.norm, branch_scale=row.norm_scale)
        if self.scaled_norms.setdefault(id(here.norm), row.norm_scale) != row.norm_scale:
            raise InputError(f"{here.label}: it shares its norm with another branch, which has another norm_scale")

    def mix_values(self, i: int, here: AttachedRow) -> None:
        """Add a token's own value to what the heads output."""
        a, p, where = self.attached.mapping.architecture, self.table, here.label
        if here.kind.reads_memory:
            raise InputError(f"{where}: a value skip needs a value at every query, which cross-attention does not have")
        held, values = here.weights["value"], self.values
        output = here.weights["output"].module(where)
        like = next(output.parameters())
        splice(held.module(where), Emitting, values=values)
        splice(output, Mixing, values=values, value_rows=held.rows, groups=a.n_heads // a.n_kv_heads, d_head=a.d_head)
        for name, start in (("value_skip", float(p.value_skip[i])), ("attention_gain", float(p.attention_gain[i]))):
            if p.attention_trainable:
                setattr(output, name, nn.Parameter(torch.full((1,), start, dtype=like.dtype, device=like.device)))
                self.record.added.append(f"{self.attached.path_of(output, where)}.{name}")
            else:
                setattr(output, name, start)

    def scale_scores(self, here: AttachedRow, ratio: float) -> None:
        """Put a factor on query and key's product."""
        if here.scaling is not None:
            owner, name = here.scaling
            self.change(owner, name, float(getattr(owner, name)) * ratio)
        elif here.query_norm is not None:
            multiply(here.query_norm, branch_scale=ratio)
        elif here.weights["query"].rows is not None:
            raise InputError(
                f"{here.label}: the scheme scales scores; this model has no number for it and fuses its queries"
            )
        else:
            multiply(here.weights["query"].module(here.label), branch_scale=ratio)

    def remove_norm(self, norm: nn.Module | None, where: str, *, frozen: bool = True) -> Passing:
        """Let a norm pass the stream on as it is."""
        if norm is None:
            raise InputError(f"{where}: the scheme takes a norm away, and the mapping names none")
        if id(norm) not in self.moved:
            self.moved.add(id(norm))
            splice(norm, Passing)
        if frozen:  # it takes no part in the function, and must not be waited for by data-parallel training
            for name, q in norm.named_parameters():
                path = f"{self.attached.path_of(norm, where)}.{name}"
                self.record.changed.append((path, "requires_grad", q.requires_grad))
                q.requires_grad_(False)
        assert isinstance(norm, Passing)
        return norm

    def rescale_eps(self, norm: nn.Module | None, factor: float, where: str) -> None:
        """Multiply a norm's epsilon, once."""
        if factor == 1 or norm is None:
            return
        name = "eps" if hasattr(norm, "eps") else "variance_epsilon"
        if not hasattr(norm, name):
            raise InputError(f"{where}: its norm has no epsilon to match ({type(norm).__name__}); use match_eps=False")
        here = self.attached.path_of(norm, where)
        if not any(path == here and key == name for path, key, _ in self.record.changed):
            self.change(norm, name, float(getattr(norm, name)) * factor)

    def change(self, owner: nn.Module, name: str, value: float) -> None:
        """Set an attribute, and note what it was."""
        self.record.changed.append((self.attached.path_of(owner, name), name, getattr(owner, name)))
        setattr(owner, name, value)


def _needed(held: Held | None, what: str) -> Held:
    if held is None:
        raise InputError(f"the mapping names no {what}; expected the module that holds its weight")
    return held


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
        scale(_needed(attached.ends.head, "head").holder, plan.head_ratio, bias=False)
    if plan.embedding_ratio != 1:
        for table in attached.ends.tables:
            scale(table.holder, plan.embedding_ratio)
    return factors


def _multiply_weights(model: nn.Module, record: Record) -> None:
    parameters = dict(model.named_parameters())
    with torch.no_grad(), all_or_nothing(model, [parameters[name] for name in record.factors]):
        for name, factor in record.factors.items():
            parameters[name].mul_(factor)

"""What a plan says, installed in a model's modules one by one; and what becomes of the model's class."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from signalprop.attachment.anatomy import Anatomy
from signalprop.attachment.rows import AttachedRow, Held
from signalprop.errors import InputError
from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import Parametrization
from signalprop.repair.initialisation import ties
from signalprop.repair.plan import Plan, RowPlan, make_plan
from signalprop.repair.record import Record, attached_applied, is_pretrained
from signalprop.repair.saving import save_pretrained, warn_of_plain_loading
from signalprop.repair.splices import Multiplied, Splice, TrainedMultiplier, refuse_adapters, splice


def install(attached: Anatomy, table: Parametrization, *, match_eps: bool) -> Record:
    """Install the multipliers of a Parametrization, and the record, in a vanilla model; weights stay as they are."""
    model, mapping = attached.model, attached.mapping
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    plan = make_plan(attached, table, dtype=dtype)
    known = mapping if mapping.found else attached.by_hand  # nothing looks for it again
    record = Record(table, plan, known, matched_eps=match_eps)
    record.ties = ties(model)
    record.eps_error = 0.0 if match_eps else eps_bound(mapping.architecture, table, plan)
    _Installation(attached, table, record).run(match_eps)
    splice(model, AppliedPretrained if is_pretrained(type(model)) else Applied, signalprop_record=record)
    return record


def eps_bound(a: Architecture, p: Parametrization, plan: Plan) -> float:
    """Bound on the relative change of a norm's output where epsilons stay as they are.

    A norm that divides a stream of variance v / P^2 instead of v changes by eps (1/P^2 - 1) P^2 / (2 v), with v at
    least the variance with which the stream starts times P^2 (what the skip has left of it).
    """
    e = p.embedding
    start = e.norm_gain**2 if a.embedding_norm else (e.token**2 + e.position**2 + e.segment**2) * e.scale**2
    factors = [abs(row.eps_factor - 1) for row in plan.rows] + [abs(f - 1) for f in plan.final_eps]
    return a.norm_eps * max(factors, default=0.0) / (2 * start) if start > 0 else math.inf


class _Installation:
    """Does what a plan says, module by module."""

    def __init__(self, attached: Anatomy, table: Parametrization, record: Record) -> None:
        self.attached, self.table, self.record = attached, table, record
        self.scaled_norms: dict[int, float] = {}

    def run(self, match_eps: bool) -> None:
        """All rows, then the ends."""
        plan, ends = self.record.plan, self.attached.ends
        kept = self.dropouts()
        for i, (here, row) in enumerate(zip(self.attached.rows, plan.rows, strict=True)):
            self.row(i, here, row, kept.get(i, 0.0))
            if match_eps:
                if here.normed and row.eps_factor != 1:
                    raise InputError(f"{here.label}: its norm is a function, whose epsilon stays; leave match_eps out")
                self.rescale_eps(here.norm, row.eps_factor, here.label)
        finals = ends.final_norms
        for final, factor in zip(finals, plan.final_eps[-len(finals) :] if finals else (), strict=True):
            if match_eps:
                self.rescale_eps(final, factor, "final norm")
        if plan.head_ratio != 1:
            if ends.head is None:
                raise InputError("the mapping names no head; expected the module that holds its weight")
            head = ends.head.module("head")
            if isinstance(head, nn.Embedding):
                raise InputError(
                    "this scheme scales the head's input, and the mapping's head is an embedding table, which no "
                    "module reads; give the head a module (nn.Linear with the same weight)"
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

    def dropouts(self) -> dict[int, float]:
        """Take the dropout of branches with trained multipliers over: its probability by row; the model's becomes 0."""
        rows = self.attached.rows if self.table.branch_trainable != "fixed" else ()
        targets = {i: here.dropout for i, here in enumerate(rows) if here.dropout}
        kept = {i: float(getattr(owner, name)) for i, (owner, name) in targets.items()}
        for owner, name in targets.values():
            if getattr(owner, name) != 0:
                self.change(owner, name, 0.0)
        return kept

    def row(self, i: int, here: AttachedRow, row: RowPlan, dropout_p: float) -> None:
        """One sublayer."""
        where = here.label
        if row.norm_scale != 1:
            self.scale_norm(here, row)
        if row.score_ratio != 1:
            self.scale_scores(here, row.score_ratio)
        if row.input_scale != 1:
            for reader in here.readers:
                multiply(Held(reader).module(where), input_scale=row.input_scale)
        if self.table.branch_trainable != "fixed":
            self.train(i, here, row.scale, dropout_p)
        elif row.scale != 1:
            multiply(here.ending, branch_scale=row.scale)

    def train(self, i: int, here: AttachedRow, gauge: float, dropout_p: float) -> None:
        """Splice a trained multiplier into a carrier, on the device and in the type of its weights."""
        p, width, carrier = self.table, self.table.architecture.d_model, here.ending
        like = next(carrier.parameters(), next(self.attached.model.parameters()))
        splice(carrier, TrainedMultiplier, gauge=gauge, dropout_p=dropout_p, point=nn.Identity())
        size = width if p.branch_trainable == "channel" else 1
        channels = getattr(carrier, "out_features", None) or getattr(carrier, "normalized_shape", (size,))[-1]
        if size > 1 and channels != size:  # streams whose width changes from layer to layer
            raise InputError(
                f"{here.label}: its last map gives {channels} channels, and the scheme has a multiplier for each of "
                f"{size}; take a scheme with one multiplier per branch, such as layerscale with trainable=scalar"
            )
        start = torch.full((size,), float(p.branch[i]), dtype=like.dtype, device=like.device)
        carrier.multiplier = nn.Parameter(start)

    def scale_norm(self, here: AttachedRow, row: RowPlan) -> None:
        """Multiply the output of a norm, once."""
        if here.norm is None:
            what = "the model's is a function" if here.normed else "the mapping names none"
            raise InputError(f"{here.label}: the scheme scales a norm, and {what}; take one that scales branches")
        if id(here.norm) not in self.scaled_norms:
            multiply(here.norm, branch_scale=row.norm_scale)
        if self.scaled_norms.setdefault(id(here.norm), row.norm_scale) != row.norm_scale:
            raise InputError(f"{here.label}: it shares its norm with another branch, which has another norm_scale")

    def scale_scores(self, here: AttachedRow, ratio: float) -> None:
        """Put a factor on query and key's product."""
        if here.scaling is not None:
            owner, name = here.scaling
            self.change(owner, name, float(getattr(owner, name)) * ratio)
        elif here.query_norm is not None:
            multiply(here.query_norm, branch_scale=ratio)
        elif self.attached.mapping.architecture.qk_norm:
            raise InputError(f"{here.label}: the scheme scales scores, and the norms of its queries are functions")
        elif here.weights["query"].rows is not None:
            raise InputError(
                f"{here.label}: the scheme scales scores; this model has no number for it and fuses its queries"
            )
        else:
            multiply(here.weights["query"].module(here.label), branch_scale=ratio)

    def rescale_eps(self, norm: nn.Module | None, factor: float, where: str) -> None:
        """Multiply a norm's epsilon, once."""
        if factor == 1 or norm is None:
            return
        name = "eps" if hasattr(norm, "eps") else "variance_epsilon"
        if not hasattr(norm, name):
            raise InputError(f"{where}: its norm has no epsilon to match ({type(norm).__name__}); leave match_eps out")
        here = self.attached.path_of(norm, where)
        if not any(path == here and key == name for path, key, _ in self.record.changed):
            self.change(norm, name, float(getattr(norm, name)) * factor)

    def change(self, owner: nn.Module, name: str, value: float) -> None:
        """Set an attribute, and note what it was."""
        self.record.changed.append((self.attached.path_of(owner, name), name, getattr(owner, name)))
        setattr(owner, name, value)


def multiply(module: nn.Module, *, input_scale: float = 1.0, branch_scale: float = 1.0) -> None:
    """Put fixed numbers on a module, beside those that it has."""
    if isinstance(module, Multiplied):
        module.input_scale *= input_scale
        module.branch_scale *= branch_scale
    else:
        splice(module, Multiplied, input_scale=input_scale, branch_scale=branch_scale)


# --- what becomes of the model's class ---------------------------------------------------------------------------


class Applied(Splice):
    """A model that carries a scheme. Its name stays that of the vanilla class, which libraries look at."""

    keeps_name = True
    brings = ("signalprop_record",)
    signalprop_record: Record

    def __setattr__(self, name: str, value: Any) -> None:
        """As PyTorch has it; peft writes `peft_config` to a model that it has just put adapters into."""
        super().__setattr__(name, value)
        if name == "peft_config":
            refuse_adapters(self)

    def signalprop_anatomy(self) -> Anatomy:
        """The model in the units of the Parametrization, for all that looks at one."""
        return attached_applied(self)


class AppliedPretrained(Applied):
    """A Hugging Face model that carries a scheme: what it saves can be loaded again with the scheme."""

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Refused: transformers makes new modules, which have no multipliers."""
        raise InputError("resize the embeddings before apply, or after signalprop.fold(model)")

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As transformers has it, and beside it the record that `signalprop.load` needs.

        Warns that transformers by itself would load the vanilla function, where that is another one.
        """
        vanilla: Any = super()
        warn_of_plain_loading(self)
        save_pretrained(self, vanilla.save_pretrained, save_directory, *args, **kwargs)

"""What has to be done to a model so that it computes the function of a Parametrization: pure arithmetic, no tensors.

Two routes per stack (docs/theory/gauge.md). *Gauge*: the skip stays as it is and the multiplier of a branch becomes
beta_k / P_k with P_k = lambda_1 ... lambda_k; the model carries the stream in units of P. *Rewired*: the last map of
the branch returns what has to be added to the stream; for lambda = 0, trainable lambda, and norms in other places.

A model's own fixed multipliers (Granite) stay in its code: lambda_k and beta_k are what is asked for over those.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from torch import Tensor

from signalprop.attachment.mapping import Mapping, SublayerMap, describe, own_score_scale
from signalprop.errors import InputError
from signalprop.network.activations import activation, numbers_of
from signalprop.network.architecture import Architecture
from signalprop.network.kinds import kind_of
from signalprop.network.layout import PLACEMENTS, Layout, layout
from signalprop.network.parametrization import Parametrization
from signalprop.network.residual import NORM_BEFORE

Treatment = Literal["none", "multiplied", "rewired"]

# Multipliers beyond this lose a stream in fp32 or bf16 (fp16): measured in docs/theory/gauge.md.
LARGEST_MULTIPLIER = {"float16": 1e2}
_LARGEST = 1e8
# placement of the model -> placements of schemes that another forward is not needed for
_MOVES = {"pre": ("post", "none", "sandwich"), "post": ("none",), "sandwich": ("none",), "res-post": ("none",)}
_SHAPE = (
    "kind", "n_layers", "n_decoder_layers", "d_model", "n_heads", "n_kv_heads", "d_head", "d_ff", "gated",
    "norm", "parallel", "qk_norm", "positions", "n_segments", "embedding_norm", "input", "vocab_size", "patch_dim",
    "head", "n_classes", "head_transform", "tied_embeddings",
)  # fmt: skip


@dataclass(frozen=True)
class RowPlan:
    """What is done at one sublayer.

    Attributes:
        treatment: of the carrier: nothing, a fixed multiplier, or rewired.
        scale: the fixed multiplier; of a rewired carrier the gauge factor on its own multiplier.
        input_scale: factor on what the maps that read the stream read (branches that read it raw).
        reads_stream: the carrier needs the stream. places_norm: it norms the sum. removes_norm: no norm any more.
        adds_norm: a second norm, new to the model, on the branch.
        before, behind: P before and after the sublayer: the model's stream times P is the Parametrization's.
        score_ratio: factor on the model's own score scale.
        eps_factor: what the epsilon of the row's norm has to be multiplied with for exactness.
        mixes_values: the heads output more, or less, than the average of values.
        shapes: attention is D softmax(scores + B). activates: the activation that replaces the model's; '' none.
    """

    treatment: Treatment = "none"
    scale: float = 1.0
    input_scale: float = 1.0
    reads_stream: bool = False
    places_norm: bool = False
    removes_norm: bool = False
    adds_norm: bool = False
    before: float = 1.0
    behind: float = 1.0
    norm_scale: float = 1.0
    score_ratio: float = 1.0
    eps_factor: float = 1.0
    mixes_values: bool = False
    shapes: bool = False
    activates: str = ""


@dataclass(frozen=True)
class Plan:
    """All that is done to a model.

    Attributes:
        rows: one per sublayer.
        removes_final_norm, final_eps: per stack: the norm after it goes; factor on its epsilon.
        head_ratio, embedding_ratio: factors on the model's own head input and embeddings.
        head_activates: the activation that replaces that of the dense layer before the head; '' none.
    """

    rows: tuple[RowPlan, ...]
    removes_final_norm: bool
    final_eps: tuple[float, ...]
    head_ratio: float
    embedding_ratio: float
    head_activates: str = ""


def check_shape(model: Architecture, table: Architecture) -> None:
    """Raise InputError where a Parametrization was made for a network of another shape."""
    for name in _SHAPE:
        mine, theirs = getattr(model, name), getattr(table, name)
        if mine != theirs:
            raise InputError(
                f"the parametrization was made for another network: {name} is {theirs!r} there and {mine!r} in the "
                "model; make it from Architecture.from_hf(model), or give the scheme's name"
            )
    if not _is_transform(table.activation, model.activation):
        raise InputError(
            f"the parametrization was made for another network: activation is {table.activation!r:.60} there and "
            f"{model.activation!r:.60} in the model; expected that one, or a transform of it"
        )


def _is_transform(name: str, of: str) -> bool:
    """Whether an activation is the other one, or made of it with numbers (ReLU being a leaky one)."""
    mine, theirs = activation(name).name, activation(of).name
    if mine == theirs:
        return True
    inside, numbers = numbers_of(mine)
    if not numbers:
        return False
    return theirs in ("relu", "leaky_relu") if inside == "leaky_relu" else _is_transform(inside, theirs)


def make_plan(mapping: Mapping, p: Parametrization, *, dtype: str) -> Plan:
    """What has to be done to the model of a mapping.

    Args:
        mapping: of the vanilla model. dtype: of its parameters, `float32`, `bfloat16` or `float16`.
    """
    if p.skip.ndim != 1:
        raise InputError(f"this parametrization is a sweep of shape {p.skip.shape[:-1]}; give one of its members")
    if p.norm_bias.any():
        raise InputError("a scheme starts the biases of norms at 0, and this table has others; expected norm_bias 0")
    a = mapping.architecture
    check_shape(a, p.architecture)
    rows = layout(a)
    moved = _moves(a, p, rows)
    removes_final = a.has_final_norm and not p.architecture.has_final_norm
    if p.architecture.has_final_norm and not a.has_final_norm:
        raise InputError(
            f"scheme {p.scheme!r} needs a norm after the last layer, which a {a.family or 'model like this'} does not "
            "have; choose a scheme for its norm placement, or build(parametrization)"
        )
    planned: list[RowPlan] = [RowPlan()] * p.n_sublayers
    finals = []
    for stack in sorted(set(rows.stack.tolist())):
        members = np.flatnonzero(rows.stack == stack).tolist()
        made, last = _stack(mapping, p, rows, members, moved, removes_final, LARGEST_MULTIPLIER.get(dtype, _LARGEST))
        for i, row in zip(members, made, strict=True):
            planned[i] = row
        finals.append(last**-2)
    planned = _shared_dropouts(mapping, p, rows, planned)
    head_ratio = 1.0 if a.head == "none" else p.head.scale / mapping.head.scale
    other = a.head_transform and a.head == "lm" and p.architecture.activation != a.activation
    plan = Plan(
        tuple(planned),
        removes_final,
        tuple(finals),
        head_ratio,
        p.embedding.scale / mapping.embedding.scale,
        p.architecture.activation if other else "",
    )
    if mapping.stream_only:
        _refuse_what_the_stream_does_not_tell(plan, p)
    return plan


def _refuse_what_the_stream_does_not_tell(plan: Plan, p: Parametrization) -> None:
    """Raise InputError where a scheme changes more than skips, branches and norms, which are all that is known."""
    scores = any(row.score_ratio != 1 or row.shapes or row.mixes_values or row.activates for row in plan.rows)
    if scores or plan.head_ratio != 1 or plan.embedding_ratio != 1:
        what = "what is inside its branches" if scores else "the embeddings or the head"
        raise InputError(
            f"give mapping=, which says what every weight is: scheme {p.scheme!r} changes {what}, and of this model "
            "only the stream, its branches and its norms are known; 'lns' and 'layerscale' need no more"
        )


def _moves(a: Architecture, p: Parametrization, rows: Layout) -> list[str]:
    """The placement that every row is moved to, '' where it stays."""
    out = []
    for i, (mine, theirs) in enumerate(zip(rows.placement.tolist(), p.placement.tolist(), strict=True)):
        has, needs = PLACEMENTS[mine], PLACEMENTS[theirs]
        if has != needs and needs not in _MOVES.get(has, ()):
            raise InputError(
                f"{describe(rows, i)}: scheme {p.scheme!r} needs norm placement {needs!r} and this model has {has!r}, "
                f"which cannot be changed without other forward code; choose a model with placement {needs!r}, or "
                "build(parametrization)"
            )
        out.append("" if has == needs else needs)
    return out


def _stack(
    mapping: Mapping,
    p: Parametrization,
    rows: Layout,
    members: list[int],
    moved: list[str],
    removes_final: bool,
    largest: float,
) -> tuple[list[RowPlan], float]:
    """The rows of one stack, and P after its last one."""
    # whether a carrier has to know the stream: nothing that is added to a stream as it is would do
    needs = [
        moved[i] == "post" or p.skip_trainable != "fixed" or p.skip[i] <= 0 for i in members if not rows.parallel[i]
    ]
    gauge = not any(needs)
    made: list[RowPlan] = []
    last = 1.0
    if gauge:
        made, last = _rows(mapping, p, rows, members, moved, gauge=True)
        raw_end = last != 1 and (removes_final or not p.architecture.has_final_norm)
        raw_read = any(
            row.input_scale != 1 and PLACEMENTS[p.placement[i]] == "none" for i, row in zip(members, made, strict=True)
        )
        extreme = any(not 1 / largest <= abs(row.behind) <= largest for row in made) or any(
            row.treatment == "multiplied" and abs(row.scale) > largest for row in made
        )
        gauge = not (raw_end or raw_read or extreme)
    if not gauge:
        made, last = _rows(mapping, p, rows, members, moved, gauge=False)
    return made, last


def _rows(
    mapping: Mapping, p: Parametrization, rows: Layout, members: list[int], moved: list[str], *, gauge: bool
) -> tuple[list[RowPlan], float]:
    a = p.architecture
    other = p.architecture.activation != mapping.architecture.activation
    made = []
    product = 1.0  # P
    before = 1.0
    for i in members:
        item = mapping.sublayers[i]
        placement = PLACEMENTS[p.placement[i]]
        parallel = bool(rows.parallel[i])
        own_skip, own = own_multipliers(item)  # what the model's code multiplies with
        skip, beta = float(p.skip[i]) / own_skip, float(p.branch[i]) / own
        post = placement == "post"
        if not parallel:
            before = product
            if gauge and not post:
                product *= skip
        unit = skip if gauge and post else product
        own_score = own_score_scale(item, a)
        kind = kind_of(rows, i)
        mixes = kind.attends and bool(p.value_skip[i] != 0 or p.attention_gain[i] != 1 or p.attention_trainable)
        reads = not gauge and not parallel and (moved[i] == "post" or p.skip_trainable != "fixed" or skip != 1)
        if reads and (own_skip, own) != (1, 1):
            raise InputError(
                f"{describe(rows, i)}: scheme {p.scheme!r} needs a skip that trains, is 0 or ends in a norm, and the "
                f"model has multipliers of its own there (skip {own_skip:.3g}, branch {own:.3g}); take another scheme"
            )
        trains = p.branch_trainable != "fixed"
        rewired = reads or trains or beta == 0 or moved[i] == "sandwich"
        scale = (1 / own if rewired else beta) / (unit if gauge else 1.0)
        made.append(
            RowPlan(
                treatment="rewired" if rewired else "none" if scale == 1 else "multiplied",
                scale=scale,
                input_scale=before if gauge and placement in ("none", "res-post") else 1.0,
                reads_stream=reads,
                places_norm=moved[i] == "post",
                removes_norm=moved[i] == "none",
                adds_norm=moved[i] == "sandwich",
                before=before,
                behind=product,
                norm_scale=float(p.norm_scale[i]),
                score_ratio=float(p.score_scale[i]) / own_score if kind.attends and own_score else 1.0,
                eps_factor=(unit if post else before if placement in NORM_BEFORE else 1.0) ** -2 if gauge else 1.0,
                mixes_values=mixes,
                shapes=p.shaping.kind != "none" and kind.attends_itself,
                activates=a.activation if other and kind.activates else "",
            )
        )
    return made, product


def own_multipliers(item: SublayerMap) -> tuple[float, float]:
    """(skip, branch) that a model's own code multiplies with; what trains is left to the model, and counts as 1."""
    skip, branch = (1.0 if isinstance(value, Tensor) else float(value) for value in (item.skip, item.multiplier))
    return skip, branch


def _shared_dropouts(mapping: Mapping, p: Parametrization, rows: Layout, planned: list[RowPlan]) -> list[RowPlan]:
    """Rewired carriers drop out their branch themselves; rows that share the dropout have to as well."""

    def target(i: int) -> str | None:
        item = mapping.sublayers[i]
        return item.dropout if item.dropout is not None else item.branch if isinstance(item.branch, str) else None

    taken = {target(i) for i, row in enumerate(planned) if row.treatment == "rewired"} - {None}
    return [
        row
        if row.treatment == "rewired" or target(i) not in taken
        # its multiplier moves from the fixed number into the rewired carrier
        else replace(row, treatment="rewired", scale=row.scale / float(p.branch[i]))
        for i, row in enumerate(planned)
    ]

"""What has to be done to a model so that it computes the function of a Parametrization: pure arithmetic, no tensors.

The skip stays as it is and the multiplier of a branch becomes beta_k / P_k with P_k = lambda_1 ... lambda_k; the model
carries the stream in units of P, which no norm sees (docs/theory/gauge.md).

What needs other forward code is refused, since `build` has it: norms in other places, another attention or activation,
skips that train or are not positive. A model's fixed multipliers (Granite) stay in its code: lambda_k and beta_k are
what is asked for over those.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from signalprop.attachment.anatomy import Anatomy
from signalprop.attachment.mapping import Mapping
from signalprop.attachment.rows import AttachedRow
from signalprop.errors import InputError
from signalprop.network.activations import activation
from signalprop.network.architecture import Architecture
from signalprop.network.layout import PLACEMENTS
from signalprop.network.parametrization import Parametrization
from signalprop.network.residual import NORM_BEFORE
from signalprop.schemes import SCHEMES, scheme

# Multipliers beyond this lose a stream in fp32 or bf16 (fp16): measured in docs/theory/gauge.md.
LARGEST_MULTIPLIER = {"float16": 1e2}
_LARGEST = 1e8
_SHAPE = (
    "kind", "n_layers", "n_decoder_layers", "d_model", "n_heads", "n_kv_heads", "d_head", "d_ff", "gated",
    "norm", "parallel", "qk_norm", "positions", "n_segments", "embedding_norm", "input", "vocab_size", "patch_dim",
    "head", "n_classes", "head_transform", "tied_embeddings", "layer_inputs",
)  # fmt: skip


@dataclass(frozen=True)
class RowPlan:
    """What is done at one sublayer.

    Attributes:
        scale: the multiplier of the branch where it is fixed; the factor beside it where it trains.
        input_scale: factor on what the maps that read the stream read (branches that read it raw).
        before, behind: P before and after the sublayer: the model's stream times P is the Parametrization's.
        score_ratio: factor on the model's score scale.
        eps_factor: what the epsilon of the row's norm has to be multiplied with for exactness.
    """

    scale: float = 1.0
    input_scale: float = 1.0
    before: float = 1.0
    behind: float = 1.0
    norm_scale: float = 1.0
    score_ratio: float = 1.0
    eps_factor: float = 1.0


@dataclass(frozen=True)
class Plan:
    """All that is done to a model.

    Attributes:
        rows: one per sublayer.
        final_eps: per stack: factor on the epsilon of the norm after it.
        head_ratio, embedding_ratio: factors on the model's head input and embeddings.
    """

    rows: tuple[RowPlan, ...]
    final_eps: tuple[float, ...]
    head_ratio: float
    embedding_ratio: float


def check_shape(model: Architecture, table: Architecture) -> None:
    """Raise InputError where a Parametrization was made for a network of another shape."""
    for name in _SHAPE:
        mine, theirs = getattr(model, name), getattr(table, name)
        if mine != theirs:
            raise InputError(
                f"the parametrization is for another network: {name} is {theirs!r} there and {mine!r} in the "
                "model; make it from Architecture.from_hf(model), or give the scheme's name"
            )


def make_plan(attached: Anatomy, p: Parametrization, *, dtype: str) -> Plan:
    """What has to be done to a model.

    Args:
        attached: the vanilla model. dtype: of its parameters, `float32`, `bfloat16` or `float16`.
    """
    if p.skip.ndim != 1:
        raise InputError(f"this parametrization is a sweep of shape {p.skip.shape[:-1]}; give one of its members")
    if p.norm_bias.any():
        raise InputError("a scheme starts the biases of norms at 0, and this table has others; expected norm_bias 0")
    mapping = attached.mapping
    a = mapping.architecture
    check_shape(a, p.architecture)
    _refuse_other_wiring(attached, p)
    planned: list[RowPlan] = []
    finals = []
    for _, members in groupby(enumerate(attached.rows), lambda item: item[1].stack):
        made, last = _stack(a, p, list(members), LARGEST_MULTIPLIER.get(dtype, _LARGEST))
        planned += made
        finals.append(last**-2)
    head_ratio = 1.0 if a.head == "none" else p.head.scale / mapping.head.scale
    plan = Plan(tuple(planned), tuple(finals), head_ratio, p.embedding.scale / mapping.embedding.scale)
    if mapping.stream_only:
        _refuse_what_the_stream_does_not_tell(mapping, plan, p)
    return plan


def _refuse_what_the_stream_does_not_tell(mapping: Mapping, plan: Plan, p: Parametrization) -> None:
    """Raise InputError where a scheme changes more than skips, branches and norms, which are all that is known."""
    if mapping.rewired and any(row.behind != 1 for row in plan.rows):
        raise InputError(
            f"scheme {p.scheme!r} changes skips, and in this model {mapping.rewired}; 'layerscale' does not"
        )
    scores = any(row.score_ratio != 1 for row in plan.rows)
    if scores or plan.head_ratio != 1 or plan.embedding_ratio != 1:
        what = "the inside of its branches" if scores else "the embeddings or the head"
        raise InputError(
            f"give a mapping, which says what every weight is: scheme {p.scheme!r} changes {what}, and of this model "
            "only the stream, its branches and its norms are known; 'lns' and 'layerscale' need no more"
        )


def _refuse_other_wiring(attached: Anatomy, p: Parametrization) -> None:
    """Raise InputError, with the call of `build`, where a scheme needs other forward code than the model has."""
    a, shaping = attached.mapping.architecture, attached.mapping.shaping
    for i, (row, theirs) in enumerate(zip(attached.rows, p.placement.tolist(), strict=True)):
        has, needs = row.placement, PLACEMENTS[theirs]
        if has != needs:
            _refuse_wiring(a, p, row.label, f"norm placement {needs!r} (the model has {has!r})")
        if row.kind.attends and (p.value_skip[i] != 0 or p.attention_gain[i] != 1 or p.attention_trainable):
            _refuse_wiring(a, p, row.label, "values that bypass the attention")
        if shaping != p.shaping and row.kind.attends_itself:
            what = "plain attention" if p.shaping.kind == "none" else "shaped attention"
            _refuse_wiring(a, p, row.label, what)
    if p.architecture.has_final_norm != a.has_final_norm:
        what = "a norm after the last layer" if p.architecture.has_final_norm else "no norm after the last layer"
        _refuse_wiring(a, p, "the model", what)
    mine, theirs = activation(a.activation).name, activation(p.architecture.activation).name
    if mine != theirs:
        _refuse_wiring(a, p, "the model", f"activation {theirs!r:.60} (the model has {mine!r:.60})")


def _refuse_wiring(a: Architecture, p: Parametrization, where: str, what: str) -> None:
    made = "parametrization"
    if p.scheme in SCHEMES:
        usual = scheme(p.scheme).options()
        given = "".join(f", {name}={value!r}" for name, value in p.options.items() if value != usual.get(name))
        made = f"sp.scheme({p.scheme!r}{given})({'sp.Architecture.from_hf(model)' if a.family else 'architecture'})"
    raise InputError(
        f"{where}: scheme {p.scheme!r} needs {what}, and apply leaves a model's forward code as it is; build a new "
        f"model with it: sp.build({made})"
    )


def _stack(
    a: Architecture, p: Parametrization, members: list[tuple[int, AttachedRow]], largest: float
) -> tuple[list[RowPlan], float]:
    """The rows of one stack, each with its place in the table, and P after its last one."""
    trains = p.branch_trainable != "fixed"
    made = []
    product = before = 1.0  # P after and before a layer
    for i, item in members:
        own_skip, own = item.own_multipliers  # what the model's code multiplies with
        skip, beta = float(p.skip[i]) / own_skip, float(p.branch[i]) / own
        if beta == 0 and not trains:
            _refuse_wiring(a, p, item.label, "no branch (its multiplier is 0)")
        post = item.placement == "post"
        if not item.parallel:
            if p.skip_trainable != "fixed":
                _refuse_wiring(a, p, item.label, "skip multipliers that train (apply takes trainable='fixed')")
            if skip <= 0:
                _refuse_wiring(a, p, item.label, f"a skip multiplier of {skip:.4g}")
            before = product
            product *= 1.0 if post else skip
        unit = skip if post else product
        scale = (1 / own if trains else beta) / unit
        if not 1 / largest <= product <= largest or abs(scale) > largest:
            _refuse_wiring(a, p, item.label, f"skip multipliers in the stream itself (their product is {product:.2g})")
        made.append(
            RowPlan(
                scale=scale,
                input_scale=before if item.placement == "res-post" else 1.0,
                before=before,
                behind=product,
                norm_scale=float(p.norm_scale[i]),
                score_ratio=float(p.score_scale[i]) / item.score_scale
                if item.kind.attends and item.score_scale
                else 1.0,
                eps_factor=(unit if post else before if item.placement in NORM_BEFORE else 1.0) ** -2,
            )
        )
    bare = next((f"{item.label} reads it" for _, item in members if item.placement == "none"), "")
    bare = bare or ("" if a.has_final_norm else "it is read")
    bare = bare or ("" if a.layer_inputs is None else "later layers read it")
    if bare and any(row.behind != 1 for row in made):
        where = members[0][1].label
        _refuse_wiring(a, p, where, f"skip multipliers in the stream itself ({bare} without a norm)")
    return made, product

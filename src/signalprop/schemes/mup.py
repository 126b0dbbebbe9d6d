"""Maximal update parametrizations: hyperparameters of a small network carried to a wide (muP) or deep one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import numpy as np

from signalprop.network.architecture import Architecture
from signalprop.network.embedding_and_head import Head
from signalprop.network.inputs import InputStatistics
from signalprop.network.kinds import ROLE, kind_named
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import ROLES, Parametrization
from signalprop.schemes.base import Scheme, layers_of_stack, register
from signalprop.schemes.options import Whole, within
from signalprop.schemes.stacking import Base, base_table, warn_if_depth_scaled

_WIDEST = 10_000_000


@dataclass(frozen=True)
class _MaximalUpdate(Scheme):
    base: Base = "fixed"
    base_width: Whole = 256
    base_d_head: Whole | None = None
    base_expert_width: Whole | None = None
    base_top_k: Whole | None = None
    zero_outputs: bool = False


@register
@dataclass(frozen=True)
class MuP(_MaximalUpdate):
    """Maximal update parametrization for Adam: the scheme `base` at width `base_width`, and away from it

                    initial variance     factor on its input     Adam's learning rate
        embeddings  base                 base                    1
        hidden      base / m             1                       1 / m
        head        base                 base / m                1
        vectors     base (biases)        1                       1

    with m = d / base_width. "base" is the number that scheme `base` gives to the network of width `base_width`; inner
    widths (heads, feed-forward) are taken to be proportional to d. Scores q.k have the factor 1/d_head instead of
    1/sqrt(d_head), times sqrt(base_d_head), so that nothing changes at the base; `base_d_head` is the head width there
    (default: the same as here, wider networks have more heads, and scores keep their factor).

    Followed: Tensor Programs V, table 8, which gives the head a fixed initial variance and a factor 1/m, not table 3
    (variance 1/m^2, learning rate 1/m, no factor). Adam moves both equally, but only table 8 is defined for tied
    embeddings: the table of variance and learning rate of an embedding, read by the head with a factor 1/m.

    The dense layer before BERT's head is a hidden weight. `parameter_groups` keeps learning rate times weight decay, as
    the authors' package can: m times the decay for hidden weights. Adam's epsilon (1/m) is not scaled. The paper's
    advice to start head and queries at 0 is not followed. `zero_outputs` starts the maps onto the stream at 0: with
    that muP trained at 192 layers in Transformers Get Stable (section 4.5), where it diverged without.

    Experts, at a fixed share of active ones (derived in docs/theory/components.md): `base_expert_width` is the hidden
    width of one at the base, if that is not in proportion to d; m of the map back is then that of the expert's width.
    `base_top_k` is how many a token has at the base: `parameter_groups` divides Adam's epsilon of experts and router by
    top_k / base_top_k, as their gradients are; where an expert's weight is a sigmoid that is not normalised, its map
    back and that map's rate are divided by the same (shared experts stay).
    """

    name: ClassVar[str] = "mup"
    paper: ClassVar[str] = "Yang et al. 2022, arXiv:2203.03466 (Tensor Programs V), table 8"
    summary: ClassVar[str] = "width transfer: hidden variance and Adam rate 1/m, head factor 1/m, m = d / base_width"

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        return _widened(self, architecture, inputs)


@register
@dataclass(frozen=True)
class DepthMuP(_MaximalUpdate):
    """muP for width (see `mup`), and for depth, with L the layers of a stack and m_L = L / `base_depth`:

        branch = m_L^-alpha,    Adam's learning rates in the layers times m_L^(alpha - 1)

    At alpha = 1/2 (default) that is Depth-muP: every branch a/sqrt(L) and every update of Adam smaller by 1/sqrt(L), so
    that L random branches add up to order 1, as do L updates. alpha = 1 is CompleteP: branches 1/L and learning
    rates that do not know the depth; random branches then add up to 1/L only, what training aligns to order 1. Both are
    one family in CompleteP's table 1, which is followed where Yang et al. say nothing: biases, gains and multipliers of
    the layers take the factor too, embeddings, final norm and head do not. At the base depth nothing changes.

    Choose a base that does not know the depth: with scaled initialisation the depth would count twice (a warning).
    Yang et al. derive the rates for blocks of one layer and find no ideal rate for blocks of two or more, which all
    transformers have. Adam's epsilon (`completep` scales it) and SGD (no factor on the learning rate) are not in
    the table.
    """

    name: ClassVar[str] = "depth-mup"
    paper: ClassVar[str] = (
        "Yang et al. 2023, arXiv:2310.02244 (Tensor Programs VI); Dey et al. 2025 (CompleteP), table 1"
    )
    summary: ClassVar[str] = "mup, and branches times m_L^-alpha, Adam rates times m_L^(alpha-1), m_L = L / base_depth"
    base_depth: Whole = 2
    alpha: Annotated[float, within(0.0, 10.0)] = 0.5

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        table = _widened(self, architecture, inputs)
        deeper = layers_of_stack(architecture) / self.base_depth
        rate = deeper ** (self.alpha - 1)
        table = table.with_columns(
            branch=table.branch * deeper**-self.alpha,
            **{f"learning_rate__{name}": column * rate for name, column in table.learning_rates.items()},
        )
        if self.alpha > 0:
            warn_if_depth_scaled(table, self.base, inputs)
        return table


@register
@dataclass(frozen=True)
class CompleteP(DepthMuP):
    """`depth-mup` at alpha = 1, with AdamW's epsilon: branches 1 / m_L, learning rates that do not know the depth.

    AdamW's epsilon is 1 / (m m_L) of the base's in the layers and 1 / m at both ends, as gradients are; weight decay m
    times the base's where the rate is 1 / m. `parameter_groups` gives both. The table of numbers is depth-mup's.
    """

    name: ClassVar[str] = "completep"
    paper: ClassVar[str] = "Dey et al. 2025, NeurIPS, arXiv:2505.01618 (CompleteP), table 1"
    summary: ClassVar[str] = "depth-mup at alpha = 1: branches 1/m_L; Adam's epsilon 1/(m m_L) in parameter groups"
    alpha: Annotated[float, within(0.0, 10.0)] = 1.0


def epsilon_factors(table: Parametrization) -> tuple[FloatArray, float]:
    """Factors on AdamW's epsilon that the scheme of a table asks for: of each sublayer's parameters, of all others.

    1 for every scheme but CompleteP, and the experts of all three.
    """
    a, options = table.architecture, table.options
    of_rows = _more_experts(table, a, options["base_top_k"]) ** -1.0 if options.get("base_top_k") else np.ones(1)
    of_rows = np.broadcast_to(of_rows, (table.n_sublayers,))
    if table.scheme != CompleteP.name:
        return of_rows, 1.0
    wider = a.d_model / float(options["base_width"])
    deeper = layers_of_stack(a) / float(options["base_depth"])
    return of_rows * deeper ** -float(options["alpha"]) / wider, 1 / wider


def _more_experts(table: Parametrization, a: Architecture, base_top_k: Any) -> FloatArray:
    """How many times more experts a token has than at the base, of every sublayer; 1 of other kinds."""
    experts = kind_named("experts")
    given: Any = a.settings.get(experts.name)
    return np.where(experts.of(table), 1.0 if given is None else given.top_k / float(base_top_k), 1.0)


def _widened(made_by: MuP | DepthMuP, architecture: Architecture, inputs: InputStatistics | None) -> Parametrization:
    """The base's table at the base width, carried to the architecture's width."""
    a = architecture
    narrow, score_scale = _base_architecture(made_by, a)
    table = base_table(made_by, made_by.base, narrow, inputs)
    wider = a.d_model / narrow.d_model
    columns: dict[str, FloatArray | float] = {}
    for role in ROLES:
        columns[f"weight__{role}"] = table.weights[role] / math.sqrt(wider)
        columns[f"learning_rate__{role}"] = table.learning_rates[role] / wider
    experts: Any = a.settings.get("experts")
    if made_by.base_expert_width is not None and experts is not None:
        of_expert = (experts.width or a.d_ff) / made_by.base_expert_width
        columns["weight__expert_down"] = table.weights["expert_down"] / math.sqrt(of_expert)
        columns["learning_rate__expert_down"] = table.learning_rates["expert_down"] / of_expert
    if (
        made_by.base_top_k is not None
        and experts is not None
        and not (experts.normalised or experts.scores == "softmax")
    ):
        for name in ("weight__expert_down", "learning_rate__expert_down"):
            columns[name] /= _more_experts(table, a, made_by.base_top_k)
    if made_by.zero_outputs:
        columns |= {f"weight__{name}": 0.0 * table.weights[name] for name, role in ROLE.items() if role.writes}
    head = table.head.model_dump() | {
        "scale": table.head.scale / wider,
        "transform": table.head.transform / math.sqrt(wider),
        "transform_learning_rate": table.head.transform_learning_rate / wider,
    }
    return replace(table, architecture=a, head=Head(**head)).with_columns(
        score_scale=table.score_scale * (score_scale / narrow.score_scale), **columns
    )


def _base_architecture(made_by: MuP | DepthMuP, a: Architecture) -> tuple[Architecture, float]:
    """The network at the base width, and the factor on scores that the wide one has."""
    experts: Any = a.settings.get("experts")
    if experts is not None:
        top_k = made_by.base_top_k or experts.top_k
        own = {"top_k": top_k, "n_experts": max(round(experts.n_experts * top_k / experts.top_k), top_k)}
        own |= {"width": made_by.base_expert_width} if made_by.base_expert_width else {}
        if own != {name: getattr(experts, name) for name in own}:
            given = {**experts.model_dump(), **own, "n_groups": 1, "top_groups": 1}
            a = a.replace(settings={**a.settings, "experts": given})
    if made_by.base_d_head is None:
        return a.replace(d_model=made_by.base_width), a.score_scale
    narrow = a.replace(d_model=made_by.base_width, d_head=made_by.base_d_head)
    return narrow, narrow.score_scale * made_by.base_d_head / a.d_head

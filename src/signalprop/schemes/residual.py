"""Methods that put a number on each residual branch: a trainable gate, a factor by depth, a normalised skip."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from signalprop.errors import InputError
from signalprop.network.architecture import Architecture
from signalprop.network.duals import dual
from signalprop.network.inputs import InputStatistics
from signalprop.network.kinds import rows_where
from signalprop.network.layout import stacks_of
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import ROLES, Parametrization, fan, layout
from signalprop.schemes.base import Scheme, fill, layers_of_stack, register, xavier_std
from signalprop.schemes.options import Number, Positive, Share
from signalprop.schemes.vanilla import head_of, one_std, same_embedding, stream_ends


def fan_in_std(architecture: Architecture) -> dict[str, float]:
    """Standard deviations of He et al. 2023 (SPA, appendix H.1): variance 1/fan_in, and 1/(d_ff E f^2) after f.

    E f^2 is that of a standard normal pre-activation (times 1 for the up path of a gated block), so that every map
    keeps the mean square 1 of what it reads. A factor on q.k other than 1/sqrt(d_head) goes into the queries.
    """
    a = architecture
    std: dict[str, float] = {role: fan(a, role)[0] ** -0.5 for role in ROLES}
    std["query"] /= a.score_scale * math.sqrt(a.d_head)
    std["down"] = (a.d_ff * float(dual(a.activation, 1.0, 0.0).second_moment)) ** -0.5
    return std


def without_norms(architecture: Architecture) -> Architecture:
    """The architecture without norms on the stream: none at the sublayers, none after the last one.

    A norm on the embeddings, in a head's dense layer, or of queries and keys stays: it is not part of the stream.
    """
    return architecture.replace(norm_placement="none", final_norm=False)


def branches_of_stack(architecture: Architecture) -> FloatArray:
    """Number of residual branches of the stack that each sublayer belongs to."""
    lengths = [len(rows) for _, rows in stacks_of(layout(architecture))]
    return np.repeat(np.array(lengths, np.float64), lengths)


def _attends(architecture: Architecture) -> NDArray[np.bool_]:
    return rows_where(layout(architecture), lambda kind: kind.attends)


@register
@dataclass(frozen=True)
class SkipInit(Scheme):
    """x <- x + beta f(x), beta a trainable scalar per branch that starts at 0; no norms.

    De and Smith put the scalar at the end of every residual branch in place of normalisation, start it at 0 (or at any
    constant up to 1/sqrt(number of branches): option `beta`), and draw weights with He's fan-in variance. Transformers
    as in He et al. 2023 (SPA, tables 2 and 7): `norm=True` keeps the architecture's norms, which they tried too;
    weights are theirs, variance 1/fan_in and 1/(d_ff E f^2) after the activation. Embeddings and head as in `xavier`.
    """

    name: ClassVar[str] = "skipinit"
    paper: ClassVar[str] = "De and Smith 2020, NeurIPS; in transformers He et al. 2023, ICLR, table 7"
    summary: ClassVar[str] = "no norms; a trainable scalar on every branch, 0 at the start"
    beta: Number = 0.0
    norm: bool = False

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        a = architecture if self.norm else without_norms(architecture)
        return stream_ends(replace(fill(a, self, fan_in_std(a), branch=self.beta), branch_trainable="scalar"))


@register
@dataclass(frozen=True)
class ReZero(Scheme):
    """x <- x + alpha f(x), alpha a trainable scalar that starts at 0; no norms, no warm-up.

    Not exact in one point: the paper and its code give both sublayers of a layer one common alpha, the table has one
    per sublayer. The function is the same at the start; in training the two may part. The paper leaves the weights
    alone (its code: PyTorch's defaults); here they are Xavier's, embeddings and head as in `xavier`.
    """

    name: ClassVar[str] = "rezero"
    paper: ClassVar[str] = "Bachlechner et al. 2021, UAI (ReZero is all you need)"
    summary: ClassVar[str] = "no norms; a trainable scalar on every branch, 0 at the start; Xavier weights"

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        a = without_norms(architecture)
        table = fill(a, self, {role: xavier_std(a, role) for role in ROLES}, branch=0.0)
        return stream_ends(replace(table, branch_trainable="scalar"))


@register
@dataclass(frozen=True)
class LayerScale(Scheme):
    """x <- x + diag(gamma) f(norm(x)), gamma trainable, one number per channel, that starts at epsilon.

    epsilon = 0.1 up to 18 layers, 1e-5 up to 24, 1e-6 in deeper stacks (by the depth of each stack), or the option.
    The paper's networks are pre-norm; the placement stays the architecture's. Weights and embeddings as in its code:
    standard deviation `std` (0.02), of which the truncation lies 100 standard deviations out.
    """

    name: ClassVar[str] = "layerscale"
    paper: ClassVar[str] = "Touvron et al. 2021, ICCV (Going deeper with image transformers)"
    summary: ClassVar[str] = "a trainable factor per channel on every branch, 0.1 to 1e-6 at the start, by depth"
    epsilon: Positive | None = None
    std: Positive = 0.02

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        depth = layers_of_stack(architecture)
        published = np.select([depth <= 18, depth <= 24], [0.1, 1e-5], 1e-6)
        branch = published if self.epsilon is None else self.epsilon
        table = one_std(architecture, self, self.std, residual=1.0).with_columns(branch=branch)
        return replace(table, branch_trainable="channel")


@register
@dataclass(frozen=True)
class StableResNet(Scheme):
    """x <- x + beta_l f(x) with sum_l beta_l^2 bounded in depth; skip 1.

    Hayou et al.: beta = 1/sqrt(L), L the number of residual branches (of the stack), or, with `decreasing=True`,
    beta_l = 1/(sqrt(l) log(l + 1)) for branch l = 1, 2, ..., which does not depend on the depth. He et al. 2023 (SPA,
    table 7) tuned two constants for 32 blocks: give them as `beta_attention` and `beta_feed_forward` (0.2 and 0.15 with
    norms, 0.05 and 0.1 without). Weights, embeddings and head as in `skipinit`. `norm=False` removes the norms.
    """

    name: ClassVar[str] = "stable-resnet"
    paper: ClassVar[str] = "Hayou et al. 2021, AISTATS; in transformers He et al. 2023, ICLR, table 7"
    summary: ClassVar[str] = "skip 1, branch 1/sqrt(number of branches), or decreasing with depth"
    beta_attention: Number | None = None
    beta_feed_forward: Number | None = None
    decreasing: bool = False
    norm: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beta_attention", "beta_feed_forward"):
            if self.decreasing and getattr(self, name) is not None:
                raise InputError(f"options {name} and decreasing of scheme {self.name!r} exclude each other")

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        a = architecture if self.norm else without_norms(architecture)
        n = branches_of_stack(a)
        beta = n**-0.5
        if self.decreasing:
            index = np.concatenate([np.arange(1.0, len(rows) + 1) for _, rows in stacks_of(layout(a))])
            beta = index**-0.5 / np.log(index + 1)
        attention = beta if self.beta_attention is None else self.beta_attention
        feed_forward = beta if self.beta_feed_forward is None else self.beta_feed_forward
        column = np.where(_attends(a), attention, feed_forward)
        return stream_ends(fill(a, self, fan_in_std(a), branch=column))


@register
@dataclass(frozen=True)
class NormalisedSkip(Scheme):
    """x <- alpha x + sqrt(1 - alpha^2) f(x), with an alpha for attention and one for feed-forward sublayers.

    Where branch and stream have the same size, the stream keeps it. Defaults are those that He et al. 2023 (SPA,
    table 7) tuned for standard attention in 32 blocks: 0.99 and 0.99 with norms, 0.999 and 0.99 without
    (`norm=False`). They do not know the depth; `k` sets alpha^2 = 1 - k/N for both instead (N layers of the stack; at
    least 0), which is what TGS does with it. Weights, embeddings and head as in `skipinit`.
    """

    name: ClassVar[str] = "normalised-skip"
    paper: ClassVar[str] = "He et al. 2023, ICLR (Deep transformers without shortcuts), section 4 and table 7"
    summary: ClassVar[str] = "skip alpha, branch sqrt(1 - alpha^2); alpha for attention and for feed-forward"
    alpha_attention: Share | None = None
    alpha_feed_forward: Share | None = None
    k: Positive | None = None
    norm: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("alpha_attention", "alpha_feed_forward"):
            if self.k is not None and getattr(self, name) is not None:
                raise InputError(f"options {name} and k of scheme {self.name!r} exclude each other; give one")

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        a = architecture if self.norm else without_norms(architecture)
        if self.k is None:
            attention = (0.99 if self.norm else 0.999) if self.alpha_attention is None else self.alpha_attention
            feed_forward = 0.99 if self.alpha_feed_forward is None else self.alpha_feed_forward
            alpha2 = np.where(_attends(a), attention, feed_forward) ** 2
        else:
            alpha2 = np.maximum(0.0, 1 - self.k / layers_of_stack(a))
        return stream_ends(fill(a, self, fan_in_std(a), skip=np.sqrt(alpha2), branch=np.sqrt(1 - alpha2)))


@register
@dataclass(frozen=True)
class Noci(Scheme):
    """x <- x + f(x)/sqrt(N), N layers of the stack (or `beta` f(x)), with weights of variance 1/fan_out of one head.

    The paper has one head, queries, keys and values of variance 1/d_k and 1/d_v, and residual factors
    alpha_1 = alpha_2 = 1/sqrt(L) against rank collapse. For several heads this follows TGS (section 4.5; v1 appendix
    F), which reads it as 1/fan_out of each head's matrix: queries, keys and values 1/d_head, everything else
    1/fan_out. Attention then weighs n_heads times as much as under Xavier, scores have variance n_heads^2, and without
    residual factor (`beta=1`) and dropout the tokens collapse. Embeddings and head as in `xavier`; the placement stays.
    """

    name: ClassVar[str] = "noci"
    paper: ClassVar[str] = "Noci et al. 2022, NeurIPS; several heads as TGS section 4.5 and v1 appendix F"
    summary: ClassVar[str] = "skip 1, branch 1/sqrt(n_layers); query, key, value variance 1/d_head, else 1/fan_out"
    beta: Number | None = None

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        a = architecture
        std = {role: fan(a, role)[1] ** -0.5 for role in ROLES}
        std |= dict.fromkeys(("query", "key", "value"), a.d_head**-0.5)
        branch = layers_of_stack(a) ** -0.5 if self.beta is None else self.beta
        return stream_ends(fill(a, self, std, branch=branch))


@register
@dataclass(frozen=True)
class MiniCPM(Scheme):
    """The three multipliers that MiniCPM's models carry: x <- x + s f(x) / sqrt(N), embeddings and head scaled.

    s = `scale_depth` = 1.4, N layers of the stack; embeddings times `scale_embedding` = 12; the head reads its input
    divided by m = d / `base_width`. Hidden weights have standard deviation `std` / sqrt(m) and Adam rate 1 / m, tables
    `std` = 0.1: muP, of table 8 (see `mup`). Granite carries constants in the same places, by model: 0.22 on the
    branches of 40 layers is 1.39 / sqrt(40).
    """

    name: ClassVar[str] = "minicpm"
    paper: ClassVar[str] = "Hu et al. 2024, arXiv:2404.06395 (MiniCPM); transformers 5.23, models/minicpm3"
    summary: ClassVar[str] = "branch 1.4/sqrt(n_layers), embeddings times 12, head input divided by d / base_width"
    scale_depth: Positive = 1.4
    scale_embedding: Positive = 12.0
    base_width: Positive = 256
    std: Positive = 0.1

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        a = architecture
        m = a.d_model / self.base_width
        table = one_std(a, self, self.std / math.sqrt(m), residual=1.0)
        if a.input == "tokens":
            embedding = same_embedding(a, self.std).model_copy(
                update={"scale": a.embedding_scale * self.scale_embedding}
            )
        else:  # no table whose output a model could multiply: weights of the same effect
            embedding = same_embedding(a, self.std * self.scale_embedding)
        table = table.with_columns(
            branch=self.scale_depth * layers_of_stack(a) ** -0.5,
            **{f"learning_rate__{role}": 1 / m for role in ROLES},
        )
        return replace(table, embedding=embedding, head=head_of(a, self.std, embedding, scale=1 / m))

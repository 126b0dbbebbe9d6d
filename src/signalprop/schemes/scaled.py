"""Methods that make initial weights smaller by depth: scaled initialisation, DS-Init, Fixup, T-Fixup; and Bamboo."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics
from signalprop.network.kinds import ROLE, kinds_where
from signalprop.network.parametrization import ROLES, Embedding, Head, Parametrization, layout
from signalprop.schemes.base import Scheme, fill, layers_of_stack, register, xavier_std
from signalprop.schemes.options import Positive
from signalprop.schemes.residual import without_norms
from signalprop.schemes.vanilla import one_std, stream_ends, unit_embedding

_ATTENTION = [role.name for kind in kinds_where(lambda kind: kind.attends) for role in kind.roles]


@register
@dataclass(frozen=True)
class Takase(Scheme):
    """Small sublayers and a large shortcut: std sqrt(2/(5d)), residual weights / sqrt(2N), embeddings * sqrt(d).

    Every weight and table is normal with `std` (default sqrt(2/(5 d_model))), the two matrices that write to the stream
    are divided by sqrt(2N), N layers, and what the tables give is multiplied by sqrt(d_model) ("scaled embed"), so that
    the stream starts with variance 2/5 per table (for patches the weights themselves are that large). Sun et al. 2025
    (Curse of Depth) cite this paper for "scaled initialization", but their code does what `gpt2` does here, or
    `scaled_embedding=False, std=0.02`; followed is Takase et al. The placement stays the architecture's (theirs:
    pre-norm).
    """

    name: ClassVar[str] = "takase"
    paper: ClassVar[str] = "Takase et al. 2023, arXiv:2312.16903 (Spike No More), small sub-layers and scaled embed"
    summary: ClassVar[str] = "std sqrt(2/(5d)), output projections / sqrt(2 n_layers), embeddings times sqrt(d)"
    std: Positive | None = None
    scaled_embedding: bool = True

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        a = architecture
        std = math.sqrt(2 / (5 * a.d_model)) if self.std is None else self.std
        table = one_std(a, self, std, residual=1 / math.sqrt(2 * a.n_layers_total))
        if not self.scaled_embedding:
            return table
        scale = math.sqrt(a.d_model)
        changes = {"scale": scale}
        if a.input == "patches":  # no table: weights of the same effect, where a map adds up patch_dim numbers
            size = std * scale / a.embedding_scale
            changes = {
                "token": size / math.sqrt(a.patch_dim),
                "position": size if table.embedding.position > 0 else 0.0,
            }
        return replace(table, embedding=Embedding(**table.embedding.model_dump() | changes))


@register
@dataclass(frozen=True)
class DSInit(Scheme):
    """Every weight of layer l = 1, 2, ... is uniform on +-alpha g / sqrt(l), with g = sqrt(6 / (fan_in + fan_out)).

    Queries and keys are scaled too; layers are counted per stack; `alpha` is 1 in the paper's experiments. So the
    variance of a branch falls as 1/l^2. The authors' released code passes 1/sqrt(l) as a factor on the *variance*
    (standard deviation l^(-1/4)); followed is the paper's equation, as TGS does. The paper's networks are post-norm;
    the placement stays the architecture's. Embeddings and head as in `xavier`.
    """

    name: ClassVar[str] = "ds-init"
    paper: ClassVar[str] = "Zhang, Titov and Sennrich 2019, EMNLP (depth-scaled initialization)"
    summary: ClassVar[str] = "Xavier, uniform; every weight of layer l divided by sqrt(l)"
    alpha: Positive = 1.0

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        a = architecture
        scale = self.alpha / np.sqrt(1.0 + layout(a).layer)
        return _uniform(stream_ends(fill(a, self, {role: scale * xavier_std(a, role) for role in ROLES})))


@register
@dataclass(frozen=True)
class Fixup(Scheme):
    """Last matrix of every branch 0, its others Xavier / L^(1/(2m - 2)), a trainable scalar per branch; no norms.

    L counts the residual branches of all stacks, m the matrices of a branch: 4 in attention, as in the authors'
    transformer, 2 in feed-forward, 3 if it is gated (beyond the paper). So queries, keys and values are divided by
    L^(1/6), the first feed-forward map by sqrt(L) (gate and up: L^(1/4)); output and down start at 0, as does a
    head that is not tied. The branch multiplier starts at 1.

    Not exact: Fixup's scalar biases before each map and activation (0 at the start) have no column; biases that the
    architecture has start at 0 as well and can take their part. Embeddings as in `xavier` (the authors': of that size).
    """

    name: ClassVar[str] = "fixup"
    paper: ClassVar[str] = "Zhang, Dauphin and Ma 2019, ICLR; m = 4 in attention from the released code"
    summary: ClassVar[str] = "no norms; last matrix of a branch 0, others Xavier / L^(1/(2m-2)), a trainable scalar"

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        a = without_norms(architecture)
        n_branches = len(layout(a).kind)
        attention, feed_forward = n_branches ** (-1 / 6), n_branches ** (-1 / 4 if a.gated else -1 / 2)
        std = {
            role: 0.0 if made.writes else xavier_std(a, role) * (attention if role in _ATTENTION else feed_forward)
            for role, made in ROLE.items()
        }
        table = _uniform(stream_ends(replace(fill(a, self, std), branch_trainable="scalar")))
        if a.has_tied_head or a.head == "none":
            return table
        return replace(table, head=Head(**table.head.model_dump() | {"weight": 0.0}))


@register
@dataclass(frozen=True)
class TFixup(Scheme):
    """Xavier, values, outputs and feed-forward times 0.67 N^(-1/4) in encoders, (9N)^(-1/4) in decoders; no norms.

    N is the depth of the stack. Token embeddings have standard deviation d^(-1/2) (9N)^(-1/4) and are multiplied by
    sqrt(d), as in the authors' code (fairseq), so the stream's tokens have (9N)^(-1/4); where the architecture has
    another factor on embeddings, the table takes up the difference, and the head's input its inverse. Learned positions
    and segments like tokens; sinusoids stay as large as they are. An embedding norm stays, with the gain that makes
    its output as large. N of the embeddings is the encoder's (one table for both stacks, as in the code).

    Queries and keys are Xavier's (paper; the code's have 1/sqrt(2) of that). Beyond the paper: an encoder or a decoder
    alone has the constants of its kind; the three matrices of a gated block share the factor of two (its 2/3 power).
    """

    name: ClassVar[str] = "t-fixup"
    paper: ClassVar[str] = "Huang, Perez, Ba and Volkovs 2020, ICML (T-Fixup)"
    summary: ClassVar[str] = "no norms; Xavier times 0.67 N^(-1/4) in encoders, (9N)^(-1/4) in decoders and embeddings"

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        a = without_norms(architecture)
        depth = layers_of_stack(a)
        factor = np.where(layout(a).stack == 0, 0.67 * depth**-0.25, (9 * depth) ** -0.25)
        gated = factor ** (2 / 3)
        std: dict[str, ArrayLike] = {role: xavier_std(a, role) for role in ROLES}
        for role in ROLES:
            if role not in ("query", "key"):
                std[role] = xavier_std(a, role) * (gated if a.gated and role not in _ATTENTION else factor)
        size = (9 * a.n_layers) ** -0.25
        embedding = _t_fixup_embedding(a, size)
        head = Head(
            weight=embedding.token if a.has_tied_head else 1 / math.sqrt(a.d_model),
            scale=a.embedding_scale / math.sqrt(a.d_model) if a.has_tied_head else 1.0,
            transform=1 / math.sqrt(a.d_model) if a.head_transform else 0.0,
        )
        return _uniform(replace(fill(a, self, std), embedding=embedding, head=head))


def _t_fixup_embedding(architecture: Architecture, size: float) -> Embedding:
    """Tables whose rows have standard deviation `size` in the stream; sinusoids have their mean square 1/2.

    Convolutions over frames, of which the paper knows nothing, are those of `unit_embedding`.
    """
    a = architecture
    std = size / a.embedding_scale
    of_kind = {"learned": std, "sinusoidal": math.sqrt(0.5) / a.embedding_scale}
    position, segment = of_kind.get(a.positions, 0.0), std if a.n_segments else 0.0
    unit = unit_embedding(a)
    token = std / math.sqrt(a.patch_dim) if a.input == "patches" else std
    changes = {
        "token": token if unit.token > 0 else 0.0,
        "position": position,
        "decoder_position": None if a.decoder_positions is None else of_kind.get(a.decoder_positions, 0.0),
        "segment": segment,
        "norm_gain": a.embedding_scale * math.hypot(std, position, segment) if a.embedding_norm else 1.0,
    }
    return Embedding(**unit.model_dump() | changes)


@register
@dataclass(frozen=True)
class Bamboo(Scheme):
    """A vanilla pre-norm network: x <- x + f(norm(x)) with Xavier weights, embeddings and head as in `xavier`.

    Xue et al. propose deeper and narrower configurations, with masked autoencoding as the objective, and no new
    initialisation. TGS (section 4.5) compares with it as "a vanilla Pre-LN transformer"; that is what this is. Choose
    depth and width yourself.
    """

    name: ClassVar[str] = "bamboo"
    paper: ClassVar[str] = "Xue et al. 2023, ICML (A study on transformer configuration), as read by TGS section 4.5"
    summary: ClassVar[str] = "vanilla pre-norm: Xavier, skip = branch = 1"

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        a = architecture.replace(norm_placement="pre")
        return stream_ends(fill(a, self, {role: xavier_std(a, role) for role in ROLES}))


def _uniform(table: Parametrization) -> Parametrization:
    """The table with uniform weights (the variances stay)."""
    return replace(table, distribution=dict.fromkeys(ROLES, "uniform"))

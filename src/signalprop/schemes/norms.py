"""Methods that place or scale norms: DeepNorm, KEEL, ADMIN, Mix-LN, LayerNorm Scaling, sandwich norm."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from signalprop.data.batches import default_statistics
from signalprop.errors import InputError
from signalprop.network.architecture import Architecture, Placement
from signalprop.network.embedding_and_head import LARGEST
from signalprop.network.inputs import InputStatistics
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import ROLES, Parametrization, Trainable, layout
from signalprop.results.profile import Profile
from signalprop.schemes.base import Scheme, fill, register, xavier_std
from signalprop.schemes.options import Positive, Share
from signalprop.schemes.residual import branches_of_stack
from signalprop.schemes.stacking import Base, base_table, placed, warn_if_depth_scaled
from signalprop.schemes.vanilla import stream_ends
from signalprop.theory.network import predict_moments


@dataclass(frozen=True)
class OnBase(Scheme):
    """What methods that say nothing of weights share: the scheme that draws them."""

    base: Base = "fixed"


@register
@dataclass(frozen=True)
class DeepNorm(Scheme):
    """Post-norm with a large skip: stream_out = norm(alpha * stream_in + f(stream_in)); small values and feed-forwards.

    Weights are Xavier's, normal: gain beta for values, outputs and feed-forwards, gain 1 for queries and keys. N
    encoder, M decoder layers:

        encoder alone:    alpha = (2N)^(1/4),              beta = (8N)^(-1/4)
        decoder alone:    alpha = (2M)^(1/4),              beta = (8M)^(-1/4)
        both: encoder     alpha = 0.81 (N^4 M)^(1/16),     beta = 0.87 (N^4 M)^(-1/16)
              decoder     alpha = (3M)^(1/4),              beta = (12M)^(-1/4)

    alpha stands on the skip, not on the branch. Values are scaled where queries, keys and values are one matrix too;
    each of the three counts its fan-out. A gated feed-forward (beyond the paper) has gain beta on all three
    matrices. Followed: the paper's figure 2. The authors' torchscale draws uniformly and gives queries, keys and values
    another factor 1/sqrt(2), which it inherits from fairseq.
    """

    name: ClassVar[str] = "deepnorm"
    paper: ClassVar[str] = "Wang et al. 2022, arXiv:2203.00555 (DeepNet), figure 2"
    summary: ClassVar[str] = "post-norm; skip = alpha(N), Xavier gain beta(N) on values, outputs, feed-forwards"

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        a = placed(architecture, "post")
        alpha, beta = self.constants(a)
        gain = {role: 1.0 if role in ("query", "key") else beta for role in ROLES}
        return stream_ends(fill(a, self, {role: gain[role] * xavier_std(a, role) for role in ROLES}, skip=alpha))

    def constants(self, architecture: Architecture) -> tuple[FloatArray, FloatArray]:
        """alpha and beta of every sublayer."""
        a, rows = architecture, layout(architecture)
        n, m = a.n_layers, a.n_decoder_layers
        if m is None:
            pairs = [((2 * n) ** 0.25, (8 * n) ** -0.25)] * 2
        else:
            size = (n**4 * m) ** (1 / 16)
            pairs = [(0.81 * size, 0.87 / size), ((3 * m) ** 0.25, (12 * m) ** -0.25)]
        alpha, beta = np.array(pairs)[rows.stack].T
        return alpha, beta


@register
@dataclass(frozen=True)
class Keel(OnBase):
    """Post-norm with a skip of the number of branches: stream_out = norm(alpha * stream_in + f(norm(stream_in))).

    alpha = 2N, the branches of the stack, or the option. At initialisation the inner norm is not there: it reads a
    stream that the norm before it has just made, and a norm of a norm is that norm (the first branch reads embeddings
    of variance 1). So the table is post-norm with skip alpha. In training the gains of the two norms part, which the
    table cannot hold. Weights, embeddings and head: those of `base`, xavier.
    """

    name: ClassVar[str] = "keel"
    paper: ClassVar[str] = "Chen and Wei 2026, arXiv:2601.19895 (Post-LayerNorm Is Back)"
    summary: ClassVar[str] = "post-norm; skip = number of branches (Keel, at initialisation)"
    base: Base = "xavier"
    alpha: Positive | None = None

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        a = placed(architecture, "post")
        alpha = branches_of_stack(a) if self.alpha is None else self.alpha
        return base_table(self, self.base, a, inputs).with_columns(skip=alpha)


@register
@dataclass(frozen=True)
class Admin(Scheme):
    """Adaptive model initialization: post-norm, stream_out = norm(omega * stream_in + f(stream_in)), omega profiled.

        omega_1 = 1,    omega_i^2 = 1 + sum_{j < i} Var f_j

    over the sublayers of one stack. Var f_j is the variance of a branch, after its dropout, over all its entries, in a
    profiling pass: Xavier weights, omega = 1. `branch_variances` gives them, one per sublayer; without them they are
    predicted (fidelity `moments`, for the statistics that the scheme is called with; in a decoder of 12 layers that
    moves omega by up to 4 % from fidelity `kernel`). To measure them, give `profiling(architecture)` to a model,
    measure it, and take `profiled(profile)`. omega is a trainable vector with one entry per channel as in the paper;
    `trainable` = `scalar` or `fixed` for less.

    Followed: the paper's equation, with the released code's omega_1 = 1. There the 1 is the variance of the stack's
    input, for which the code takes the measured number from the second sublayer on; here tables give the input variance
    1. The code also sets each omega as soon as it is known, within the same pass; that changes nothing but the token
    correlation at the later branches. The later package admin-torch needs no profiling: omega^2 =
    (n + 1) / ln(n + 1) - 1 for all n sublayers.
    """

    name: ClassVar[str] = "admin"
    paper: ClassVar[str] = "Liu et al. 2020, EMNLP (Understanding the Difficulty of Training Transformers), section 4"
    summary: ClassVar[str] = "post-norm; skip^2 = 1 + the variances of the branches before, profiled or predicted"
    branch_variances: tuple[float, ...] = ()
    trainable: Trainable = "channel"

    def __post_init__(self) -> None:
        super().__post_init__()
        given: Any = self.branch_variances
        if not isinstance(given, (tuple, list)):
            raise InputError(f"branch_variances of scheme 'admin' is {given!r:.60}; expected one number per sublayer")
        for value in given:
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= LARGEST:
                raise InputError(f"branch_variances of scheme 'admin' holds {value!r:.60}; expected a variance >= 0")
        object.__setattr__(self, "branch_variances", tuple(float(value) for value in given))

    def options(self) -> dict[str, Any]:
        """The options by name; the variances as a list, as in the JSON form."""
        return {"branch_variances": list(self.branch_variances), "trainable": self.trainable}

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        table = self.profiling(architecture)
        variances = np.array(self.branch_variances or self._predicted(table, inputs))
        if variances.shape != table.skip.shape:
            raise InputError(
                f"branch_variances of scheme 'admin' holds {len(variances)} numbers; the architecture has "
                f"{table.n_sublayers} sublayers"
            )
        before = np.zeros_like(variances)
        for stack in np.unique(table.stack):
            mine = table.stack == stack
            before[mine] = np.cumsum(variances[mine]) - variances[mine]
        return table.with_columns(skip=np.sqrt(1 + before))

    def profiling(self, architecture: Architecture) -> Parametrization:
        """The table of the profiling pass: post-norm, Xavier weights, skip = branch = 1."""
        a = placed(architecture, "post")
        table = stream_ends(fill(a, self, {role: xavier_std(a, role) for role in ROLES}))
        return replace(table, skip_trainable=self.trainable)

    def profiled(self, profile: Profile) -> Admin:
        """The scheme with the branch variances of a profile, best a measured one of a model with `profiling`'s table.

        Raises:
            InputError: the profile is of a model that is not post-norm, or has multipliers.
        """
        gain = np.asarray(profile.statistics.get("branch_gain", 1.0), np.float64)
        if set(profile.architecture.placements) != {"post"} or not np.allclose(gain, 1.0, rtol=1e-3):
            raise InputError(
                "the profile is not of a post-norm model with skip = branch = 1; measure one that has the table of "
                "`Admin().profiling(architecture)`"
            )
        return replace(self, branch_variances=tuple(profile.forward["branch"].variance.tolist()))

    def _predicted(self, table: Parametrization, inputs: InputStatistics | None) -> FloatArray:
        statistics = inputs or default_statistics(table.architecture)
        return predict_moments(table, statistics, backward=False).forward["branch"].variance


@register
@dataclass(frozen=True)
class MixLN(OnBase):
    """The first floor(alpha N) layers of a stack are post-norm, the others pre-norm; alpha is `post_share`.

    0.25 in the paper; the released code is given the count: 3 of 12 layers, 6 of 24. An encoder-decoder (beyond the
    paper) is split stack by stack. `base` draws the weights: one standard deviation of 0.02, as in the paper's Llama
    models (whose released code has embeddings of 0.632).
    """

    name: ClassVar[str] = "mix-ln"
    paper: ClassVar[str] = "Li, Yin and Liu 2024, arXiv:2412.13795 (Mix-LN)"
    summary: ClassVar[str] = "the first quarter of the layers post-norm, the others pre-norm"
    post_share: Share = 0.25

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        a = architecture
        places = self.placements(a.n_layers) + self.placements(a.n_decoder_layers or 0)
        if places != a.placements:
            a = a.replace(norm_placement=places)
        return base_table(self, self.base, a, inputs)

    def placements(self, n_layers: int) -> tuple[Placement, ...]:
        """Norm placement of every layer of a stack."""
        post = math.floor(self.post_share * n_layers + 1e-9)  # 0.29 * 100 is 28.999...
        return tuple("post" if layer < post else "pre" for layer in range(n_layers))


@register
@dataclass(frozen=True)
class LayerNormScaling(OnBase):
    """Pre-norm; the norms of layer l output 1/sqrt(l): stream_out = stream_in + f(norm(stream_in) / sqrt(l)).

    l counts layers from 1, in an encoder-decoder (beyond the paper) those of the stack; both sublayers of a layer have
    the same l; the final norm is not scaled (released code). The factor is fixed, stands after the norm's gain, and has
    no parameter. `base` draws the weights: one standard deviation of 0.02, as in the released Llama models.

    At initialisation a branch that is of degree k in its input (attention and ReLU: 1, gated SiLU: about 2) has its
    variance divided by l^k, so that the stream's variance grows like ln l or stays bounded, instead of like l. A base
    that makes branches smaller with depth too (scaled initialisation) leaves it little to do: a warning says how much.
    """

    name: ClassVar[str] = "lns"
    paper: ClassVar[str] = "Sun et al. 2025, arXiv:2502.05795 (The Curse of Depth in Large Language Models), eq. 1"
    summary: ClassVar[str] = "pre-norm; norm outputs of layer l divided by sqrt(l) (LayerNorm Scaling)"

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        table = base_table(self, self.base, placed(architecture, "pre"), inputs)
        table = table.with_columns(norm_scale=1 / np.sqrt(1.0 + table.layer))
        warn_if_depth_scaled(table, self.base, inputs)
        return table


@register
@dataclass(frozen=True)
class SandwichNorm(OnBase):
    """A norm on the branch's input and one on its output: stream_out = stream_in + norm(f(norm(stream_in))).

    Every branch adds variance 1, whatever its weights: the size of values, outputs and the feed-forward's second map
    drops out. `base` draws the weights: GPT-2's, as in CogView's released code (0.02, outputs divided by sqrt(2N)).
    CogView's other means against overflow (the largest entry divided out before a norm, scores in two steps) leave the
    function as it is and are not part of this.
    """

    name: ClassVar[str] = "sandwich"
    paper: ClassVar[str] = "Ding et al. 2021, NeurIPS (CogView), section 2.4"
    summary: ClassVar[str] = "a norm before and after every branch (sandwich norm)"
    base: Base = "gpt2"

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        return base_table(self, self.base, placed(architecture, "sandwich"), inputs)

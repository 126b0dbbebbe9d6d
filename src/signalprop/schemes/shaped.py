"""Attention that is shaped instead of bypassed: Value-SkipInit, U-SPA and E-SPA (He et al. 2023)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import numpy as np

from signalprop.data.batches import default_statistics
from signalprop.errors import InputError
from signalprop.kernels import schedules
from signalprop.kernels.transforms import dks, tat
from signalprop.network.activations import activation, kinked
from signalprop.network.architecture import Architecture
from signalprop.network.embedding_and_head import Distribution
from signalprop.network.inputs import InputStatistics
from signalprop.network.layout import role_mask
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import ROLES, Parametrization, Shaping
from signalprop.schemes.base import Scheme, fill, register
from signalprop.schemes.feasible import followed, rounded_down, rounded_up, smallest_that_fits
from signalprop.schemes.options import Share, within
from signalprop.schemes.residual import fan_in_std, without_norms
from signalprop.schemes.stacking import placed
from signalprop.schemes.vanilla import stream_ends
from signalprop.theory.embedding import embed

# Layers below which DKS with the paper's zeta leaves the activation hardly recognisable, or has no solution at all.
_SHALLOW = 6
# Layers below which ReLU itself does not take uncorrelated tokens to TAT's correlation of 0.9.
_SHALLOW_TAT = 13
# Factor on orthogonal queries and keys for "small" scores: attention is then off by 3e-3 (SPA section 3.3, option 3).
_SMALL = 0.1


@dataclass(frozen=True)
class _Shaped(Scheme):
    """What the three methods have in common: no skips or normalised ones, no norms or pre-norm, weights, activation."""

    attention_skip: ClassVar[float]
    feed_forward_skip: Share = 0.0
    norm: bool = False
    orthogonal: bool = True
    activation: Literal["auto", "dks", "tat", "keep"] = "auto"

    def _shape(self, architecture: Architecture) -> Architecture:
        """The architecture that the method asks for: norms, and the activation, transformed for the depth."""
        if architecture.kind == "encoder-decoder" or architecture.parallel:
            raise InputError(
                f"scheme {self.name!r} is defined for one stack of attention and feed-forward in turn, not for "
                "encoder-decoders or parallel sublayers; choose another scheme"
            )
        a = placed(architecture, "pre") if self.norm else without_norms(architecture)
        return a.replace(activation=self._activation(a))

    def _activation(self, a: Architecture) -> str:
        name = activation(a.activation).name
        kind, kink = name.partition("(")[0], kinked(name)
        if self.activation == "auto":
            skips = self.feed_forward_skip > 0 or self.attention_skip > 0
            chosen = "keep" if skips or kink or kind in ("identity", "transformed") else "dks"
        else:
            chosen = self.activation
        if chosen == "keep":
            return a.activation
        if chosen == "dks":
            try:
                return dks(a.activation, max(a.n_layers, _SHALLOW), gated=a.gated)
            except InputError as error:
                raise InputError(f"scheme {self.name!r}: {error}; or take activation=keep") from None
        if kind not in ("relu", "leaky_relu") or a.gated:
            what = "the gate of a gated feed-forward" if a.gated else kind
            raise InputError(f"scheme {self.name!r}: tat transforms ReLU and leaky ReLU, not {what}; take keep or dks")
        return tat(max(a.n_layers, _SHALLOW_TAT))

    def _table(self, a: Architecture, **columns: FloatArray) -> Parametrization:
        """The table with weights, skips and ends; `columns`: those of the method."""
        attention = role_mask(a, "query")
        table = fill(
            a,
            self,
            fan_in_std(a),
            skip=np.where(attention, self.attention_skip, self.feed_forward_skip),
            branch=np.where(attention, math.sqrt(1 - self.attention_skip**2), math.sqrt(1 - self.feed_forward_skip**2)),
            **columns,
        )
        shape: Distribution = "orthogonal" if self.orthogonal else "normal"
        return scaled_ends(replace(table, distribution=dict.fromkeys(ROLES, shape)))


def scaled_ends(table: Parametrization) -> Parametrization:
    """The table with token rows of variance 1/d, look-ups times sqrt(d), and logits of variance 1 (SPA appendix H.1).

    The factor is on look-ups only: a tied head reads the rows as they are. Where there is a norm on the embeddings, or
    nothing is looked up, the stream starts at variance 1 as in `xavier`.
    """
    table = stream_ends(table)
    a, e, root = table.architecture, table.embedding, math.sqrt(table.architecture.d_model)
    if a.embedding_norm or a.input != "tokens":
        return table
    ratio = e.scale / root
    return replace(
        table,
        embedding=e.model_copy(
            update={
                "token": e.token * ratio,
                "position": e.position * ratio,
                "segment": e.segment * ratio,
                "scale": root,
            }
        ),
        head=table.head.model_copy(
            update={"weight": e.token * ratio if a.has_tied_head else table.head.weight / root, "scale": 1.0}
        ),
    )


@register
@dataclass(frozen=True)
class ValueSkipInit(_Shaped):
    """Attention without a skip around it: (alpha I + beta A) V, with trainable scalars alpha = 1 and beta = 0.

    At initialisation every token attends to itself, so attention leaves the correlation of tokens; the network is an
    MLP that each token goes through alone. The skips around both sublayers are gone (lambda = 0), as are the norms
    unless `norm` (then pre-norm, as in the paper's columns "LN"). `feed_forward_skip` puts a normalised one back around
    the feed-forward: lambda = that, beta = sqrt(1 - lambda^2).

    Weights: variance 1/fan_in for all, but d_ff sigma_2^2 E f^2 = 1 for the matrix after the activation, so that inputs
    of variance 1 give outputs of variance 1; `orthogonal` (rows or columns, whichever are fewer, scale-corrected) or
    normal. Biases 0. Token rows have variance 1/d and look-ups are multiplied by sqrt(d). Queries are drawn as the rest
    (W_Q = 0 belongs to the paper's other methods); while beta = 0 their gradient is exactly 0, like that of the keys.

    `activation`: `auto` transforms a smooth activation by DKS, as the paper does without skips (of at least 6 layers'
    strength), and keeps it where there are skips or kinks; `dks`, `tat` (leaky ReLU, of at least 13 layers' strength)
    and `keep` say which. The paper has no gated feed-forwards; their gates are transformed by the same four conditions
    on the whole (docs/theory/components.md, section 4.3). The paper knows no dropout: without norms each sublayer
    multiplies the variance by 1 / (1 - p).

    Raises:
        InputError: an encoder-decoder (alpha I has no meaning in cross-attention), or parallel sublayers.
    """

    name: ClassVar[str] = "value-skipinit"
    paper: ClassVar[str] = "He et al. 2023, ICLR (Deep Transformers without Shortcuts), section 3.1, eq. 7; appendix H"
    summary: ClassVar[str] = "no attention skip, no norms: (alpha I + beta A) V with trainable alpha = 1, beta = 0"
    attention_skip: ClassVar[float] = 0.0

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        a = self._shape(architecture)
        attention = role_mask(a, "query")
        table = self._table(a, value_skip=np.where(attention, 1.0, 0.0), attention_gain=np.where(attention, 0.0, 1.0))
        return followed(replace(table, attention_trainable=True))


@dataclass(frozen=True)
class _Spa(_Shaped):
    """U-SPA and E-SPA: D softmax(scores + B) with scores that start at 0."""

    attention_skip: Share = 0.0  # type: ignore[misc]
    repeats: Annotated[float, within(0.0, 0.999)] | None = None
    zero: Literal["query", "key", "small"] = "query"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attention_skip == 1:
            raise InputError(f"option attention_skip of scheme {self.name!r} is 1, which leaves nothing to attention")

    def _shape(self, architecture: Architecture) -> Architecture:
        a = super()._shape(architecture)
        if not a.causal:
            raise InputError(f"scheme {self.name!r} shapes causal attention; choose a decoder, or value-skipinit")
        if a.qk_norm:
            raise InputError(
                f"scheme {self.name!r} starts with scores of 0, and QK-norm makes scores of order 1 from any "
                "queries; choose an architecture with qk_norm=False"
            )
        if a.positions == "alibi":
            raise InputError(
                f"scheme {self.name!r} starts with scores of 0, and ALiBi adds to them; choose an "
                "architecture with other positions, such as rotary, or none"
            )
        return a

    def _repeats(self, table: Parametrization, inputs: InputStatistics | None) -> float:
        """Pair-repeat probability: as given, else the correlation that the embedded input is predicted to have."""
        if self.repeats is not None:
            return self.repeats
        a = table.architecture
        r = float(embed(a, table.embedding, inputs or default_statistics(a)).token_correlation)
        return min(max(r, 0.0), 0.999)

    def _spa(
        self, table: Parametrization, shaping: Shaping, before: FloatArray, after: FloatArray, gain: FloatArray
    ) -> Parametrization:
        """The table with one row of numbers per layer, and scores that start at 0 (or near it)."""
        attention = role_mask(table.architecture, "query")
        layer = np.minimum(table.layer, len(before) - 1)
        weights = {"query": (self.zero, ("query", "small")), "key": (self.zero, ("key", "small"))}
        table = table.with_columns(
            shape_in=np.where(attention, before[layer], 0.0),
            shape_out=np.where(attention, after[layer], 0.0),
            shape_gain=np.where(attention, gain[layer], 0.0),
            **{
                f"weight__{role}": table.weights[role] * (_SMALL if chosen == "small" else 0.0)
                for role, (chosen, affected) in weights.items()
                if chosen in affected
            },
        )
        return followed(replace(table, shaping=shaping))


@register
@dataclass(frozen=True)
class USPA(_Spa):
    """Attention matrices that raise the correlation of all pairs of tokens evenly, from 0 to `rho` at the end.

    At initialisation attention is A = L' L^-1 with the Cholesky factors of (1 - rho_l) I + rho_l 1 1^T, rho_l linear in
    depth: D softmax(B), B = log A, where scores are 0 (`zero`: W_Q, W_K, or `small` orthogonal ones of scale 0.1). No
    skips and no norms, unless `attention_skip`, `feed_forward_skip` (normalised, combined exactly) or `norm`
    (pre-norm). `repeats` is rho_0, by default that of the embedded input with its repeated tokens
    (docs/papers/without-shortcuts.md).

    Weights, ends and `activation` as in `value-skipinit`.

    Raises:
        InputError: attention without a mask, parallel sublayers or QK-norm; a rho, skip or activation that would need
            negative attention weights (the message says what is feasible).
    """

    name: ClassVar[str] = "u-spa"
    paper: ClassVar[str] = "He et al. 2023, ICLR (Deep Transformers without Shortcuts), section 3.2; appendices B, C, H"
    summary: ClassVar[str] = "no skips, no norms: attention shaped to correlate all tokens equally, up to rho = 0.8"
    rho: Share = 0.8

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        a = self._shape(architecture)
        table = self._table(a)
        repeats = self._repeats(table, inputs)
        rho = schedules.rho_schedule(a.n_layers, self.rho, repeats)
        before = rho[:-1]
        bound = float(np.sqrt((1 - rho[1:]) / (1 - before)).min())
        if self.attention_skip and self.attention_skip >= bound:
            raise InputError(
                f"scheme 'u-spa': attention_skip {self.attention_skip:.6g} is too large to reach rho {self.rho:.6g} in "
                f"{a.n_layers} layers; expected at most {rounded_down(bound)}, more layers, or a smaller rho"
            )
        after = np.array(
            [schedules.uniform_behind_skip(r, s, self.attention_skip) for r, s in zip(before, rho[1:], strict=True)]
        )
        shaping = Shaping(kind="u-spa", repeats=repeats)
        return self._spa(table, shaping, before, after, np.zeros(a.n_layers))


@register
@dataclass(frozen=True)
class ESPA(_Spa):
    """Attention matrices that correlate tokens with their neighbours: correlation e^-(gamma |i - j|).

    As `u-spa`, with kernels exp(-gamma_l |i - j|) whose decay falls with depth to `gamma`: near tokens correlate more
    than far ones, which is akin to a position encoding. `schedule`: `diagonal` keeps the self-weight of all layers the
    same (the paper's), `tanh` their gain on slow signals. `attention_skip`: a normalised skip, by the paper's rule,
    which is inaccurate near the largest feasible skip, or with `skip_rule=exact` by the exact filter
    (docs/papers/without-shortcuts.md). `repeats`: pair-repeat probability for which the diagonal stays 1 (without
    skips).

    The paper's gamma of 0.005 goes with its 512 tokens and more: the same decay makes short sequences nearly one
    direction. On 64 tokens 36 layers trained with 0.2 and stayed at their plateau with 0.005 (records/shortcuts.md).

    Raises:
        InputError: attention without a mask, parallel sublayers or QK-norm; a gamma, skip or activation that would need
            negative attention weights (the message says what is feasible).
    """

    name: ClassVar[str] = "e-spa"
    paper: ClassVar[str] = (
        "He et al. 2023, ICLR (Deep Transformers without Shortcuts), section 3.2; appendices B to F, H"
    )
    summary: ClassVar[str] = (
        "no skips, no norms: attention shaped so that near tokens correlate more, exp(-gamma |i - j|)"
    )
    gamma: Annotated[float, within(1e-9, 30.0)] = 0.005
    schedule: Literal["diagonal", "tanh"] = "diagonal"
    skip_rule: Literal["paper", "exact"] = "paper"

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        a = self._shape(architecture)
        table = self._table(a)
        decay = schedules.decay_schedule(a.n_layers, self.gamma, self.schedule)
        before, after, gain = decay[:-1], decay[1:], np.zeros(a.n_layers)
        skip = self.attention_skip
        if skip:
            self._check_skip(a.n_layers)
            rule = schedules.exact_behind_skip if self.skip_rule == "exact" else schedules.exponential_behind_skip
            filters = [rule(r, s, skip) for r, s in zip(before, after, strict=True)]
            before, after, gain = (np.array(column) for column in zip(*filters, strict=True))
        if self.repeats and skip:
            raise InputError("scheme 'e-spa': repeats is for attention without a skip around it; leave it out")
        repeats = 0.0 if skip else self._repeats(table, inputs)
        shaping = Shaping(kind="e-spa", repeats=repeats)
        return self._spa(table, shaping, before, after, gain)

    def _largest_skip(self, n_layers: int, gamma: float) -> float:
        """The skip that the step of the schedule that binds allows."""
        decay = schedules.decay_schedule(n_layers, gamma, self.schedule)
        return float(schedules.step_bound(decay[:-1], decay[1:], exact=self.skip_rule == "exact").min())

    def _check_skip(self, n_layers: int) -> None:
        bound = self._largest_skip(n_layers, self.gamma)
        if self.attention_skip < bound:
            return
        least = smallest_that_fits(
            lambda gamma: self._largest_skip(n_layers, gamma) > self.attention_skip, self.gamma, 30.0
        )
        or_gamma = f", or a gamma of at least {rounded_up(least)}" if math.isfinite(least) else ""
        raise InputError(
            f"scheme 'e-spa': attention_skip {self.attention_skip:.6g} is too large for gamma {self.gamma:.6g} and "
            f"{n_layers} layers; expected at most {rounded_down(bound)}{or_gamma}"
        )

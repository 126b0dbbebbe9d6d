"""Methods of models of 2025 and 2026 that norm what a branch adds: Peri-LN, running mean, normalised gates, Pangu."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics
from signalprop.network.layout import stacks_of
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization, Trainable, layout
from signalprop.schemes.base import Scheme, layers_of_stack, register
from signalprop.schemes.norms import OnBase
from signalprop.schemes.options import Positive, Share
from signalprop.schemes.stacking import base_table, placed
from signalprop.schemes.vanilla import one_std


@register
@dataclass(frozen=True)
class PeriLN(OnBase):
    """Norms before and after every branch: the placement of `sandwich`, under the name that models of 2025 know it by.

    Every branch adds variance 1 whatever its weights, so that the stream grows like 1 + 2N: the paper's linear growth,
    here with its constant. `base` draws the weights: one standard deviation of 0.02, at which the stream starts with
    0.0004 per table and the first branch makes up nearly all of it. The norm on the embeddings that the paper offers
    is the architecture's `embedding_norm`.
    """

    name: ClassVar[str] = "peri-ln"
    paper: ClassVar[str] = "Kim et al. 2025, ICML, arXiv:2502.02732 (Peri-LN)"
    summary: ClassVar[str] = "a norm before and after every branch, as sandwich; weights of one standard deviation"

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        return base_table(self, self.base, placed(architecture, "sandwich"), inputs)


@register
@dataclass(frozen=True)
class RunningMean(OnBase):
    """The stream is sqrt(k) times the mean of the input and the branches: sandwich norms, and at addition k = 2, 3, ...

        stream_out = sqrt((k - 1) / k) stream_in + f(stream_in) / sqrt(k)

    so that sqrt(k) x_k = sqrt(k - 1) x_(k-1) + f: in the gauge sqrt(k) this is Peri-LN, exactly where norms have no
    epsilon (docs/schemes.md). Additions are counted per stack. `base` draws the weights, as in `peri-ln`.
    """

    name: ClassVar[str] = "running-mean"
    paper: ClassVar[str] = "Beam 1.0, 2026, released code: transformers 5.23, models/beam"
    summary: ClassVar[str] = (
        "sandwich; skip sqrt((k-1)/k), branch 1/sqrt(k) at addition k = 2, 3, ...: Peri-LN, rescaled"
    )

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        a = placed(architecture, "sandwich")
        k = additions(a) + 1.0
        return base_table(self, self.base, a, inputs).with_columns(skip=np.sqrt((k - 1) / k), branch=k**-0.5)


@register
@dataclass(frozen=True)
class NormalisedGates(OnBase):
    """Sandwich norms and stream_out = sqrt(1 - beta^2) stream_in + beta f(stream_in), beta a gate per channel.

    The released code has beta = sigmoid(w / 0.3), w trained and drawn with standard deviation 0.02, so that beta starts
    between 0.47 and 0.53; here it starts at `beta`. It does not know the depth: the share of the input falls like
    (1 - beta^2)^(2N). 1 / sqrt(2N) gives every branch the same share of what there is. Here skip and branch train
    apart, channel by channel (`trainable` = `scalar` or `fixed` for less): the same function at the start, not the
    same training. `base` draws the weights, as in `peri-ln`.
    """

    name: ClassVar[str] = "normalised-gates"
    paper: ClassVar[str] = "Muse Spark, 2026, released code: transformers 5.23, models/muse_spark"
    summary: ClassVar[str] = "sandwich; skip sqrt(1 - beta^2), branch beta = 1/2, trained per channel"
    beta: Share = 0.5
    trainable: Trainable = "channel"

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        table = base_table(self, self.base, placed(architecture, "sandwich"), inputs)
        table = table.with_columns(skip=math.sqrt(1 - self.beta**2), branch=self.beta)
        return replace(table, skip_trainable=self.trainable, branch_trainable=self.trainable)


@register
@dataclass(frozen=True)
class DepthScaledSandwich(Scheme):
    """Sandwich norms whose second gain starts at `gain` / sqrt(N), and weights of standard deviation 1 / sqrt(2 d N).

    N layers of the stack. All branches together add 2 `gain`^2, at any depth. The weights (TinyInit) do not show in the
    forward signal, which the second norm resets, as long as its epsilon does not: a branch of variance below `norm_eps`
    stays smaller. Embeddings have the weights' standard deviation. The report has one constant for attention and one
    for the feed-forward, from the size of their outputs; here it is one for both.
    """

    name: ClassVar[str] = "depth-scaled-sandwich"
    paper: ClassVar[str] = "Yin et al. 2025, arXiv:2504.07866 (Pangu Ultra): depth-scaled sandwich norm, TinyInit"
    summary: ClassVar[str] = "sandwich with second gains 1/sqrt(N); standard deviation 1/sqrt(2 d N)"
    gain: Positive = 1.0

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        a = placed(architecture, "sandwich")
        std = (2 * a.d_model * a.n_layers_total) ** -0.5
        return one_std(a, self, std, residual=1.0).with_columns(post_norm_gain=self.gain * layers_of_stack(a) ** -0.5)


def additions(architecture: Architecture) -> FloatArray:
    """Number of each sublayer within its stack, from 1."""
    return np.concatenate([np.arange(1.0, len(rows) + 1) for _, rows in stacks_of(layout(architecture))])

"""Attention that is shaped instead of bypassed: Value-SkipInit."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from signalprop.architecture import Architecture
from signalprop.errors import InputError
from signalprop.inputs import InputStatistics
from signalprop.parametrization import ROLES, Distribution, Parametrization, role_mask
from signalprop.schemes.base import Scheme, fill, register, truth, within
from signalprop.schemes.residual import fan_in_std, without_norms
from signalprop.schemes.stacking import placed
from signalprop.schemes.vanilla import stream_ends


@register
@dataclass(frozen=True)
class ValueSkipInit(Scheme):
    """Attention without a skip around it: (alpha I + beta A) V, with trainable scalars alpha = 1 and beta = 0.

    At initialisation every token attends to itself, so tokens do not grow alike through attention; the network is an
    MLP that each token goes through alone. The skips around both sublayers are gone (lambda = 0), and so are the norms
    unless `norm` (then pre-norm, as in the paper's columns "LN"). `feed_forward_skip` puts a normalised one back around
    the feed-forward: lambda = that, beta = sqrt(1 - lambda^2).

    Weights: variance 1/fan_in for all, but d_ff sigma_2^2 E f^2 = 1 for the matrix after the activation, so that inputs
    of variance 1 give outputs of variance 1; `orthogonal` (rows or columns, whichever are fewer, scale-corrected) or
    normal. Biases 0. Embeddings are scaled to variance 1. Queries are drawn as the rest (W_Q = 0 belongs to the paper's
    other methods); while beta = 0 their gradient is exactly 0, like that of the keys.

    The paper knows no dropout: without norms each sublayer multiplies the variance by 1 / (1 - p). Its DKS and TAT
    activations, which keep tokens apart through deep MLPs, are not part of this.

    Raises:
        InputError: an encoder-decoder (alpha I has no meaning in cross-attention), or parallel sublayers.
    """

    name: ClassVar[str] = "value-skipinit"
    paper: ClassVar[str] = "He et al. 2023, ICLR (Deep Transformers without Shortcuts), section 3.1, eq. 7; appendix H"
    summary: ClassVar[str] = "no attention skip, no norms: (alpha I + beta A) V with trainable alpha = 1, beta = 0"
    feed_forward_skip: float = 0.0
    norm: bool = False
    orthogonal: bool = True

    def __post_init__(self) -> None:
        within(self, "feed_forward_skip", 0.0, 1.0)
        truth(self, "norm", "orthogonal")

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        if architecture.kind == "encoder-decoder" or architecture.parallel:
            raise InputError(
                "scheme 'value-skipinit' is defined for one stack of attention and feed-forward in turn, not for "
                "encoder-decoders or parallel sublayers; choose another scheme"
            )
        a = placed(architecture, "pre") if self.norm else without_norms(architecture)
        attention = role_mask(a, "query")
        table = fill(
            a,
            self,
            fan_in_std(a),
            skip=np.where(attention, 0.0, self.feed_forward_skip),
            branch=np.where(attention, 1.0, math.sqrt(1 - self.feed_forward_skip**2)),
            value_skip=np.where(attention, 1.0, 0.0),
            attention_gain=np.where(attention, 0.0, 1.0),
        )
        shape: Distribution = "orthogonal" if self.orthogonal else "normal"
        return stream_ends(replace(table, distribution=dict.fromkeys(ROLES, shape), attention_trainable=True))

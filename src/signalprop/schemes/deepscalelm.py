"""DeepScaleLM and its simpler variant (Transformers Get Stable, section 3.5; v1 appendix N)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from signalprop.errors import InputError
from signalprop.network.architecture import Architecture
from signalprop.network.duals import dual
from signalprop.network.inputs import InputStatistics
from signalprop.network.kinds import ROLE, kind_of
from signalprop.network.layout import Layout, stacks_of
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import PLACEMENTS, Embedding, Parametrization, Trainable, layout
from signalprop.network.residual import step, through
from signalprop.schemes.base import Scheme, fill, layers_of_stack, register
from signalprop.schemes.options import Positive, within
from signalprop.schemes.vanilla import small_logits_head, unit_embedding

_SMALLEST_CORRELATION = 1e-9  # of what attention reads; far below any text's, and sigma_v^2 stays finite


@dataclass(frozen=True)
class _DeepScale(Scheme):
    """What both variants share: k and alpha of beta^2 = k / N^alpha, and whether beta is trained.

    TGS table 13 compares a fixed with a learnable beta that starts at the same value, and finds no difference that
    matters; one number or one per channel is not said there. lambda stays fixed.
    """

    k: Positive = 2.0
    alpha: Annotated[float, within(0.0, 10.0)] = 1.0
    trainable: Trainable = "fixed"

    def branch_variances(self, architecture: Architecture) -> FloatArray:
        """beta^2 = k / N^alpha of every sublayer, at most 1 (there the skip connection is gone, lambda = 0).

        N counts the layers of the stack.
        """
        return np.minimum(1.0, self.k * layers_of_stack(architecture) ** -self.alpha)


@register
@dataclass(frozen=True)
class DeepScaleLM(_DeepScale):
    """lambda^2 = 1 - k/N^alpha, beta^2 = k/N^alpha, and every branch has variance 1 at initialisation.

    Embeddings: sigma_e^2 = (1 - p) / tables. Queries and keys: 1/d. Feed-forward: sigma_1^2 = sigma_2^2 =
    sqrt((1 - p) / 2) / d for ReLU and d_ff = 4d; in general d_ff sigma_2^2 E f^2 = 1 - p. Values and outputs:
    sigma_v^2 = sigma_o^2 = sqrt((1 - p) / r_n) / d with r_n the token correlation at the *input* of layer n (the
    printed pseudo-code stores the correlation at its output; see `docs/schemes.md`), by
    r <- lambda^2 r + beta^2 (1 - p), then r <- lambda^2 r + beta^2 (1 - p) Q(r)/Q(1). Cross-attention uses the
    correlation of the encoder's output. The output is divided by sqrt(d) before the head.
    N is the number of layers of the stack; k = 2, alpha = 1 in the paper.

    For correlated tokens (r_n from about .1), read in both directions: values and outputs grow like r_n^(-1/2), and
    the first position of a causal decoder, which averages nothing, gets a branch of variance 1/r_n. The trainings of
    the paper's section 4 have the simpler variant.
    """

    name: ClassVar[str] = "deepscalelm"
    paper: ClassVar[str] = "Kedia et al. 2024, ICML (Transformers Get Stable), section 3.5; v1 appendix N, fig. 15"
    summary: ClassVar[str] = "skip^2 = 1 - k/N^alpha, branch^2 = k/N^alpha; branches of variance 1; correlated tokens"

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        beta2 = self.branch_variances(architecture)
        r = input_correlations(architecture, inputs, beta2)
        return _table(architecture, self, beta2, (1 - architecture.dropout) / r)


@register
@dataclass(frozen=True)
class DeepScaleLMSimple(_DeepScale):
    """DeepScaleLM with values and outputs initialised like the feed-forward: sigma_v^2 = sigma_o^2 = sqrt((1-p)/2)/d.

    The attention branch then has variance r/2 instead of 1; no input statistics are needed. The paper's section 4 has
    this variant throughout. In pre-norm the stream ends
    within 1/2 + 1/(2 e^4) <= sigma^2 <= 3/4 + 1/(4 e^4) for k = 2 and many layers (v1 section G.5).
    """

    name: ClassVar[str] = "deepscalelm-simple"
    paper: ClassVar[str] = "Kedia et al. 2024, ICML (Transformers Get Stable), section 3.5; v1 appendix N, fig. 14"
    summary: ClassVar[str] = "as deepscalelm, values and outputs like the feed-forward; for decoders and plain text"

    def __call__(self, architecture: Architecture, inputs: InputStatistics | None = None) -> Parametrization:
        return _table(architecture, self, self.branch_variances(architecture), (1 - architecture.dropout) / 2)


def _table(
    architecture: Architecture, made_by: _DeepScale, beta2: FloatArray, value_output: FloatArray | float
) -> Parametrization:
    """The common table; `value_output` is d_model * (n_heads d_head) * sigma_v^2 * sigma_o^2."""
    a = architecture
    value = np.sqrt(np.sqrt(value_output / (a.d_model * a.n_heads * a.d_head * attention_gate(a)[0])))
    # queries and keys give scores of variance 1 on normalised input, whatever factor the model puts on q.k
    key = 1 / math.sqrt(a.d_model)
    up, down = feed_forward_std(a)
    std: dict[str, ArrayLike] = {
        "query": key / (a.score_scale * math.sqrt(a.d_head)),
        "key": key,
        "value": value,
        "output": value,
        "attention_gate": key,
        "gate": up,
        "up": up,
        "down": down,
    }
    embedding = unit_embedding(a)
    if a.embedding_norm:  # the dropout comes after the norm there
        embedding = Embedding(**embedding.model_dump() | {"norm_gain": math.sqrt(1 - (a.embedding_dropout or 0.0))})
    return replace(
        fill(a, made_by, std, branch=np.sqrt(beta2), skip=np.sqrt(1 - beta2)),
        embedding=embedding,
        head=small_logits_head(a, embedding),
        branch_trainable=made_by.trainable,
    )


def feed_forward_std(architecture: Architecture) -> tuple[float, float]:
    """Standard deviations (in, out) of the feed-forward maps that give a branch of variance 1 after dropout.

    Un-gated: sigma_1^2 = sqrt(2 (1 - p) / (d d_ff)), the paper's at ReLU and d_ff = 4d; d_ff sigma_2^2 E f^2 = 1 - p.
    Gated (beyond the paper): gate and up map to variance 1, so d_ff sigma_down^2 E f^2 = 1 - p again.
    """
    a = architecture
    keep = 1 - a.dropout
    variance_in = 1 / a.d_model if a.gated else math.sqrt(2 * keep / (a.d_model * a.d_ff))
    second_moment = float(dual(a.activation, a.d_model * variance_in, 0.0).second_moment)
    return math.sqrt(variance_in), math.sqrt(keep / (a.d_ff * second_moment))


def attention_gate(architecture: Architecture, r: float = 0.0) -> tuple[float, float]:
    """Factor of a gate on the heads on a branch's variance and correlation (not in the paper); 1 without.

    The gate's map has variance 1/d, so z is standard normal on normalised input: E s(z)^2, and E s(z) s(z') over that
    for two tokens of correlation `r`, s the sigmoid; gates are independent of what the heads give.
    """
    if not ROLE["attention_gate"].exists(architecture):
        return 1.0, 1.0
    q = dual("sigmoid", 1.0, r)
    return float(q.second_moment), float(q.covariance_moment / q.second_moment)


def input_correlations(architecture: Architecture, inputs: InputStatistics | None, beta2: FloatArray) -> FloatArray:
    """Token correlation of what the attention of every sublayer reads (r_n of v1 fig. 15, at layer inputs).

    Cross-attention rows hold the correlation of the encoder's output, which its keys and values come from;
    feed-forward rows hold 1.
    """
    from signalprop.data.batches import default_statistics
    from signalprop.theory.embedding import embed

    a = architecture
    statistics = inputs or default_statistics(a)
    rows, embedding = layout(a), unit_embedding(a)
    algebra = _Correlations(a, rows, beta2)
    for _, members in stacks_of(rows):
        decoder = members.start > 0
        starts = embed(a, embedding, statistics.decoder or statistics if decoder else statistics, decoder=decoder)
        algebra.memory = through(
            members,
            repeat(False, len(members)),  # the rule takes parallel branches one after the other
            lambda i, r, onto: step(algebra, i, PLACEMENTS[rows.placement[i]], r, onto),
            float(starts.token_correlation),
        )
    return algebra.read_by


class _Correlations:
    """The algebra of `signalprop.network.residual` on token correlations, where stream and branches have variance 1.

    Attributes:
        memory: of the encoder's output. read_by: of what the attention of every sublayer reads, 1 elsewhere.
    """

    def __init__(self, a: Architecture, rows: Layout, beta2: FloatArray) -> None:
        self.a, self.rows, self.beta2, self.memory = a, rows, beta2, 0.0
        self.inner = a.d_model * feed_forward_std(a)[0] ** 2
        self.read_by = np.ones(len(rows.kind))

    def read(self, i: int, r: float) -> float:
        return r

    read_normed = read

    def output(self, i: int, r: float) -> float:
        kind = kind_of(self.rows, i)
        if kind.activates:
            q = dual(self.a.activation, self.inner, r)
            return float(q.covariance_moment / q.second_moment) * (r if self.a.gated else 1.0)
        self.read_by[i] = self.memory if kind.reads_memory else r
        if self.read_by[i] < _SMALLEST_CORRELATION:
            raise InputError(
                f"the token correlation at sublayer {i} is {self.read_by[i]:.3g} and DeepScaleLM divides by it; give "
                "statistics of real input, in which tokens are correlated (inputs=), or use deepscalelm-simple"
            )
        return 1.0 if kind.reads_memory else attention_gate(self.a, r)[1]

    def skipped(self, i: int, r: float) -> float:
        return float((1 - self.beta2[i]) * r)

    def plus(self, i: int, kept: float, output: float) -> float:
        return float(kept + self.beta2[i] * (1 - self.a.dropout) * output)

    def norm_sum(self, i: int, total: float) -> float:
        return total

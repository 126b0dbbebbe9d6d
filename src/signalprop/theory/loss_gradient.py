"""The gradient that a cross-entropy loss sends back into the stream, before anything is known of any logit.

g_k = (pi_k - e_{y_k}) U, with U the head's weights. Two positions share a gradient when their targets are equal, and
when their softmax outputs overlap. A head tied to the token table already favours the token that the position reads.
Derivation and measured error: `docs/theory/network.md`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from signalprop.network.architecture import Architecture
from signalprop.network.duals import dual
from signalprop.network.inputs import InputStatistics, IntArray
from signalprop.network.moments import Array, ratio
from signalprop.network.parametrization import Parametrization
from signalprop.theory.attention_rows import row_moments
from signalprop.theory.log_arithmetic import correlation, log, plain
from signalprop.theory.log_sum import log_sum
from signalprop.theory.row_overlaps import log_overlap

_MASKED_SHARE = 0.8  # of the positions that carry loss in masked language modelling, read as one and the same token
_UNCHANGED_SHARE = 0.1  # of them, read unchanged
_NODES = 0.15 * np.arange(-40, 41)  # of a standard normal variable
_WEIGHTS = np.exp(-(_NODES**2) / 2) / np.exp(-(_NODES**2) / 2).sum()


class Coincidences(NamedTuple):
    """Probabilities that ids are equal, over positions that carry loss.

    Attributes:
        targets: of the targets of two positions. tokens: of the tokens read at two positions.
        crossed: of the token read at one and the target of another.
        copied: of the token read and the target at one position.
    """

    targets: float
    tokens: float
    crossed: float
    copied: float


def coincidences(architecture: Architecture, inputs: InputStatistics) -> Coincidences:
    """Exact for real ids; else what Zipf's law and the task (masked or next-token prediction) give."""
    if inputs.tokens is not None and inputs.targets is not None:
        return _counted(inputs.tokens, inputs.targets)
    c = inputs.target_correlation
    if architecture.kind == "encoder":
        return Coincidences(
            c, _MASKED_SHARE**2 + (1 - _MASKED_SHARE) ** 2 * c, (1 - _MASKED_SHARE) * c, _UNCHANGED_SHARE
        )
    return Coincidences(c, inputs.token_correlation, c, c)


def _counted(tokens: IntArray, targets: IntArray) -> Coincidences:
    totals = np.zeros(4)
    pairs = positions = 0
    for row, aims in zip(tokens, targets, strict=True):
        carries = aims >= 0
        t, y = row[carries], aims[carries]
        size = int(max(t.max(initial=0), y.max(initial=0))) + 1
        n_t, n_y = np.bincount(np.maximum(t, 0), minlength=size), np.bincount(y, minlength=size)
        same = int((t == y).sum())
        totals += [float(n_y @ n_y) - len(y), float(n_t @ n_t) - len(t), float(n_t @ n_y) - same, same]
        pairs += len(y) * (len(y) - 1)
        positions += len(y)
    shares = totals / np.maximum([pairs, pairs, pairs, positions], 1)
    return Coincidences(*(float(s) for s in shares))


class TopGradient(NamedTuple):
    """Second moments of pi - e_y, with pi = own e_t + (1 - own) b, t the token that the position reads.

    Of a kernel's positions `p_read` and `p_read_square` are (T, 1), the others (T, T), of pairs.

    Attributes:
        p_read, p_read_square: means of the probability that a tied head gives to t, and of its square (about 0 in an
            untied or deep model).
        aligned: share of that token's row in what the head reads (0: untied). A norm removes the gradient along what
            it reads, and with it this share of the gradient along the row.
        r: token correlation of what the head reads.
        second: E |b|^2. overlap: E b_k . b_k' of two positions. n_classes: V. logits: their variance s, untied.
        through: factor on what two positions share on the way back through a dense layer before the head, 1 without
            one.
    """

    p_read: Array
    p_read_square: Array
    aligned: Array
    r: Array
    second: Array
    overlap: Array
    n_classes: int
    through: Array
    logits: Array

    @property
    def others(self) -> Array:
        """The mean of (1 - own)^2."""
        return 1 - 2 * self.p_read + self.p_read_square

    @property
    def along(self) -> Array:
        """d times the share of the gradient that lies along the stream beyond chance: s, of large logits 2 ln V."""
        return self.others * np.minimum(self.logits, 2 * math.log(max(self.n_classes, 2)))

    def variance(self, copied: Array, *, normed: bool) -> Array:
        """E |pi - e_y|^2 where the target is the token that is read with probability `copied`.

        Args:
            normed: of what a norm sends back, which is orthogonal to the stream; else all of it.
        """
        chance = (1 - self.p_read) / self.n_classes
        total = 1 + self.p_read_square + self.others * self.second - 2 * (self.p_read * copied + chance)
        along = self.aligned * (self.p_read_square + copied * (1 - 2 * self.p_read)) if normed else 0.0
        return np.maximum(total - along, 0.0)

    def covariance(self, targets: Array, tokens: Array, crossed: Array, copied: Array, *, normed: bool) -> Array:
        """E (pi_k - e_y_k) . (pi_k' - e_y_k') given the probabilities of `Coincidences` for the pair.

        Args:
            crossed, copied: averages; or of positions, shapes (T, T), token read at k and target at k', and (T, 1).
            normed: as in `variance`.
        """
        p_read, partner, asked = self.p_read, np.transpose(self.p_read), self.p_read * crossed
        both = (1 - p_read) * (1 - partner)
        # of one token at two positions the probabilities scatter as one as far as the rest of the streams agrees
        scatter = np.sqrt(np.maximum(self.p_read_square - p_read**2, 0.0))
        rest = np.maximum(self.r - self.aligned, 0.0) / np.maximum(1 - self.aligned, 1e-12)
        equal = p_read * partner + scatter * np.transpose(scatter) * rest
        shared = targets + equal * tokens - asked - np.transpose(asked) + both * (self.overlap - 2 / self.n_classes)
        if normed:
            # the norm's Jacobian I - x x^T / d on both sides: x holds the row of the token that the position reads
            along = self.p_read - copied
            of_other = along * (partner * tokens - crossed)
            removed = of_other + np.transpose(of_other) - along * np.transpose(along) * self.r
            shared = shared - self.aligned * removed
        return np.asarray(shared * self.through)


def top_gradient(p: Parametrization, log_variance: Array, r: Array, log_token_share: Array) -> TopGradient:
    """Moments of pi - e_y at the end of the last stack.

    Logits of V classes are Gaussian of variance s = d sigma_u^2 E x^2 with correlation r between positions; E |pi|^2 is
    the exact softmax moment, and the overlap of two softmaxes that of `row_overlaps`. A tied head adds the mean
    d sigma_e^2 alpha to the logit of the token read, alpha = exp(log_token_share / 2) being the factor on its row in
    the stream.

    Args:
        log_variance, r: of the last stream_out. log_token_share: log of alpha^2 before the final norm.
    """
    a = p.architecture
    classes = a.vocab_size if a.head != "classes" else a.n_classes
    normed = a.has_final_norm or a.head_transform
    gain2 = p.head.final_norm_gain**2 if a.has_final_norm else 1.0
    held = np.clip(log_variance, -600.0, 600.0)
    second: Array = np.asarray(log_variance) * 0.0 + gain2 if normed else np.exp(held)
    through: Array = 1.0
    shrunk: Array = held if normed else 0.0  # log of what the square of a token's row is divided by on the way
    if a.head_transform and a.head == "lm":
        s_in = a.d_model * p.head.transform**2 * second
        q = dual(a.activation, s_in, r)
        through = ratio(q.slope_moment, q.slope_second_moment)
        second = np.ones_like(np.asarray(second))
        centred = np.asarray(q.second_moment - q.mean**2, float)
        r = np.divide(q.covariance_moment - q.mean**2, centred, out=np.zeros_like(centred * r), where=centred > 0)
    s = np.minimum(a.d_model * p.head.weight**2 * p.head.scale**2 * second, 1e4)
    p_read: Array = 0.0
    p_read_square: Array = 0.0
    aligned: Array = 0.0
    if a.has_tied_head and not a.head_transform:
        share = log_token_share - shrunk + log(gain2)
        raised = p.head.scale * a.d_model * p.embedding.token**2 * np.exp(np.clip(share, -600.0, 600.0) / 2)
        aligned = np.minimum(ratio(p.embedding.token**2 * np.exp(np.clip(share, -600.0, 600.0)), second), 1.0)
        p_read, p_read_square = _favoured(s, raised, aligned, classes)
    positive = np.clip(r, 0.0, 1.0)
    alone = np.asarray(row_moments(s, classes, False)[0])
    overlap = np.exp(log_overlap(np.asarray(s), positive * s, classes)) / classes
    return TopGradient(p_read, p_read_square, aligned, positive, alone, overlap, classes, through, s)


def _favoured(s: Array, raised: Array, aligned: Array, classes: int) -> tuple[Array, Array]:
    """Means of the probability of the token read, and of its square; of a kernel's pairs at its positions, (T, 1).

    Its logit is normal with mean `raised` and, as rows differ in length and a norm divides by it, variance
    s (1 - aligned / 2); ln of what the others sum to is taken for its mean.
    """
    at, std = raised - log_sum(s, max(classes - 1, 1)), np.sqrt(s * (1 - aligned / 2))
    if np.ndim(at) == 2:
        at, std = (np.diagonal(x)[:, None] for x in (at, std))
    logit = at[..., None] + _NODES * std[..., None]
    found = 1 / (1 + np.exp(-np.clip(logit, -600.0, 600.0)))
    return plain(found @ _WEIGHTS), plain(found**2 @ _WEIGHTS)


def norm_leaves(a: Architecture, r: Array, along: Array = 0.0) -> Array:
    """What a norm's Jacobian leaves of a gradient that knows nothing of what the norm reads, to first order in 1/d.

    It takes away one of d directions, that of what it reads, and a LayerNorm the mean of the features. Two tokens whose
    gradients are one vector lose both directions: 2 - r^2 of d. What cross-entropy sends lies s/d more along the
    stream. Norms below the first one read a gradient that has lost this already, as does a post-norm under a final
    norm.

    Args:
        r: token correlation of what is read, of a pair; 1 for one token. along: `TopGradient.along`.
    """
    if a.has_final_norm:
        return 1.0
    # a dense layer with a norm does not see the stream's size, so it sends nothing along it
    lost = 0.0 if a.head_transform and a.head == "lm" else 2 - np.square(r) + along
    return np.maximum(1 - (lost + (a.norm == "layernorm")) / a.d_model, 0.0)


class AtTop(NamedTuple):
    """The gradient that enters at the last stream_out, averaged over positions.

    Attributes:
        correlation: its token correlation.
        orthogonal: share of its variance that is orthogonal to the stream, which is all that a post-norm after the last
            sublayer sends back; 1 where a final norm has removed the rest before.
        orthogonal_correlation: token correlation of that.
    """

    correlation: Array
    orthogonal: Array
    orthogonal_correlation: Array


def decides_few(p: Parametrization, log_variance: float) -> float:
    """Variance of logits that are so large that a few words decide the softmax (Derrida 1981), 0 where they are not.

    Args:
        log_variance: of the last stream_out.
    """
    a = p.architecture
    if a.head != "lm" or a.head_transform:
        return 0.0
    second = p.head.final_norm_gain**2 if a.has_final_norm else math.exp(min(log_variance, 600.0))
    s = a.d_model * (p.head.weight * p.head.scale) ** 2 * second
    return s if s > 2 * math.log(max(a.vocab_size, 2)) else 0.0


def gradient_at_top(
    p: Parametrization, inputs: InputStatistics, log_variance: Array, r: Array, log_token_share: Array
) -> AtTop:
    """Token correlation of the gradient that enters at the last stream_out, and what is orthogonal to the stream.

    The share f of positions that carry loss multiplies the variance by f and the covariance by f^2. For small logits
    and an untied head the result is f (c - 1/V) / (1 - 1/V), c the collision probability of the targets. A head that
    reads one position (classes) gives 0. Without a head, or for a given stream, it is f c.
    """
    a = p.architecture
    if a.head == "classes":
        return AtTop(0.0, norm_leaves(a, 1.0), 0.0)
    loss = inputs.decoder or inputs
    if a.head == "none" or inputs.kind == "stream":
        given = loss.loss_fraction * max(0.0, loss.target_correlation)
        alone = norm_leaves(a, 1.0)
        return AtTop(given, alone, ratio(given * norm_leaves(a, r), alone))
    c = coincidences(a, loss)
    top = top_gradient(p, log_variance, r, log_token_share)

    def moments(normed: bool) -> tuple[Array, Array]:
        variance = top.variance(c.copied, normed=normed)
        shared = loss.loss_fraction * ratio(top.covariance(*c, normed=normed), variance)
        return variance, np.clip(shared, 0.0, 1.0)

    variance, shared = moments(a.has_final_norm)
    if a.has_final_norm:
        return AtTop(shared, 1.0, shared)
    orthogonal_variance, orthogonal_shared = moments(True)
    alone = norm_leaves(a, 1.0, top.along)
    return AtTop(
        shared, alone * ratio(orthogonal_variance, variance), correlation(orthogonal_shared * norm_leaves(a, r), alone)
    )

"""What a prediction leaves out and a user has to know: a note for each, with how far off predictions were measured.

`predict` adds those that apply to the profile's `notes`. A text with {} takes a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from signalprop.network.activations import activation
from signalprop.network.inputs import InputStatistics
from signalprop.network.kinds import kind_named, kinds_in, rows_where
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import PLACEMENTS, Parametrization
from signalprop.network.residual import NORM_AFTER, NORM_ON_BRANCH
from signalprop.results.profile import DRAWN, Profile
from signalprop.results.verdicts import SCORE_VARIANCE
from signalprop.sublayers.attention.roles import Settings as AttentionSettings
from signalprop.sublayers.attention.roles import has_window, score_variances
from signalprop.sublayers.global_attention.roles import as_usual

# Variance of scores up to which predicted gradients are measured to be right within 10 % (docs/theory/kernels.md).
LARGE_SCORES = 8.0
SCORES = (
    "attention scores have variance {}, so attention is nearly one-hot: gradients may be predicted too low (15 % at 12 "
    "layers and score variance 39); for deeper networks or larger scores use fidelity simulate"
)
DRAWN_NETWORKS = (
    "there is no closed form for {}, so the prediction is the mean over {} random networks; standard errors are in the "
    "series (last variance {:.1%}, token correlation {:.2g}, first gradient {:.1%})"
)
DROPPED_SCORES = (
    "first gradients may be predicted too low, because attention has dropout, scores have variance {:.3g} and "
    "branches are normalised: measured 1.2 (variance 8, 5 layers) to 2.5 times (32, 6 layers of width 64) the "
    "prediction at dropout 0.3; use fidelity simulate"
)
SHAPED = (
    "queries and keys are not zero, but the prediction of shaped attention ignores scores; use fidelity simulate or "
    "queries of zero"
)
# Standard deviation of gates' logits from which the gradient that gates send back is felt (records/several-streams.md).
_STRONG_GATES = 2.0
GATES = (
    "first gradients may be predicted too high, because gates between streams have logits of standard deviation {:.3g} "
    "(7 to 11 % at 2.56); with a smaller gate_scale (0.01 in the paper) the network starts as one stream"
)
# Of the score variance over the squared cap: beyond, capped scores are far from Gaussian.
_CAPPED = 0.25
CAP = (
    "scores of variance {:.3g} are capped at {:g}, so they are far from Gaussian, which the prediction assumes: at "
    "variance 5 and a cap of 2 branches were 9 to 21 % off, gradients 8 to 13 %"
)
AVERAGED_WINDOWS = (
    "averaging over positions is not exact for windowed attention, because tokens in one window are more correlated; "
    "use fidelity kernel of one parametrization, or measure"
)
IMAGES = (
    "images are predicted by their average: if they differ in contrast, first gradients are larger than predicted, "
    "because norms divide each image by its variance (Fashion-MNIST: 1.2 to 3.6 times)"
)
EQUAL_TOKENS = (
    "token correlations may be predicted too low, because without a text repeated words enter as an average: with "
    "real text they were up to 4 times the prediction (Qwen3.5, width 256; LFM2: 3 times); give --data, as measure "
    "and compare do"
)
# Share of pairs of tokens that enter as one, times the score variance, from which it was felt (docs/limits.md).
_REPEATED = 0.1
REPEATED = (
    "{:.2g} of all pairs of tokens are repeats and scores have variance {:.3g}, so averaging over positions gives "
    "first gradients 7 (product of both 0.3) to 80 % (0.7) too low; use fidelity kernel"
)
WINDOWS = (
    "{:.2g} of all pairs of tokens are repeats and scores have variance {:.3g}; repeats in a window are followed to "
    "first order only: the covariance of two tokens after the first attention was 8 to 12 % below the prediction at "
    "products of 0.14 to 0.2 (3 % at 0.05)"
)
CAUSAL = (
    "{:.2g} of all pairs of tokens are repeats and scores have variance {:.3g}; repeats under a causal mask are "
    "followed to first order only, so first gradients are predicted too high (2 layers: measured 0.8 times the "
    "prediction at a product of 1, 0.6 times at 4.4); use fidelity simulate"
)
_REPEATED_CAUSAL, _ONE_WORD = 0.5, 0.99  # that product; a share from which all tokens are one, which is exact
NARROW = (
    "{:.2g} of all pairs of tokens are repeats, scores have variance {:.3g} and not all norms are pre-norms: first "
    "gradients of such encoder-decoders were on average 1.2 to 2.6 times the prediction at width 128 and 1.0 to 1.5 "
    "times at 512; use fidelity simulate"
)
# What a tied head's gradient has along the stream, in rows of the head, from which it is felt (docs/theory/network.md).
_TIED = 0.05
TIED = (
    "first gradients may be predicted too low, because the head is tied to the embedding and predicts the input "
    "token with probability {:.2g} (1 to 8 layers: up to twice the prediction); use fidelity simulate"
)
# Spread of ln of a token's variance (docs/limits.md) from which the mean over tokens is no longer predicted.
SPREAD = 0.3
UNSTABLE = (
    "variances and gradients may be many times the prediction (14 and 50 times in 4 layers of width 256), because "
    "gates without norms let tokens differ ever more: ln of the variance spreads by {} at the top (bound "
    f"{SPREAD:g}); use an activation of dks, or fidelity simulate"
)
# Token correlation from which single networks' gradients scatter by more than twice, after post-norms or without skips.
ALIKE = 0.99
COLLAPSED = (
    "tokens become nearly equal, so gradients differ widely between networks and their mean is above the prediction "
    "(e^3.7 times in 2 + 2 layers of width 128 without skips); use fidelity simulate"
)
LOGITS = (
    "logits have variance {}, so a few words dominate the softmax and gradients are predicted too low (fresh mT5: 0.86 "
    "times the measured ones); use fidelity simulate"
)
QUERY_SIZES = (
    "token correlations may be off (12 % in fresh OLMo 2), because QK-norm divides each token by its size and this "
    "average divides all by one size; use fidelity kernel"
)
SMALL_OUTPUTS = (
    "gradients through gated DeltaNets have a heavy tail, because the norm of a head divides by outputs near zero: "
    "with small heads the mean over few random networks is unreliable"
)


def left_out_of(p: Parametrization, inputs: InputStatistics, profile: Profile) -> tuple[str, ...]:
    """What a prediction, other than by fidelity simulate, leaves out that matters here, a sentence each."""
    return (
        *_of_scores(p, profile),
        *_of_tokens(p, inputs, profile),
        *_of_one_table(p, inputs, profile),
        *_of_kinds(p),
    )


def _of_scores(p: Parametrization, profile: Profile) -> Iterator[str]:
    single = p.skip.ndim == 1  # a sweep has one set of notes
    largest = profile.statistics[SCORE_VARIANCE] if single else scores_of(p).max(initial=0.0)
    on_branches = not NORM_ON_BRANCH.isdisjoint(p.architecture.placements)
    if single and DRAWN in profile.statistics:
        yield _of_draws(p, profile)
    elif single and largest >= LARGE_SCORES and p.architecture.attention_dropout and on_branches:
        yield DROPPED_SCORES.format(largest)
    elif single and largest > LARGE_SCORES:
        yield SCORES.format(f"{largest:.3g}")
    attends = rows_where(p, lambda kind: kind.attends_itself) & (p.attention_gain != 0)
    if is_shaped(p) and (attends & (p.weights["query"] > 0) & (p.weights["key"] > 0)).any():
        yield SHAPED
    streams = p.architecture.streams
    std = 0.0 if streams is None else streams.logit_std(p.architecture.d_model)
    if std >= _STRONG_GATES:
        yield GATES.format(std)
    cap = AttentionSettings.of(p.architecture).score_cap
    if cap is not None and largest > _CAPPED * cap**2:
        yield CAP.format(largest, cap)


def _of_draws(p: Parametrization, profile: Profile) -> str:
    """How many networks, and how far their mean may be from that of all."""
    words = [kind.words + " of large scores" * kind.closed for kind in kinds_in(p) if kind.drawn(p).any()]
    last, first = profile.forward["stream_out"], (profile.gradient or profile.forward)["stream_in"]
    errors = (last.variance_se, last.token_correlation_se, first.variance_se)
    several = (0.0 if x is None else float(x[k]) for x, k in zip(errors, (-1, -1, 0), strict=True))
    return DRAWN_NETWORKS.format(" and ".join(words), profile.statistics[DRAWN], *several)


def _of_tokens(p: Parametrization, inputs: InputStatistics, profile: Profile) -> Iterator[str]:
    a, moments = p.architecture, profile.fidelity == "moments"
    if has_window(a) and moments:
        yield AVERAGED_WINDOWS
    if inputs.kind == "patches" and inputs.second_moments is not None and (moments or inputs.second_moments.ndim != 3):
        yield IMAGES
    by_id = not moments and inputs.tokens is not None and inputs.tokens.shape[1] == a.seq_len
    if p.skip.ndim == 1 and inputs.kind == "tokens":
        enters = p.embedding.token**2, p.embedding.position**2, p.embedding.segment**2
        equal, scores = inputs.token_correlation * enters[0] / max(sum(enters), 1e-300), scores_of(p).max(initial=0.0)
        if equal * scores >= _REPEATED and moments and a.kind != "decoder":
            yield REPEATED.format(equal, scores)
        elif equal * scores >= _REPEATED and by_id and has_window(a) and DRAWN not in profile.statistics:
            yield WINDOWS.format(equal, scores)
        elif equal * scores >= _REPEATED_CAUSAL and by_id and a.kind == "decoder" and equal < _ONE_WORD:
            yield CAUSAL.format(equal, scores)
        elif equal * scores >= _REPEATED and a.kind == "encoder-decoder" and set(a.placements) != {"pre"}:
            yield NARROW.format(equal, scores)
    if p.skip.ndim == 1 and a.kind != "encoder-decoder" and inputs.kind == "tokens" and not by_id:
        r = profile.forward["stream_in"].token_correlation
        if r[0] > 0 and r.min() < r[0] / 2:  # that of equal tokens stays what it is
            yield EQUAL_TOKENS


def _of_one_table(p: Parametrization, inputs: InputStatistics, profile: Profile) -> Iterator[str]:
    if p.skip.ndim > 1:
        return
    spread = _spread(p, profile)
    if spread > SPREAD:
        yield UNSTABLE.format(f"{spread:.2g}")
    alike = profile.forward["stream_out"].token_correlation > ALIKE
    lost = (p.placement == PLACEMENTS.index("post")) | (p.skip == 0)
    if p.architecture.kind == "encoder-decoder" and (alike & lost).any():
        yield COLLAPSED
    if profile.gradient is not None:
        from signalprop.kernels.tied_head import follows
        from signalprop.theory.loss_gradient import decides_few

        variance = decides_few(p, float(profile.forward["stream_out"].log_variance[-1]))
        if variance:
            yield LOGITS.format(f"{variance:.3g}")
        probability, along = _favoured(p, profile)
        followed = profile.fidelity == "kernel" and follows(p, inputs.decoder or inputs)
        if along >= _TIED and not followed:
            yield TIED.format(probability)
    sizes = p.architecture.qk_norm and p.architecture.norm_placement == "res-post" and profile.fidelity == "moments"
    if sizes and (profile.forward["branch"].variance <= 0.9 * p.norm_output**2).any():
        yield QUERY_SIZES


def _favoured(p: Parametrization, profile: Profile) -> tuple[float, float]:
    """The probability that a tied head gives to the token that is read, and that times the root of its row's share of
    the stream; 0 where the head is not the table or reads through a map."""
    from signalprop.theory.loss_gradient import top_gradient
    from signalprop.theory.network import token_share

    a = p.architecture
    if not a.has_tied_head or a.head_transform:
        return 0.0, 0.0
    last, share = profile.forward["stream_out"], token_share(p, np.zeros(p.n_sublayers))
    top = top_gradient(p, last.log_variance[-1], last.token_correlation[-1], share)
    enters, branch = profile.forward["stream_in"].log_variance, profile.forward["branch"].log_variance
    with np.errstate(divide="ignore"):
        kept, added = np.log(p.skip**2) + enters, np.log(p.branch**2) + branch
    after = np.isin(p.placement, [PLACEMENTS.index(name) for name in NORM_AFTER])  # they shrink the row with the stream
    passed = np.exp((kept - np.logaddexp(kept, added))[after].sum() / 2)
    read = float(top.p_read)
    return read, read * math.sqrt(float(top.aligned)) * float(passed)


def _of_kinds(p: Parametrization) -> Iterator[str]:
    if kind_named("gated_delta_net").of(p).any():
        yield SMALL_OUTPUTS


def _spread(p: Parametrization, profile: Profile) -> float:
    """Of ln of tokens' variances, in gated stacks without norms, in which differences between tokens grow; else 0.

    A token's variance is off by sqrt(2 / d) where it is drawn. A branch of gated map passes that on times Q'(1) =
    1 + E z f f' / E f^2, as the share that it has of the next stream, the skip passes it on as it is.
    """
    a = p.architecture
    bare = (p.placement == PLACEMENTS.index("none")) & kind_named("feed_forward").of(p)
    if not (a.gated and bare.any()):
        return 0.0
    growth = gate_growth(a.activation)
    branch, out = profile.forward["branch"].log_variance, profile.forward["stream_out"].log_variance
    share = np.minimum(p.branch**2 * np.exp(np.minimum(branch - out, 0.0)), 1.0)
    return math.sqrt(2 / a.d_model) * math.exp(min(np.log1p(share[bare] * max(growth, 0.0)).sum(), 700))


def gate_growth(name: str) -> float:
    """E z f f' / E f^2 of an activation `name`: what a gate adds to differences between tokens' variances."""
    f = activation(name)
    z, weight = np.polynomial.hermite_e.hermegauss(101)
    value = f.function(z)
    return float((weight * z * value * f.derivative(z)).sum() / (weight * value**2).sum())


def scores_of(p: Parametrization, profile: Profile | None = None) -> FloatArray:
    """Variance of the scores of every attention, (attentions,).

    Args:
        profile: of the network, which has the variance of the stream where attention reads it without a norm. Without
            a profile such attentions are left out.
    """
    attends = rows_where(p, lambda kind: kind.attends)
    raw = (p.placement == PLACEMENTS.index("none")) | (p.placement == PLACEMENTS.index("res-post"))
    on_unit, apart = score_variances(p), kind_named("global_attention").of(p)
    if apart.any():
        on_unit = np.where(apart, score_variances(as_usual(p)), on_unit)
    reads: FloatArray = p.norm_output**2 + p.norm_shift
    if profile is None:
        attends = attends & ~raw
    elif not p.architecture.qk_norm:  # which divides by the size that queries and keys have
        stream = np.exp(np.minimum(profile.forward["stream_in"].log_variance, 300))
        reads = np.where(raw, stream, reads)
    else:
        reads = np.where(raw, 1.0, reads)
    scores: FloatArray = on_unit * reads**2 * (p.attention_gain != 0)
    return scores[..., attends]


def is_shaped(p: Parametrization) -> bool:
    """Whether some attention is shaped."""
    from signalprop.theory.network import is_shaped as shaped

    return shaped(p)

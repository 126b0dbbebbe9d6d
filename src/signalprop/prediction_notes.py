"""What a prediction leaves out and a user has to know: a note for each, with how far off predictions were measured.

`predict` adds those that apply to the profile's `notes`.
"""

from __future__ import annotations

import math

import numpy as np

from signalprop.network.activations import activation
from signalprop.network.inputs import InputStatistics
from signalprop.network.kinds import kind_named, rows_where
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import PLACEMENTS, Parametrization
from signalprop.results.profile import DRAWN, Profile
from signalprop.sublayers.attention.heads import score_variances
from signalprop.sublayers.attention.roles import Settings as AttentionSettings
from signalprop.sublayers.attention.roles import has_window, sights
from signalprop.sublayers.global_attention.roles import Settings as GlobalSettings
from signalprop.sublayers.global_attention.roles import as_usual
from signalprop.sublayers.mamba2.roles import Settings as ScanSettings

# Variance of scores up to which predicted gradients are measured to be right within 10 % (docs/theory/kernels.md).
LARGE_SCORES = 8.0


def _large_scores(p: Parametrization, profile: Profile) -> str:
    """What to say of a network whose attention is nearly one-hot at the start; '' where it is not."""
    if p.skip.ndim > 1:  # a sweep has one set of notes
        return ""
    if DRAWN in profile.statistics:
        return (
            "scores are so large that attention is nearly one-hot: its heads are drawn, and the prediction is the mean "
            f"of {profile.statistics[DRAWN]} such networks for every sequence; token correlations were right to .002, "
            "gradients 5 (12 layers) to 8 % (32) too high on average (fresh Gemma 4 of width 256)"
        )
    largest = scores_of(p).max(initial=0.0)
    if largest <= LARGE_SCORES:
        return ""
    return scores_note(f"{largest:.3g}")


def scores_note(variance: str) -> str:
    """What to say of scores whose `variance` is above LARGE_SCORES."""
    return (
        f"scores have variance {variance}: attention is nearly one-hot, and predicted gradients can be a third off "
        "or more; use fidelity simulate"
    )


def left_out_of(p: Parametrization, inputs: InputStatistics, profile: Profile) -> tuple[str, ...]:
    """What predictions leave out that matters here, a sentence each, or ''."""
    return (
        _large_scores(p, profile),
        _left_out(p),
        _gates(p),
        _cap(p),
        _window(p, profile),
        _images(inputs, profile),
        _equal_tokens(p, inputs, profile),
        _unstable(p, profile),
        _collapsed(p, profile),
        _large_logits(p, profile),
        _query_sizes(p, profile),
        _small_outputs(p),
        _scan_without_norm(p),
        _keys_as_values(p, profile),
    )


def _keys_as_values(p: Parametrization, profile: Profile) -> str:
    if DRAWN in profile.statistics or profile.fidelity == "simulate":
        return ""
    if not kind_named("global_attention").of(p).any() or not GlobalSettings.of(p.architecture).shared:
        return ""
    return (
        "keys are values: what scores share with values, of order score variance / d_head, is left out; it is followed "
        "where heads are drawn (docs/theory/attention.md)"
    )


def _scan_without_norm(p: Parametrization) -> str:
    if not kind_named("mamba2").of(p).any() or ScanSettings.of(p.architecture).normed:
        return ""
    return (
        "no norm follows the scan of Mamba-2: single networks differ much; where inputs are large their branches "
        "had 0.4 to 2.8 times the predicted variance (fresh Falcon-H1 of width 64 with large factors)"
    )


QUERY_SIZES = (
    "QK-norm divides every token by its own size, averages by their mean, and the epsilon of norms on branches lets "
    "sizes differ: token correlations were 12 % off (fresh OLMo 2); fidelity kernel takes each by its own"
)


def _query_sizes(p: Parametrization, profile: Profile) -> str:
    """What to say of QK-norm on a stream whose tokens differ in size, by the epsilon of norms on branches; else ''."""
    a = p.architecture
    if not a.qk_norm or a.norm_placement != "res-post" or p.skip.ndim > 1 or profile.fidelity != "moments":
        return ""
    if (profile.forward["branch"].variance > 0.9 * p.norm_output**2).all():
        return ""
    return QUERY_SIZES


def _large_logits(p: Parametrization, profile: Profile) -> str:
    """What to say of a head whose logits are so large that a few words decide the softmax; '' where it is not."""
    from signalprop.theory.head import decides_few

    if p.skip.ndim > 1 or profile.gradient is None:
        return ""
    variance = decides_few(p, float(profile.forward["stream_out"].log_variance[-1]))
    return logits_note(f"{variance:.3g}") if variance else ""


def logits_note(variance: str) -> str:
    """What to say of logits of a `variance` that lets a few words decide the softmax."""
    return (
        f"logits have variance {variance}: a few words decide the softmax, and what norms take out along their "
        "rows is left out (fresh mT5: gradients 1.2 times the measured ones); use fidelity simulate"
    )


# Standard deviation of gates' logits from which the gradient that gates send back is felt (docs/several-streams.md).
_STRONG_GATES = 2.0


def _gates(p: Parametrization) -> str:
    streams = p.architecture.streams
    std = 0.0 if streams is None else streams.logit_std(p.architecture.d_model)
    if std < _STRONG_GATES:
        return ""
    return (
        f"gates between streams have logits of standard deviation {std:.3g}: first gradients were measured 7 to 11 % "
        "smaller than predicted at 2.56; a smaller gate_scale (0.01 in the paper) starts as one stream"
    )


# Of the score variance over the squared cap: beyond, capped scores are far from Gaussian.
_CAPPED = 0.25


def _cap(p: Parametrization) -> str:
    cap = AttentionSettings.of(p.architecture).score_cap
    largest = scores_of(p).max(initial=0.0)
    if cap is None or largest <= _CAPPED * cap**2:
        return ""
    return (
        f"scores of variance {largest:.3g} are capped at {cap:g}, and far from the Gaussian that stands for them: at "
        "5 and a cap of 2 branches were 9 to 21 % off, gradients 8 to 13 %"
    )


# Variance of scores from which windows in every layer are felt: at 1 they were, at 0.1 (fresh Mistral) not.
_SHARP = 0.5
WINDOWS = (
    "every layer sees a window, and scores are of order 1: token correlations were measured 5 % smaller than "
    "predicted (fresh Qwen3-MoE of 12 layers, windows of a quarter of the tokens; not without windows)"
)


def _window(p: Parametrization, profile: Profile) -> str:
    if not has_window(p.architecture):
        return ""
    if profile.fidelity != "moments":
        everywhere = all(seen.window for seen in sights(p.architecture, p.layer, p.architecture.seq_len).run)
        everywhere &= DRAWN not in profile.statistics and not kind_named("global_attention").of(p).any()
        return WINDOWS if everywhere and scores_of(p).max(initial=0.0) >= _SHARP else ""
    return (
        "averages over all pairs of tokens do not compound where attention sees a window, in which tokens are more "
        "alike; take fidelity kernel of one parametrization, or measure"
    )


def _images(inputs: InputStatistics, profile: Profile) -> str:
    if inputs.kind != "patches" or inputs.second_moments is None or profile.fidelity == "simulate":
        return ""
    if inputs.second_moments.ndim == 3 and profile.fidelity == "kernel":
        return ""
    return (
        "images are predicted by their average, though the first norms divide each by its own variance: where they "
        "differ in contrast, first gradients are larger (Fashion-MNIST: 1.2 to 3.6 times)"
    )


EQUAL_TOKENS = (
    "equal tokens count as an average correlation, and gates square that, though two equal tokens stay alike: with "
    "the ids of real text token correlations were up to 4 times those predicted without (Qwen3.5, width 256), 3 "
    "times in LFM2; give a text, as measure and compare do"
)


def _equal_tokens(p: Parametrization, inputs: InputStatistics, profile: Profile) -> str:
    """What to say where averages let the correlation of equal tokens, which stays what it is, fall below half."""
    a = p.architecture
    if p.skip.ndim > 1 or a.kind == "encoder-decoder" or inputs.kind != "tokens" or profile.fidelity == "simulate":
        return ""
    if profile.fidelity == "kernel" and inputs.tokens is not None and inputs.tokens.shape[1] == a.seq_len:
        return ""
    r = profile.forward["stream_in"].token_correlation
    if not (r[0] > 0 and r.min() < r[0] / 2):
        return ""
    return EQUAL_TOKENS


# Spread of ln of a token's variance (docs/limits.md) from which the mean over tokens is no longer predicted.
SPREAD = 0.3


def _unstable(p: Parametrization, profile: Profile) -> str:
    """What to say of gated stacks without norms, in which differences between tokens' variances grow; '' elsewhere.

    A token's variance is off by sqrt(2 / d) where it is drawn. A branch of gated map passes that on times Q'(1) =
    1 + E z f f' / E f^2, as the share that it has of the next stream, the skip passes it on as it is.
    """
    a = p.architecture
    if p.skip.ndim > 1 or not a.gated:
        return ""
    bare = (p.placement == PLACEMENTS.index("none")) & rows_where(p, lambda kind: kind.name == "feed_forward")
    if not bare.any():
        return ""
    growth = gate_growth(a.activation)
    branch, out = profile.forward["branch"].log_variance, profile.forward["stream_out"].log_variance
    share = np.minimum(p.branch**2 * np.exp(np.minimum(branch - out, 0.0)), 1.0)
    spread = math.sqrt(2 / a.d_model) * math.exp(min(np.log1p(share[bare] * max(growth, 0.0)).sum(), 700))
    if spread <= SPREAD:
        return ""
    return spread_note(f"{spread:.2g}")


def gate_growth(name: str) -> float:
    """E z f f' / E f^2 of an activation `name`: what a gate adds to differences between tokens' variances."""
    f = activation(name)
    z, weight = np.polynomial.hermite_e.hermegauss(101)
    value = f.function(z)
    return float((weight * z * value * f.derivative(z)).sum() / (weight * value**2).sum())


def spread_note(spread: str) -> str:
    """What to say of gated stacks without norms whose `spread` is above SPREAD."""
    return (
        f"without norms, differences between tokens grow through the gates, to a spread of {spread} in ln of the "
        f"variance at the top: above {SPREAD:g}, variances and gradients become many times the prediction (4 layers "
        "of width 256: 14 and 50 times); take an activation of dks, or fidelity simulate"
    )


def _collapsed(p: Parametrization, profile: Profile) -> str:
    """What to say where tokens become alike and how far networks scatter is not predicted."""
    if p.skip.ndim > 1 or profile.fidelity == "simulate" or p.architecture.kind != "encoder-decoder":
        return ""
    alike = profile.forward["stream_out"].token_correlation > ALIKE
    if not (alike & ((p.placement == PLACEMENTS.index("post")) | (p.skip == 0))).any():
        return ""
    return (
        "tokens become nearly alike, and what gradients norms then let through scatters widely between networks: the "
        "mean over networks was e^3.7 times the prediction (2 + 2 layers of width 128 without skips); use fidelity "
        "simulate"
    )


# Token correlation from which single networks' gradients scatter by more than twice, after post-norms or without skips.
ALIKE = 0.99


def _small_outputs(p: Parametrization) -> str:
    """What to say of gradients through the norm of gated DeltaNets; '' where there are none."""
    if not rows_where(p, lambda kind: kind.name == "gated_delta_net").any():
        return ""
    return (
        "gradients through gated DeltaNets have a heavy tail (the norm of a head divides by outputs near zero): over "
        "12 layers predictions were within 8 % by token kernels and 17 % by averages with heads of 64 and 128 values, "
        "and 2.5 times the mean of 10 networks with heads of 16"
    )


def _left_out(p: Parametrization) -> str:
    """What to say of shaped attention whose scores are not zero at the start; '' where there is nothing to say."""
    if not is_shaped(p):
        return ""
    attends = rows_where(p, lambda kind: kind.attends_itself) & (p.attention_gain != 0)
    if not (attends & (p.weights["query"] > 0) & (p.weights["key"] > 0)).any():
        return ""
    return (
        "queries and keys are not zero, and the kernels of shaped attention leave scores out; use fidelity simulate "
        "(or zero queries)"
    )


def scores_of(p: Parametrization) -> FloatArray:
    """Variance of the scores of every attention that reads a normed stream."""
    raw = (p.placement == PLACEMENTS.index("none")) | (p.placement == PLACEMENTS.index("res-post"))
    own, apart = score_variances(p), kind_named("global_attention").of(p)
    if apart.any():
        own = np.where(apart, score_variances(as_usual(p)), own)
    scores: FloatArray = own * (p.norm_output**2 + p.norm_shift) ** 2 * (p.attention_gain != 0)
    return scores[..., rows_where(p, lambda kind: kind.attends) & ~raw]


def is_shaped(p: Parametrization) -> bool:
    """Whether some attention is shaped."""
    from signalprop.theory.network import is_shaped as shaped

    return shaped(p)

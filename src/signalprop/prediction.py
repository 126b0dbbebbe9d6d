"""`predict`: the cheapest reading of a Parametrization that is right for its architecture."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, cast, get_args

import numpy as np

from signalprop.data.batches import default_statistics
from signalprop.errors import InputError, require
from signalprop.files.limits import check_fits
from signalprop.files.validation import typed
from signalprop.network.activations import activation
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics
from signalprop.network.kinds import kinds_where
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.results.profile import EXPERT_LOAD, Profile
from signalprop.schemes.default import parametrized
from signalprop.sublayers.attention.roles import adds_first_values, has_window, settings_of, sights

if TYPE_CHECKING:
    from signalprop.kernels.grid import Grid

_BYTES = 5_000  # that a prediction holds of a sublayer, at least
Fidelity = Literal["auto", "moments", "kernel", "simulate"]


@typed
def predict(
    subject: str | Architecture | Parametrization,
    inputs: InputStatistics | None = None,
    *,
    scheme: str | None = None,
    fidelity: Fidelity = "auto",
    backward: bool = True,
) -> Profile:
    """Predict the signal at every probe point.

    Args:
        subject: a preset's name, an Architecture, or a Parametrization, which has all numbers of the network.
        inputs: statistics of the data; default: Zipf's law (15 % of positions carry loss in an encoder).
        scheme: name of the initialisation of a preset or an Architecture; default: that of `signalprop predict`.
        fidelity: `moments` (closed form), `kernel` (token kernels, one parametrization at a time), `simulate`
            (random-weight networks), or `auto`: kernel where positions differ (decoders, encoder-decoders, class
            tokens; real ids in shallow encoders; shaped attention), else moments. `auto` follows a long decoder
            without real ids on a grid of positions, `kernel` all of them.
        backward: also the gradient, and as `statistics` of every layer the distance of its Jacobian from the identity
            (`identity_distance`) and ln of the gain from the last stream back to its input (`log_gain`).

    The profile's `fidelity` says what was used, its `notes` why.

    Raises:
        InputError: an unknown preset or scheme, a scheme for a Parametrization, or a fidelity that does not cover the
            architecture.
    """
    parametrization = parametrized(subject, scheme)
    statistics = inputs or default_statistics(parametrization.architecture)
    chosen: Fidelity = check_fidelity(fidelity)
    note, grid = "", None
    if fidelity == "auto":
        chosen, note = cheapest(parametrization, statistics)
    if chosen == "moments":
        n = parametrization.n_sublayers
        check_fits(_BYTES * n, f"a prediction of {n:,} sublayers", "take fewer layers")
        from signalprop.theory.network import predict_moments
        from signalprop.theory.scatter import with_scatter

        profile = predict_moments(parametrization, statistics, backward=backward)
        if parametrization.skip.ndim == 1:
            profile = with_scatter(parametrization, profile)
    elif chosen == "kernel":
        from signalprop.kernels.grid import grid_for
        from signalprop.kernels.tokens import predict_token_kernels

        grid = grid_for(parametrization, statistics) if fidelity == "auto" else None
        profile = predict_token_kernels(parametrization, statistics, backward=backward, grid=grid)
    else:
        require("torch", "models")
        from signalprop.measurement.simulation import simulate

        profile = simulate(parametrization, statistics, backward=backward)
    if chosen != "simulate" and parametrization.skip.ndim == 1:
        profile = _with_expert_loads(parametrization, statistics, profile, grid)
    a = parametrization.architecture
    one = a.streams is None and not adds_first_values(a) and parametrization.skip.ndim == 1
    if backward and chosen != "simulate" and one and not _is_shaped(parametrization):
        profile = _with_nearness(parametrization, statistics, profile)
    notes = (note, *(() if chosen == "simulate" else _left_out_of(parametrization, statistics, profile)))
    return replace(profile, reads=statistics.source, notes=(*profile.notes, *(line for line in notes if line)))


_PER_PAIR = 3.5e-7  # seconds that a pair of tokens takes in a sublayer, on one core


def expected_seconds(p: Parametrization, inputs: InputStatistics, fidelity: Fidelity) -> float:
    """Seconds that a prediction takes where it follows every pair of tokens; 0 where it does not, or simulates.

    Raises:
        InputError: it would not fit into memory.
    """
    from signalprop.kernels.grid import grid_for
    from signalprop.kernels.tokens import check_fits_of

    chosen = cheapest(p, inputs)[0] if fidelity == "auto" else fidelity
    if chosen != "kernel" or (fidelity == "auto" and grid_for(p, inputs) is not None):
        return 0.0
    check_fits_of(p)
    return _PER_PAIR * p.n_sublayers * max(p.architecture.seq_len, p.architecture.target_len or 0) ** 2


def _with_expert_loads(p: Parametrization, inputs: InputStatistics, profile: Profile, grid: Grid | None) -> Profile:
    """The profile with how unevenly experts are loaded, as `statistics` and in a note."""
    if "experts" not in p.architecture.settings:
        return profile
    from signalprop.sublayers.experts.load import expert_loads

    loads = expert_loads(p, inputs, profile, grid)
    layers = np.flatnonzero(loads)
    shown = layers[np.unique(np.linspace(0, len(layers) - 1, 4).astype(int))] if len(layers) else layers
    said = ", ".join(f"{loads[i]:.2g} in layer {i}" for i in shown.tolist())
    note = (
        f"the load of an expert varies, over its mean within a sequence, by {said}: tokens that are alike choose alike"
    )
    return replace(
        profile,
        statistics={**profile.statistics, EXPERT_LOAD: loads.tolist()},
        notes=(*profile.notes, *([note] if len(layers) else [])),
    )


def _with_nearness(p: Parametrization, inputs: InputStatistics, profile: Profile) -> Profile:
    """The profile with the nearness of layers to the identity, and the gain of those after them, as `statistics`.

    The gain is that of position averages in either fidelity: averages of what a kernel profile has resolved by position
    do not compound (docs/theory/depth.md).
    """
    from signalprop.theory.bounds import nearness
    from signalprop.theory.network import predict_moments

    found = nearness(p, profile)
    if profile.fidelity == "kernel":
        found = replace(found, log_gain=nearness(p, predict_moments(p, inputs, backward=False)).log_gain)
    return replace(profile, statistics={**profile.statistics, **found.statistics()})


def check_fidelity(name: str) -> Fidelity:
    """The fidelity of that name.

    Raises:
        InputError: there is none.
    """
    if name not in get_args(Fidelity):
        raise InputError(f"unknown fidelity {name!r}; choose {', '.join(get_args(Fidelity))}")
    return cast(Fidelity, name)


# Sublayers times squared length up to which token kernels take well under a second.
_CHEAP = 500_000
_LONG = 25_000_000  # up to which they take seconds


def cheapest(parametrization: Parametrization, inputs: InputStatistics) -> tuple[Fidelity, str]:
    """The cheapest fidelity that is right for an architecture, and why."""
    a = parametrization.architecture
    single = parametrization.skip.ndim == 1
    if _is_shaped(parametrization) and a.kind == "encoder-decoder":
        return "simulate", "fidelity simulate: no closed form here shapes the attention of an encoder-decoder"
    if _is_shaped(parametrization) and single and not a.causal:
        return "kernel", "fidelity kernel: shaped attention weighs tokens by where they stand"
    for kind in kinds_where(lambda kind: kind.longest is not None and a.seq_len > kind.longest):
        if a.causal and single and kind.of(parametrization).any():
            return "moments", f"fidelity moments: beyond {kind.longest} tokens; {kind.beyond}"
    if a.causal and single:
        return "kernel", "fidelity kernel: positions of a causal stack differ, and position averages compound wrongly"
    if a.kind == "encoder" and a.head == "classes" and a.class_token and single:
        return "kernel", "fidelity kernel: the class token carries the whole gradient, so positions differ"
    if a.kind == "encoder" and single and has_window(a):
        return "kernel", "fidelity kernel: in a window tokens that stand near each other read the same keys"
    ids = inputs.tokens is not None and inputs.tokens.shape[1] == a.seq_len
    shallow = single and parametrization.n_sublayers * a.seq_len**2 <= _CHEAP
    if a.kind == "encoder" and ids and shallow and _small_scores(parametrization):
        return "kernel", "fidelity kernel: in a shallow stack it matters which tokens are equal"
    if a.causal:
        return (
            "moments",
            "fidelity moments: a sweep; position averages compound wrongly in causal stacks, gradients most",
        )
    if a.kind == "encoder-decoder" and single:
        rows = (parametrization.stack == 0).sum(), (parametrization.stack == 1).sum()
        if rows[0] * a.seq_len**2 + rows[1] * (a.target_len or a.seq_len) ** 2 <= _LONG:
            return "kernel", "fidelity kernel: positions of a causal decoder differ, and averages compound wrongly"
        return (
            "moments",
            "fidelity moments: averages over positions, though those of a causal decoder differ; gradients at its "
            "first sublayers were measured to be 1.3 (T5) to 1.8 times (Whisper) the prediction; fidelity kernel "
            "follows every position",
        )
    return "moments", "fidelity moments: all positions are alike, scalars suffice"


# Variance of scores up to which predicted gradients are measured to be right within 10 % (docs/theory/kernels.md).
LARGE_SCORES = 8.0


def _large_scores(p: Parametrization) -> str:
    """What to say of a network whose attention is nearly one-hot at the start; '' where it is not."""
    if p.skip.ndim > 1:  # a sweep has one set of notes
        return ""
    largest = _scores(p).max(initial=0.0)
    if largest <= LARGE_SCORES:
        return ""
    return scores_note(f"{largest:.3g}")


def scores_note(variance: str) -> str:
    """What to say of scores whose `variance` is above LARGE_SCORES."""
    return (
        f"scores have variance {variance}: attention is nearly one-hot, and predicted gradients can be a third off "
        "or more; use fidelity simulate"
    )


def _left_out_of(p: Parametrization, inputs: InputStatistics, profile: Profile) -> tuple[str, ...]:
    """What predictions leave out that matters here, a sentence each, or ''."""
    return (
        _large_scores(p),
        _left_out(p),
        _gates(p),
        _cap(p),
        _window(p, profile),
        _images(inputs, profile),
        _unstable(p, profile),
        _large_logits(p, profile),
        _query_sizes(p, profile),
    )


QUERY_SIZES = (
    "QK-norm divides every token by its own size, here by their mean, and the epsilon of norms on branches lets "
    "sizes differ: token correlations were 5 to 7 % off (fresh OLMo 2, OLMo 3, EXAONE 4)"
)


def _query_sizes(p: Parametrization, profile: Profile) -> str:
    """What to say of QK-norm on a stream whose tokens differ in size, by the epsilon of norms on branches; else ''."""
    a = p.architecture
    if not a.qk_norm or a.norm_placement != "res-post" or p.skip.ndim > 1:
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
        f"logits have variance {variance}: a few words decide the softmax, and what two positions share of it is "
        "an interpolation (fresh mT5: gradients 1.3 times the measured ones); use fidelity simulate"
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
    cap = settings_of(p.architecture).score_cap
    largest = _scores(p).max(initial=0.0)
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
        return WINDOWS if everywhere and _scores(p).max(initial=0.0) >= _SHARP else ""
    return (
        "averages over all pairs of tokens do not compound where attention sees a window, in which tokens are more "
        "alike; take fidelity kernel of one parametrization, or measure"
    )


def _images(inputs: InputStatistics, profile: Profile) -> str:
    if inputs.kind != "patches" or inputs.second_moments is None or profile.fidelity != "kernel":
        return ""
    return (
        "images are predicted by their average, though the first norms divide each by its own variance: where they "
        "differ in contrast, first gradients are larger (Fashion-MNIST: 3.6 times)"
    )


# Spread of ln of a token's variance (docs/limits.md) from which the mean over tokens is no longer predicted.
SPREAD = 0.3


def _unstable(p: Parametrization, profile: Profile) -> str:
    """What to say of gated stacks without norms, in which differences between tokens' variances grow; '' elsewhere.

    A token's variance is off by sqrt(2 / d) where it is drawn. A branch of gated map passes that on times Q'(1) =
    1 + E z f f' / E f^2, as the share that it has of the next stream, the skip passes it on as it is.
    """
    from signalprop.network.kinds import rows_where
    from signalprop.network.parametrization import PLACEMENTS

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


def _is_shaped(p: Parametrization) -> bool:
    from signalprop.theory.network import is_shaped

    return is_shaped(p)


def _left_out(p: Parametrization) -> str:
    """What to say of shaped attention whose scores are not zero at the start; '' where there is nothing to say."""
    from signalprop.network.kinds import rows_where

    if not _is_shaped(p):
        return ""
    attends = rows_where(p, lambda kind: kind.attends_itself) & (p.attention_gain != 0)
    if not (attends & (p.weights["query"] > 0) & (p.weights["key"] > 0)).any():
        return ""
    return (
        "queries and keys are not zero, and the kernels of shaped attention leave scores out; use fidelity simulate "
        "(or zero queries)"
    )


def _scores(p: Parametrization) -> FloatArray:
    """Variance of the scores of every attention that reads a normed stream."""
    from signalprop.network.kinds import rows_where
    from signalprop.network.parametrization import PLACEMENTS
    from signalprop.sublayers.attention.heads import score_variances

    raw = (p.placement == PLACEMENTS.index("none")) | (p.placement == PLACEMENTS.index("res-post"))
    scores: FloatArray = score_variances(p) * p.norm_output**4 * (p.attention_gain != 0)
    return scores[..., rows_where(p, lambda kind: kind.attends) & ~raw]


def _small_scores(p: Parametrization) -> bool:
    """Whether every attention reads a normed stream and has scores of order 1, as the token kernels need."""
    from signalprop.network.parametrization import PLACEMENTS

    raw = (p.placement == PLACEMENTS.index("none")) | (p.placement == PLACEMENTS.index("res-post"))
    return bool(not raw.any() and _scores(p).max(initial=0.0) <= 2.0)

"""What a profile means in plain words: a summary, and warnings where a threshold is passed."""

from __future__ import annotations

import math

import numpy as np

from signalprop.errors import InputError
from signalprop.report.tables import agreement_table, variance
from signalprop.results.comparison import Comparison
from signalprop.results.profile import Profile
from signalprop.results.text import network_in_words, number

# A gradient whose standard deviation changes tenfold between the last and the first layer is far outside what one
# learning rate serves (the papers' deep vanilla models that fail to train are at 10^2 and beyond in variance).
GRADIENT_RATIO = 100.0
# Tokens that share 95 % of their variance carry one twentieth of it as differences: attention hardly tells them apart.
RANK_COLLAPSE = 0.95
# The stream's variance at the top over that at the bottom, from which a late unit branch changes it by under 1 %.
STREAM_GROWTH = 100.0
FP16_MAX = 65504.0
# Of 10^9 normal numbers the largest is expected at 6 standard deviations.
LARGEST_IN_STDS = 6.0


def described(result: Profile | Comparison) -> str:
    """The network, its numbers and warnings: what a result's `summary()` says.

    Raises:
        InputError: a sweep.
    """
    profile = result.predicted if isinstance(result, Comparison) else result
    if profile.forward["stream_out"].variance.ndim > 1:
        raise InputError("a summary needs a single profile, this is a sweep; select one of its members")
    lines = [f"{'network':<20}{network_in_words(profile.architecture)}", f"{'scheme':<20}{profile.scheme}"]
    lines += [*summary(profile), *(f"{'warning':<20}{line}" for line in warnings(profile))]
    if isinstance(result, Comparison):
        lines += ["", agreement_table(result)]
    return "\n".join(lines)


def summary(profile: Profile) -> list[str]:
    """Lines of numbers: fidelity, variance at the top, gradient ratio, sensitivity."""
    stream = profile.forward["stream_out"]
    seeds = f", {profile.n_seeds} seed{'s' if profile.n_seeds != 1 else ''}" if profile.n_seeds else ""
    entered = profile.input
    lines = [
        f"source              {profile.source} ({profile.fidelity}{seeds})",
        f"stream, first/last  variance {number(entered.get('variance'))} -> {variance(stream, -1)}, "
        f"token correlation {number(entered.get('token_correlation'))} -> {number(stream.token_correlation[-1])}",
    ]
    if profile.gradient is not None:
        lines.append(f"gradient ratio      {variance(profile.gradient['stream_in'], 0)} (first over last, variance)")
    sensitivity = profile.sensitivity()
    lines.append(
        f"sensitivity         mean {number(sensitivity['mean'])}, median {number(sensitivity['median'])} "
        "(branch over stream variance, times sublayers)"
    )
    return lines + [f"note                {note}" for note in profile.notes]


def warnings(profile: Profile) -> list[str]:
    """One sentence per threshold passed; empty for a healthy signal."""
    found = []
    if profile.gradient is not None:
        series = profile.gradient["stream_in"]
        ratio, shown = float(series.log_variance[0]), variance(series, 0)
        if ratio < -math.log(GRADIENT_RATIO):
            found.append(
                f"the gradient vanishes: its variance at the first sublayer is {shown} of that at the last "
                f"(below 1/{GRADIENT_RATIO:g})"
            )
        elif ratio > math.log(GRADIENT_RATIO):
            found.append(
                f"the gradient explodes: its variance at the first sublayer is {shown} times that at the last "
                f"(above {GRADIENT_RATIO:g})"
            )
    stream, branch = profile.forward["stream_out"], profile.forward["branch"]
    collapsed = np.flatnonzero(stream.token_correlation > RANK_COLLAPSE)
    if collapsed.size:
        found.append(
            f"rank collapse: from sublayer {int(collapsed[0])} on tokens correlate above {RANK_COLLAPSE:g} "
            f"({float(stream.token_correlation[collapsed].max()):.4f} at most)"
            if collapsed[-1] == profile.n_sublayers - 1
            else f"rank collapse: {collapsed.size} of {profile.n_sublayers} sublayers are above {RANK_COLLAPSE:g}"
        )
    growth = float(stream.log_variance[-1] - profile.forward["stream_in"].log_variance[0])
    if math.isfinite(growth) and growth > math.log(STREAM_GROWTH):
        found.append(
            f"the stream grows: its variance at the top is {number(math.exp(min(growth, 700)))} times that at the "
            f"bottom (above {STREAM_GROWTH:g}); late layers change it little"
        )
    limit = 2 * math.log(FP16_MAX / LARGEST_IN_STDS)
    for name, series in (("stream", stream), ("branch", branch)):
        over = np.flatnonzero(series.log_variance > limit)
        if over.size:
            found.append(
                f"fp16 overflow: at sublayer {int(over[0])} {LARGEST_IN_STDS:g} standard deviations of the {name} pass "
                f"{FP16_MAX:g}; use bf16 or fp32"
            )
    return found

"""What a profile means in plain words: a summary, and warnings where a threshold is passed.

The bounds are held against models that are known to train, at their own initialisation: `known_good.json`, written by
`python -m benchmarks.known_good`; none of them gets a warning. Rules for trained models: `diagnosis/verdict.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from signalprop.errors import InputError
from signalprop.report.tables import agreement_table, variance
from signalprop.results.comparison import Comparison
from signalprop.results.profile import Profile
from signalprop.results.text import (
    depth_in_words,
    network_in_words,
    number,
    percent,
    text_table,
    tokens_in_words,
)

# A gradient whose standard deviation changes tenfold between the last and the first layer is far outside what one
# learning rate serves, unless small embeddings make it: where the stream grows from next to nothing, the first norms
# multiply the gradient by as much. Known good: down to 1/49 (BART), and beside the stream's growth up to 80 (Llama 3)
# and, of experts, 248 (Mixtral).
GRADIENT_RATIO, GRADIENT_EXCESS = 100.0, 300.0
# The same over the upper half, where embeddings count no more. Known good: 0.32 (BERT large) to 5.6 (Mixtral).
UPPER_RATIO = 10.0
# Tokens that share 95 % of their variance carry one twentieth of it as differences: attention hardly tells them apart.
# Known good: up to 0.947 (Qwen3 30B-A3B).
RANK_COLLAPSE = 0.95
# In training, tokens share more: what the model has learnt of frequencies, first of all, which takes the first steps.
TRAINED_COLLAPSE, FIRST_STEPS = 0.98, 200
# The stream's growth from which it is told, where the last layer also adds less than this share, or the upper half
# grows by UPPER_RATIO. Known good: 2.2 % (GPT-2 XL), and 2.1.
STREAM_GROWTH, LATE_SHARE = 100.0, 0.01
# A bound passed by less than this factor is passed narrowly.
NARROW = 3.0
LARGEST_SPREAD = 100.0  # of ln, as a factor in print
PAGE = "docs/will-it-train.md#"
FP16_MAX = 65504.0
# Of 10^9 normal numbers the largest is expected at 6 standard deviations.
LARGEST_IN_STDS = 6.0


def described(result: Profile | Comparison) -> str:
    """The network, its numbers and warnings: what a result's `summary()` says."""
    profile = result.predicted if isinstance(result, Comparison) else result
    if profile.forward["stream_out"].variance.ndim > 1:
        raise InputError("a summary needs a single profile, this is a sweep; select one of its members")
    lines = [*headline(profile), *summary(profile), *(f"{'warning':<20}{line}" for line in warnings(profile))]
    if isinstance(result, Comparison):
        lines += ["", agreement_table(result)]
    return "\n".join(lines)


def headline(*profiles: Profile) -> list[str]:
    """What a profile is of: lines with the network, its scheme and what it reads; several may differ in both."""
    profile, schemes = profiles[0], dict.fromkeys(p.scheme for p in profiles)
    return [
        f"{'network':<20}{network_in_words(*(p.architecture for p in profiles))}",
        f"{'scheme':<20}{', '.join(schemes)}",
        f"{'input':<20}{profile.reads or 'not recorded'}, {tokens_in_words(profile.architecture)}",
    ]


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
        lines += as_known(profile)
    lines += one_network(profile)
    sensitivity = profile.sensitivity()
    lines.append(
        f"sensitivity         mean {number(sensitivity['mean'])}, median {number(sensitivity['median'])} "
        "(branch over stream variance, times sublayers)"
    )
    return lines + [f"note                {note}" for note in profile.notes]


def one_network(profile: Profile) -> list[str]:
    """A line with how far single networks of this width lie from the prediction; none where it is not derived."""
    stream = profile.forward["stream_out"]
    if stream.variance_sd is None or stream.token_correlation_sd is None:
        return []
    parts = [
        f"variance x/÷ {factor(stream.variance_sd[-1])}",
        f"token correlation ± {number(stream.token_correlation_sd[-1])}",
    ]
    first = None if profile.gradient is None else profile.gradient["stream_in"].variance_sd
    parts += [] if first is None else [f"gradient ratio x/÷ {factor(first[0])}"]
    return [f"one network         {', '.join(parts)} (standard deviation, width {profile.architecture.d_model})"]


def factor(sd: float) -> str:
    """A standard deviation of a logarithm as a factor."""
    return f"{math.exp(min(sd, LARGEST_SPREAD)):.3g}"


class Warned(NamedTuple):
    """One warning: what, how sure, what to do, and the page that explains it. name: what, in two words."""

    kind: str
    text: str
    sure: str
    advice: str
    page: str = "what-would-cure-it"

    @property
    def name(self) -> str:
        """Less the article."""
        return self.kind.removeprefix("the ")

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}; {self.sure}; {self.advice} ({PAGE}{self.page})"


class Halves(NamedTuple):
    """ln of the gradient's ratio over the lower and the upper half of the sublayers, and of the stream's growth."""

    lower: float
    upper: float
    lower_growth: float
    upper_growth: float

    @property
    def excess(self) -> float:
        """ln of what the lower half does to the gradient beside what the growth of the stream does."""
        return self.lower - max(self.lower_growth, 0.0)


def halves(profile: Profile) -> Halves:
    """How the gradient and the stream change over the two halves.

    Of an encoder-decoder all is `lower`, and growth does not count. Without a gradient its ratios are NaN.
    """
    stream, n = profile.forward["stream_in"].log_variance, profile.n_sublayers
    top = float(profile.forward["stream_out"].log_variance[-1])
    logs = np.full(n, np.nan) if profile.gradient is None else profile.gradient["stream_in"].log_variance
    if profile.architecture.kind == "encoder-decoder":
        return Halves(float(logs[0]), 0.0, 0.0, 0.0)
    middle = n // 2
    lower, upper = float(logs[0] - logs[middle]), float(logs[middle])
    return Halves(lower, upper, float(stream[middle] - stream[0]), top - float(stream[middle]))


@cache
def known_good() -> dict[str, dict[str, Any]]:
    """By name: gradient ratio, its parts, and what else the rules read, of models that are known to train."""
    found: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("known_good.json").read_text("utf-8"))
    return found


def as_known(profile: Profile) -> list[str]:
    """A line on a gradient that is far from even, but no farther than in models that are known to train."""
    if profile.gradient is None or any(_gradient(profile)):
        return []
    total, parts = float(profile.gradient["stream_in"].log_variance[0]), halves(profile)
    if total <= math.log(GRADIENT_RATIO):
        return []
    apart = {name: abs(math.log(row["gradient_ratio"]) - total) for name, row in known_good().items()}
    near = sorted(apart, key=lambda name: apart[name])[:2]
    near = [name for name in near if name == near[0] or apart[name] < math.log(10)]
    names = " and ".join(f"{name} ({number(known_good()[name]['gradient_ratio'])})" for name in near)
    return [
        f"{'':<20}as in {names}, which train{'s' * (len(near) == 1)}: {number(math.exp(parts.lower))} in the lower "
        f"half of the layers, where the stream grows {number(math.exp(parts.lower_growth))}-fold, "
        f"{number(math.exp(parts.upper))} in the upper half ({PAGE}models-that-are-known-to-train)"
    ]


def _sure(profile: Profile, beyond: float) -> str:
    """How sure a warning is, of a bound that is passed by a factor e^beyond."""
    margin = "narrow, within a factor of 3 of the bound" if beyond < math.log(NARROW) else "clear"
    return f"{margin}, of one network" if profile.n_seeds == 1 else margin


def warnings(profile: Profile, step: int | None = None) -> list[str]:
    """One line per threshold passed: what, how sure, what to do, and a page; empty for a healthy signal.

    Args:
        step: of training, where it is not a network at its start.
    """
    return [str(item) for item in warned(profile, step)]


def warned(profile: Profile, step: int | None = None) -> list[Warned]:
    """The same with their parts."""
    return [*_gradient(profile), *_growth(profile), *_collapse(profile, step), *_overflow(profile)]


def overview(profiles: Sequence[Profile]) -> str:
    """One line per profile: the stream's variance from bottom to top, token correlation there, gradient, verdict."""
    rows = []
    for p in profiles:
        stream, names = p.forward["stream_out"], dict.fromkeys(item.name for item in warned(p))
        rows.append([
            p.scheme,
            depth_in_words([p.architecture]).removesuffix(" layers"),
            f"{number(p.input.get('variance'))} -> {variance(stream, -1)}",
            f"{stream.token_correlation[-1]:.4f}",
            "-" if p.gradient is None else variance(p.gradient["stream_in"], 0),
            ", ".join(names) or "nothing to warn of",
        ])  # fmt: skip
    header = ["scheme", "layers", "stream var", "token corr", "grad ratio", "verdict"]
    return text_table(header, rows)


def _gradient(profile: Profile) -> Iterator[Warned]:
    if profile.gradient is None:
        return
    series, parts = profile.gradient["stream_in"], halves(profile)
    ratio, shown, bound = float(series.log_variance[0]), variance(series, 0), math.log(GRADIENT_RATIO)
    excess = math.log(GRADIENT_EXCESS)
    beyond = max(parts.excess - excess, parts.upper - math.log(UPPER_RATIO))
    if ratio < -bound:
        yield Warned(
            "the gradient vanishes",
            f"its variance at the first sublayer is {shown} of that at the last (below 1/{GRADIENT_RATIO:g})",
            _sure(profile, -ratio - bound),
            "try pre-norm, deepscalelm or deepnorm",
        )
    elif beyond > 0:
        more = f"{_shown(parts.upper)} over the upper half of the layers, in known models 6 at most"
        if parts.excess > excess:
            more = f"above {GRADIENT_EXCESS:g}, the stream's growth apart"
        yield Warned(
            "the gradient explodes",
            f"its variance at the first sublayer is {shown} times that at the last ({more})",
            _sure(profile, beyond),
            "try smaller queries and keys, a norm before every branch, or deepscalelm",
        )


def _growth(profile: Profile) -> Iterator[Warned]:
    stream = profile.forward["stream_out"]
    growth = float(stream.log_variance[-1] - profile.forward["stream_in"].log_variance[0])
    if not math.isfinite(growth) or growth <= math.log(STREAM_GROWTH):
        return
    upper, share = halves(profile).upper_growth, float(profile.layer_sensitivities[-1])
    if share < LATE_SHARE:
        more, beyond = f"the last layer adds {percent(share)} to it", math.log(LATE_SHARE / max(share, 1e-300))
    elif upper > math.log(UPPER_RATIO):
        more, beyond = f"by {_shown(upper)} in the upper half", upper - math.log(UPPER_RATIO)
    else:
        return
    text = f"its variance at the top is {_shown(growth)} times that at the bottom; {more}"
    yield Warned("the stream grows", text, _sure(profile, beyond), "try deepscalelm, gpt2 or lns")


def _shown(log: float) -> str:
    """A number from its logarithm, as far as numbers go."""
    return number(math.exp(min(log, 700)))


def _collapse(profile: Profile, step: int | None) -> Iterator[Warned]:
    bound = RANK_COLLAPSE if step is None else TRAINED_COLLAPSE
    r = profile.forward["stream_out"].token_correlation
    above = np.flatnonzero(r > bound)
    if not above.size or (step is not None and step < FIRST_STEPS):
        return
    most = float(r[above].max())
    where = (
        f"from sublayer {int(above[0])} on tokens correlate above {bound:g} ({most:.4f} at most)"
        if above[-1] == profile.n_sublayers - 1
        else f"{above.size} of {profile.n_sublayers} sublayers are above {bound:g}"
    )
    sure = _sure(profile, math.log((1 - bound) / (1 - most)) if most < 1 else math.inf)
    advice = "try multipliers on the branches that fall with depth (deepscalelm), or e-spa without skips"
    yield Warned("rank collapse", where, sure, advice)


def _overflow(profile: Profile) -> Iterator[Warned]:
    limit = 2 * math.log(FP16_MAX / LARGEST_IN_STDS)
    for name, point in (("stream", "stream_out"), ("branch", "branch")):
        logs = profile.forward[point].log_variance
        over = np.flatnonzero(logs > limit)
        if over.size:
            text = f"at sublayer {int(over[0])} {LARGEST_IN_STDS:g} standard deviations of the {name} pass {FP16_MAX:g}"
            sure = _sure(profile, float(logs[over].max()) - limit)
            yield Warned("fp16 overflow", text, sure, "use bf16 or fp32", "the-four-numbers")

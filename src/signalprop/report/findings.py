"""What a profile means in plain words: a summary, and warnings where a threshold is passed.

The rules are a table, `results/verdicts.py`. Known models with a gradient as uneven: `known_good.json`, written by
`python -m benchmarks.known_good`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import Any

from signalprop.errors import InputError
from signalprop.network.shown import COLUMNS, LABEL
from signalprop.report.tables import agreement_table, variance
from signalprop.results.comparison import Comparison
from signalprop.results.profile import Profile
from signalprop.results.text import (
    depth_in_words,
    network_in_words,
    number,
    text_table,
    tokens_in_words,
)
from signalprop.results.verdicts import findings_of, halves

LARGEST_SPREAD = 100.0  # of ln, as a factor in print
GRADIENT_RATIO = 100.0  # from which a gradient is compared with those of known models


def described(result: Profile | Comparison) -> str:
    """The network, warnings and its numbers: what a result's `summary()` says."""
    profile = result.predicted if isinstance(result, Comparison) else result
    if profile.forward["stream_out"].variance.ndim > 1:
        raise InputError("a summary needs a single profile, this is a sweep; select one of its members")
    lines = [*(f"{'warning':<20}{line}" for line in warnings(profile)), *headline(profile), *summary(profile)]
    if isinstance(result, Comparison):
        lines += ["", agreement_table(result)]
    return "\n".join(lines)


def headline(*profiles: Profile) -> list[str]:
    """What a profile is of: lines with the network, its scheme and what it reads; several may differ in both."""
    profile, schemes = profiles[0], dict.fromkeys(p.scheme for p in profiles)
    return [
        f"{'network':<20}{network_in_words(*(p.architecture for p in profiles))}",
        f"{'scheme':<20}{', '.join(schemes) or 'not recorded'}",
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
        f"correlation {_short(entered.get('token_correlation'))} -> {_short(stream.token_correlation[-1])}",
    ]
    if profile.gradient is not None:
        lines.append(f"gradient ratio      {variance(profile.gradient['stream_in'], 0)} (first over last, variance)")
        lines += as_known(profile)
    lines += one_network(profile)
    sensitivity = profile.sensitivity()
    lines.append(
        f"sensitivity         mean {number(sensitivity['mean'])}, median {number(sensitivity['median'])} "
        "(branch/stream variance)"
    )
    return lines + [f"note                {note}" for note in profile.notes]


def one_network(profile: Profile) -> list[str]:
    """How far single networks of this width lie from the prediction, as standard deviations; empty where that is not
    derived."""
    stream = profile.forward["stream_out"]
    if stream.variance_sd is None or stream.token_correlation_sd is None:
        return []
    parts = [f"variance x/÷ {factor(stream.variance_sd[-1])}"]
    if profile.architecture.seq_len > 1:
        parts.append(f"correlation ± {_short(stream.token_correlation_sd[-1])}")
    first = None if profile.gradient is None else profile.gradient["stream_in"].variance_sd
    parts += [] if first is None else [f"gradient x/÷ {factor(first[0])}"]
    return [f"one network         {', '.join(parts)}"]


def _short(value: float | None) -> str:
    """A correlation in three digits."""
    return "-" if value is None else f"{value:.3g}"


def factor(sd: float) -> str:
    """A standard deviation of a logarithm as a factor."""
    return f"{math.exp(min(sd, LARGEST_SPREAD)):.3g}"


@cache
def known_good() -> dict[str, dict[str, Any]]:
    """By name: gradient ratio, its parts, and what else the rules read, of models that are known to train."""
    found: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("known_good.json").read_text("utf-8"))
    return found


def as_known(profile: Profile) -> list[str]:
    """A line on a gradient that is far from even, but no farther than in models that are known to train."""
    if profile.gradient is None or findings_of(profile):
        return []
    total, parts = float(profile.gradient["stream_in"].log_variance[0]), halves(profile)[-1]
    if total <= math.log(GRADIENT_RATIO):
        return []
    apart = {name: abs(math.log(row["gradient_ratio"]) - total) for name, row in known_good().items()}
    near = sorted(apart, key=lambda name: apart[name])[:2]
    near = [name for name in near if name == near[0] or apart[name] < math.log(10)]
    names = ", ".join(f"{name} ({known_good()[name]['gradient_ratio']:.3g})" for name in near)
    return [
        *fill(f"{'':<20}these train: {names}, at 128 tokens", COLUMNS, subsequent_indent=" " * LABEL).split("\n"),
        f"{'':<20}{number(math.exp(parts.lower))} over the lower half, {number(math.exp(parts.upper))} over the upper",
    ]


def warnings(profile: Profile, step: int | None = None) -> list[str]:
    """One line per threshold passed: what, how sure, what to do, and a page; empty for a healthy signal.

    Args:
        step: of training, where it is not a network at its start.
    """
    return [str(item) for item in findings_of(profile, step)]


def overview(profiles: Sequence[Profile]) -> str:
    """One line per profile: the stream's variance from bottom to top, token correlation there, gradient, verdict."""
    rows = []
    for p in profiles:
        stream, names = p.forward["stream_out"], dict.fromkeys(item.name for item in findings_of(p))
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

"""The table of rules by which a start is judged: what is counted, its bound, what that rests on, remedies.

Predictions, measurements, comparisons and monitors are judged by it; `diagnosis/verdict.py` has the rows for trained
models. Bounds are compared with networks that are known to train, and starts that are known to fail:
`python -m benchmarks.known_good` prints both tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from textwrap import fill
from typing import Any, NamedTuple, Protocol

import numpy as np

from signalprop.errors import InputError
from signalprop.network.architecture import Architecture
from signalprop.network.layout import layout
from signalprop.network.shown import COLUMNS
from signalprop.results.findings import Finding, Findings, Severity
from signalprop.results.series import Series
from signalprop.results.text import number

PAGE = "docs/will-it-train.md#"
SCORE_VARIANCE = "score_variance"  # in a Profile's statistics: the largest of its attentions
NARROW = 3.0  # a bound passed by less than this factor is passed narrowly
FIRST_STEPS = 200  # of training: tokens share most before they differ
FP16_MAX, LARGEST_IN_STDS = 65504.0, 6.0  # of 10^9 normal numbers the largest is expected at 6 standard deviations
# Of schemes whose branches begin at nothing, and learn to be more.
_BEGIN_AT_NOTHING = frozenset({"rezero", "skipinit", "fixup", "layerscale", "value-skipinit"})
_CONSERVE = frozenset({"deepscalelm", "deepscalelm-simple"})


class Judged(Protocol):
    """What rules read of a Profile."""

    @property
    def architecture(self) -> Architecture: ...
    @property
    def scheme(self) -> str: ...
    @property
    def forward(self) -> Mapping[str, Series]: ...
    @property
    def gradient(self) -> Mapping[str, Series] | None: ...
    @property
    def n_seeds(self) -> int | None: ...
    @property
    def n_sublayers(self) -> int: ...
    @property
    def sensitivity(self) -> Any: ...
    @property
    def statistics(self) -> Mapping[str, Any]: ...


class Halves(NamedTuple):
    """Of one stack, ln of the gradient's ratio over its lower and upper half, and of the stream's growth.

    Without a gradient its ratios are NaN.
    """

    lower: float
    upper: float
    lower_growth: float
    upper_growth: float

    @property
    def excess(self) -> float:
        """ln of what the lower half does to the gradient beside what the growth of the stream does."""
        return self.lower - max(self.lower_growth, 0.0)


def halves(profile: Judged) -> list[Halves]:
    """Of every stack, the encoder's first. The gradient is relative to that at the stack's last stream."""
    rows, out = layout(profile.architecture), []
    for stack in dict.fromkeys(rows.stack.tolist()):
        at = np.flatnonzero(rows.stack == stack)
        stream, n = profile.forward["stream_in"].log_variance[at], len(at)
        top = float(profile.forward["stream_out"].log_variance[at[-1]])
        logs = np.full(n, np.nan)
        if profile.gradient is not None:
            logs = profile.gradient["stream_in"].log_variance[at]
            logs = logs - profile.gradient["stream_out"].log_variance[at[-1]]
        middle = n // 2
        out.append(
            Halves(
                float(logs[0] - logs[middle]), float(logs[middle]),
                float(stream[middle] - stream[0]), top - float(stream[middle]),
            )
        )  # fmt: skip
    return out


class Passed(NamedTuple):
    """A bound that is passed: the value, the bound, ln of the factor by which, the sentence, and where.

    Attributes:
        severity, remedy: in place of the rule's. cause: what is added to the rule's.
    """

    value: float
    bound: float
    beyond: float = 0.0
    text: str = ""
    layers: tuple[int, ...] = ()
    severity: Severity | None = None
    cause: str = ""
    remedy: str = ""


class Remedy(NamedTuple):
    """What to try. has: whether a network has it already. changes: names of the `advice.CHANGES` that do it."""

    text: str
    has: Callable[[Any], bool]
    changes: tuple[str, ...] = ()


def _never(profile: Judged) -> bool:
    return False


class Rule(NamedTuple):
    """One row of the table.

    Attributes:
        meaning: what it means for a user. passed: of a Judged profile and its step of training, or of a Diagnosis.
        remedies: the first one to try comes first.
    """

    name: str
    quantity: str
    meaning: str
    evidence: str
    passed: Callable[..., Iterator[Passed]]
    remedies: tuple[Remedy, ...]
    page: str = "what-would-cure-it"
    severity: Severity = "warning"
    cause: str = ""


def _shown(log: float) -> str:
    """A number from its logarithm, as far as numbers go."""
    return number(math.exp(min(log, 700)))


_VANISHES, _FALLS, _RISES = math.log(100), math.log(10), math.log(10)
_DEEP = 12  # sublayers from which a gradient that is lowest in between counts


def _vanishing(profile: Judged, step: int | None) -> Iterator[Passed]:
    if profile.gradient is None:
        return
    rows = layout(profile.architecture).stack
    logs, ends = profile.gradient["stream_in"].log_variance, profile.gradient["stream_out"].log_variance
    for stack in dict.fromkeys(rows.tolist()):
        at = np.flatnonzero(rows == stack)
        total = float(logs[at[0]] - ends[at[-1]])
        if total < -_VANISHES:
            text = f"its variance at the first sublayer is {_shown(total)} of that at the last (below 1/100)"
            yield Passed(math.exp(max(total, -700)), 0.01, -total - _VANISHES, text)
        elif len(at) >= _DEEP and (low := float(logs[at].min() - ends[at[-1]])) < -_FALLS:
            text = f"its variance at its lowest is {_shown(low)} of that at the top (below 1/10)"
            yield Passed(math.exp(max(low, -700)), 0.1, -low - _FALLS, text, _layers(profile, at[[logs[at].argmin()]]))


def _exploding(profile: Judged, step: int | None) -> Iterator[Passed]:
    if profile.gradient is None:
        return
    # of the lower half; more in wide networks, where weights of 0.02 make large scores
    bound = math.log(300) + 3 * math.log(max(profile.architecture.d_model / 4096, 1))
    shown = _shown(float(profile.gradient["stream_in"].log_variance[0]))
    begins = f"its variance at the first sublayer is {shown} times that at the last"
    for parts in halves(profile):
        if parts.upper > _RISES:
            more = f"{_shown(parts.upper)} over the upper half of the layers; known models have at most 7"
            yield Passed(math.exp(min(parts.upper, 700)), 10.0, parts.upper - _RISES, f"{begins} ({more})")
        elif parts.excess > bound:
            more = f"{_shown(parts.excess)} times the growth of the stream over the lower half, above {_shown(bound)}"
            yield Passed(math.exp(min(parts.excess, 700)), math.exp(bound), parts.excess - bound, f"{begins} ({more})")


def _growth(profile: Judged, step: int | None) -> Iterator[Passed]:
    for parts in halves(profile):
        if parts.upper_growth > _RISES:
            text = f"its variance grows {_shown(parts.upper_growth)}-fold over the upper half (equal branches: 2-fold)"
            yield Passed(math.exp(min(parts.upper_growth, 700)), 10.0, parts.upper_growth - _RISES, text)


def _most_alike(profile: Judged, step: int | None) -> float:
    """In training tokens share more, what a model has learnt of frequencies first; across two streams too."""
    crossed = profile.architecture.kind == "encoder-decoder"
    return 0.99 if crossed else 0.98 if step is not None else 0.95


def _collapse(profile: Judged, step: int | None) -> Iterator[Passed]:
    bound, r = _most_alike(profile, step), profile.forward["stream_out"].token_correlation
    above = np.flatnonzero(r > bound)
    if not above.size or (step is not None and step < FIRST_STEPS):
        return
    most = float(r[above].max())
    where = (
        f"from sublayer {int(above[0])} on, token correlations are above {bound:g} (at most {most:.4f})"
        if above[-1] == profile.n_sublayers - 1
        else f"token correlations are above {bound:g} at {above.size} of {profile.n_sublayers} sublayers"
    )
    beyond = math.log((1 - bound) / (1 - most)) if most < 1 else math.inf
    yield Passed(most, bound, beyond, where, _layers(profile, above))


def _layers(profile: Judged, sublayers: np.ndarray) -> tuple[int, ...]:
    return tuple(dict.fromkeys(layout(profile.architecture).layer[sublayers].tolist()))


_IDLE = 1e-4


def _idle(profile: Judged, step: int | None) -> Iterator[Passed]:
    total = profile.sensitivity()["mean"]
    if 0 < total < _IDLE and profile.scheme not in _BEGIN_AT_NOTHING:
        text = f"all branches together add {number(total)} of the stream's variance, so they learn as slowly"
        yield Passed(total, _IDLE, math.log(_IDLE / total), text)


def _epsilon(profile: Judged, step: int | None) -> Iterator[Passed]:
    a = profile.architecture
    if a.norm_eps == 0 or a.squash or not {"pre", "sandwich"} & set(a.placements):
        return
    over = profile.forward["stream_in"].log_variance - math.log(a.norm_eps)
    low = np.flatnonzero(over < 0)
    if low.size:
        smallest = float(over.min())
        text = (
            f"the stream's variance is {_shown(smallest)} of the epsilon ({a.norm_eps:g}) of the norms that read it, "
        )
        text += "so their output has a variance below 1"
        yield Passed(math.exp(smallest), 1.0, -smallest, text, _layers(profile, low))


_HOT = 64.0


def _one_hot(profile: Judged, step: int | None) -> Iterator[Passed]:
    variance = profile.statistics.get(SCORE_VARIANCE)
    if isinstance(variance, (int, float)) and variance > _HOT:
        text = f"scores have variance {number(variance)}: every token attends to one other, chosen by chance"
        yield Passed(variance, _HOT, math.log(variance / _HOT), text)


def _overflow(profile: Judged, step: int | None) -> Iterator[Passed]:
    limit = 2 * math.log(FP16_MAX / LARGEST_IN_STDS)
    for name, point in (("stream", "stream_out"), ("branch", "branch")):
        logs = profile.forward[point].log_variance
        over = np.flatnonzero(logs > limit)
        if over.size:
            text = f"at sublayer {int(over[0])} {LARGEST_IN_STDS:g} standard deviations of the {name} pass {FP16_MAX:g}"
            most = float(logs[over].max())
            yield Passed(math.exp(min(most, 700)), math.exp(limit), most - limit, text, _layers(profile, over))


def _has(*schemes: str) -> Callable[[Judged], bool]:
    return lambda profile: profile.scheme in schemes


def _placed(*placements: str) -> Callable[[Judged], bool]:
    return lambda profile: set(profile.architecture.placements) <= set(placements)


_QK_NORM = Remedy("QK-norm", lambda profile: bool(profile.architecture.qk_norm), ("QK-norm",))
_SMALLER = Remedy("smaller weights of queries and keys", _never, ("scores of variance 1",))
_PRE_NORM = Remedy("pre-norm", _placed("pre", "sandwich"), ("pre-norm",))
_NORM_BEFORE = Remedy("a norm before every branch", _placed("pre", "sandwich"), ("pre-norm", "sandwich norm"))
_DEEPSCALELM = Remedy("deepscalelm", _has(*_CONSERVE), ("deepscalelm",))
_DEEPNORM = Remedy("deepnorm", _has("deepnorm"), ("deepnorm",))
_GPT2, _LNS = Remedy("gpt2", _has("gpt2"), ("gpt2",)), Remedy("lns", _has("lns"), ("lns",))
_LARGER = Remedy("larger weights (xavier, deepscalelm)", _has("xavier", "xavier-uniform", *_CONSERVE),
                 ("xavier", "deepscalelm"))  # fmt: skip
_BRANCHES, _SKIPS = Remedy("branches as large as the stream", _never), Remedy("larger skips", _never)

RULES: tuple[Rule, ...] = (
    Rule(
        "vanishing gradient", "gradient variance, below over above",
        "The lower layers get almost no gradient, so they learn almost nothing from the loss.",
        "BERT large 1/6, DeepScaleLM of 192 layers 1/5.5; post-norm of 48 to 768 layers, which does not train (TGS "
        "table 4), 1/60", _vanishing, (_PRE_NORM, _DEEPSCALELM, _DEEPNORM),
    ),
    Rule(
        "exploding gradient", "gradient variance, below over above",
        "The gradient grows on its way down, more than small embeddings explain: no learning rate suits all layers.",
        "Llama 3 405B at 0.02: 7 in the upper half, 6,600 times the stream's growth in the lower", _exploding,
        (_NORM_BEFORE, _QK_NORM, _SMALLER, _DEEPSCALELM),
    ),
    Rule(
        "stream growth", "stream variance, top over middle",
        "The residual stream grows over the upper half, so deep branches add little to it.",
        "equal branches on a skip of 1 give 2 at any depth, Cerebras-GPT 111M 2.2", _growth,
        (_NORM_BEFORE, _DEEPSCALELM, _GPT2, _LNS),
    ),
    Rule(
        "rank collapse", "token correlation",
        "All tokens become nearly the same vector, so attention and the head cannot distinguish them.",
        "Qwen3 30B-A3B 0.946, across two streams Whisper small 0.985", _collapse, (_DEEPSCALELM, _SKIPS),
    ),
    Rule(
        "idle layers", "branch over stream variance, added up",
        "The branches are so small that the network starts as the identity and learns slowly.",
        "DeepNorm of 70 to 1000 layers 0.001", _idle, (_LARGER, _BRANCHES),
    ),
    Rule(
        "norm epsilon", "stream variance over epsilon",
        "The stream is smaller than the epsilon of the norms that read it, so they do not normalise it.",
        "DeepSeek LLM at 0.006: 4", _epsilon,
        (Remedy("larger embeddings", _never), Remedy("a smaller epsilon", _never)),
    ),
    Rule(
        "one-hot attention", "variance of attention scores",
        "Scores are so large that every token attends to one other token; the softmax passes almost no gradient.",
        "GPT-3 175B 24, Llama 3 405B at 0.02 43; entropy collapse (Zhai et al. 2023) from some hundred", _one_hot,
        (_QK_NORM, _SMALLER),
    ),
    Rule(
        "fp16 overflow", "variance", "Activations exceed the range of float16, so training in it gives infinities.",
        "largest number of the format", _overflow, (Remedy("bf16 or fp32", _never),), "the-four-numbers",
    ),
)  # fmt: skip


def explained(name: str, trained: Sequence[Rule] = ()) -> str:
    """The rules of a warning, in words: what it means, what was compared with which bound, causes and remedies.

    Args:
        trained: the rows for trained models, beside those for a start.

    Raises:
        InputError: there is no warning of this name.
    """
    words = name.lower().replace("-", " ").split()
    start = "signalprop advise predicts them for your network. In the repository:\n" + PAGE
    rows = [(rule, "at the start", start + rule.page) for rule in RULES]
    rows += [(rule, "of a trained model", "In the repository:\ndocs/diagnosing.md#verdicts") for rule in trained]
    found = [row for row in rows if row[0].name.replace("-", " ").split() == words]
    if not found:
        known = ", ".join(dict.fromkeys(rule.name for rule, *_ in rows))
        raise InputError(
            f"there is no warning {name!r:.80}; expected one of: {known}; other findings explain themselves"
        )
    several = len(found) > 1
    return "\n\n".join(_in_words(rule, f", {which}" if several else "", end) for rule, which, end in found)


def _in_words(rule: Rule, which: str, end: str) -> str:
    compared = f"Compared: {rule.quantity}." + (f" The bound rests on: {rule.evidence}." if rule.evidence else "")
    cause = f"Cause: {rule.cause.removeprefix('tested: ')}." if rule.cause else ""
    remedies = "\n".join(fill(f"  - {remedy.text}", COLUMNS, subsequent_indent="    ") for remedy in rule.remedies)
    tried = f"Remedies, the first one to try first:\n{remedies}" if remedies else "The warning itself names the remedy."
    parts = [fill(part, COLUMNS) for part in (rule.meaning, compared, cause) if part]
    return "\n\n".join([f"{rule.name}{which}", *parts, tried, end])


def cures(findings: Findings) -> frozenset[str]:
    """Names of the `advice.CHANGES` that the rules name against what was found."""
    found = {item.name for item in findings}
    return frozenset(name for rule in RULES if rule.name in found for item in rule.remedies for name in item.changes)


def _tried(remedies: list[str]) -> str:
    """`try A, B or C`; nothing without a remedy."""
    return f"try {' or '.join(filter(None, (', '.join(remedies[:-1]), remedies[-1])))}" if remedies else ""


def findings_of(profile: Judged, step: int | None = None) -> Findings:
    """What the rules say of a profile; empty for a healthy signal.

    Args:
        step: of training, where it is not a network at its start; findings have it.
    """
    found = []
    for rule in RULES:
        for passed in list(rule.passed(profile, step))[:1]:
            margin = ("narrowly" if passed.beyond < math.log(NARROW) else "clearly") + " beyond the bound"
            remedies = [remedy.text for remedy in rule.remedies if not remedy.has(profile)]
            found.append(
                Finding(
                    name=rule.name, text=passed.text, layers=passed.layers, quantity=rule.quantity,
                    value=passed.value if math.isfinite(passed.value) else None, bound=passed.bound,
                    evidence=rule.evidence, remedy=_tried(remedies[:3]),
                    confidence=f"{margin}, in one network" if profile.n_seeds == 1 else margin,
                    page=f"signalprop --explain '{rule.name}'", step=step,
                )
            )  # fmt: skip
    return Findings(found)

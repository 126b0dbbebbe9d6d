"""What the numbers of a diagnosis mean, in words: faults first, then what training or depth has done.

`RULES` is a table as that of `results.verdicts`, for trained models. Evidence is what six trained checkpoints without a
fault reach (records/diagnoses.md). Faults that have to be found are planted in tests/diagnosis/test_faults.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from signalprop.diagnosis.faults import faults
from signalprop.diagnosis.result import ONE_SCALE, RANGES, Cast, Diagnosis, LayerSignal, known
from signalprop.diagnosis.whole_model import guessing, repair_of, whole_model
from signalprop.results.findings import SEVERITIES, Finding, Findings, Severity
from signalprop.results.text import named, ranges
from signalprop.results.verdicts import Passed, Remedy, Rule
from signalprop.theory.bounds import growth_exponent
from signalprop.watching.first_positions import MASSIVE


def verdicts(diagnosis: Diagnosis, expected: str = "") -> Findings:
    """All findings, the most severe first.

    Args:
        expected: name of the scheme that the model is meant to carry, '' if none was claimed.
    """
    found = list(whole_model(diagnosis))
    if repair_of(diagnosis) is None:  # else all else may follow from it
        found += faults(diagnosis, expected)
        found += [_finding(rule, passed, diagnosis) for rule in RULES for passed in rule.passed(diagnosis)]
    found += guessing(diagnosis, any(verdict.severity == "fault" for verdict in found))
    return Findings(sorted(map(_honest, found), key=lambda verdict: SEVERITIES.index(verdict.severity)))


def _finding(rule: Rule, passed: Passed, d: Diagnosis) -> Finding:
    remedies = [remedy.text for remedy in rule.remedies if not remedy.has(d)]
    return Finding(
        name=rule.name, severity=passed.severity or rule.severity, text=passed.text, layers=passed.layers,
        quantity=rule.quantity, value=passed.value if math.isfinite(passed.value) else None, bound=passed.bound,
        evidence=rule.evidence, cause=rule.cause + passed.cause, remedy=passed.remedy or "".join(remedies[:1]),
    )  # fmt: skip


def _honest(verdict: Finding) -> Finding:
    """A cause is asserted where a test of it ran, and is possible otherwise."""
    if verdict.severity == "note" or not verdict.cause or verdict.cause.startswith(("tested", "possible")):
        return verdict
    return verdict.model_copy(update={"cause": f"possible, not tested: {verdict.cause}"})


# --- what is passed ----------------------------------------------------------------------------------------------

ONE_HOT = 0.02


def _one_hot(d: Diagnosis) -> Iterator[Passed]:
    entropies = {s.layer: float(np.mean(known(s.entropy))) for s in d.signal if known(s.entropy)}
    sharp = tuple(layer for layer, entropy in entropies.items() if entropy < ONE_HOT)
    if sharp:
        least = min(entropies[i] for i in sharp)
        most = max(max(known(s.score_std), default=0.0) for s in d.of_layers(sharp))
        text = f"{named(sharp)}: attention looks at single tokens (entropy {least:.2g} of that of equal weights, "
        yield Passed(least, ONE_HOT, text=f"{text}scores with standard deviations up to {most:.3g})", layers=sharp)


# Token correlation and effective rank at which tokens are nearly the same vector; and entries over the root mean
# square, with the rank, at which tokens share a few large features only, which the gains of norms undo.
ALIKE, ONE_DIRECTION = 0.98, 1.1
FEW_FEATURES, FEW_DIRECTIONS = 20.0, 1.5


def _below(s: LayerSignal, rank: float) -> bool:
    r = s.token_correlation
    return (r is not None and r > ALIKE) or (s.effective_rank is not None and s.effective_rank < rank)


def _few_features(d: Diagnosis) -> tuple[int, ...]:
    large = [s for s in d.signal if s.outlier is not None and s.outlier > FEW_FEATURES]
    return tuple(s.layer for s in large if _below(s, FEW_DIRECTIONS))


def _outliers(d: Diagnosis) -> Iterator[Passed]:
    if few := _few_features(d):
        largest = max(s.outlier or 0.0 for s in d.of_layers(few))
        text = f"{named(few)}: a few features carry most of the stream (largest entry {largest:.3g} times its root "
        text += "mean square), so tokens look the same there: cosines and ranks describe those features"
        yield Passed(largest, FEW_FEATURES, text=text, layers=few)


def _collapse(d: Diagnosis) -> Iterator[Passed]:
    few = _few_features(d)
    if alike := tuple(s.layer for s in d.signal if s.layer not in few and _below(s, ONE_DIRECTION)):
        worst = max(d.of_layers(alike), key=lambda s: s.token_correlation or 0.0)
        most = worst.token_correlation or 0.0
        text = f"{named(alike)}: tokens have become nearly the same vector (correlation {most:.3f}, effective rank "
        yield Passed(most, ALIKE, text=f"{text}{worst.effective_rank or 0:.3g} at layer {worst.layer})", layers=alike)


GRADIENT_RANGE = 1e5


def _gradients(d: Diagnosis, *, grows: bool) -> Iterator[Passed]:
    found = {s.layer: s.gradient for s in d.signal if s.gradient}
    if len(found) < 3:
        return
    spread, layers = max(found.values()) / min(found.values()), tuple(found)
    first, last = found[layers[0]], found[layers[-1]]
    if spread > GRADIENT_RANGE and (first > last) == grows:
        text = f"gradient variance spans a factor {spread:.3g} over the layers ({first:.3g} after layer {layers[0]}, "
        yield Passed(spread, GRADIENT_RANGE, text=f"{text}{last:.3g} after layer {layers[-1]})", layers=layers)


IDLE_JACOBIAN = 0.1


def _near_identity(d: Diagnosis) -> Iterator[Passed]:
    """Where layers were not removed."""
    values = () if d.identity is None or _removals(d) else d.identity.jacobian
    distances = {i: e.value for i, e in enumerate(values) if e.value is not None and e.value < IDLE_JACOBIAN}
    if distances:
        layers = tuple(distances)
        text = f"{named(layers)}: |J - I| below {IDLE_JACOBIAN:g} (root mean square), so a change of their input "
        yield Passed(min(distances.values()), IDLE_JACOBIAN, text=f"{text}passes nearly unchanged", layers=layers)


# Nats per token: what an idle layer costs at most (its standard error has to be below that, too), and what the dearest
# layer costs where any counts.
IDLE_LOSS, COUNTING_LOSS = 0.02, 0.1
MANY_IDLE = 0.15  # of all layers


def _removals(d: Diagnosis) -> dict[int, tuple[float, float]]:
    """What removing a layer costs, with its standard error, by layer."""
    found = {item.layers[0]: item.increase for item in (d.removal.single if d.removal else ())}
    return {k: (e.value, e.standard_error or 0.0) for k, e in found.items() if e.value is not None}


def _unsure(d: Diagnosis) -> dict[int, float]:
    """Standard errors of the layers of which it is not known whether they are idle."""
    costs = _removals(d).items()
    return {k: error for k, (cost, error) in costs if error >= IDLE_LOSS and cost < IDLE_LOSS + 2 * error}


def _few_tokens(d: Diagnosis) -> Iterator[Passed]:
    if unsure := _unsure(d):
        most, layers = max(unsure.values()), tuple(unsure)
        text = f"{named(layers)}: whether the loss rises by less than {IDLE_LOSS:g} nats per token without one of them "
        yield Passed(most, IDLE_LOSS, text=f"{text}cannot be told (errors up to {most:.3g})", layers=layers)


def _none_counts(d: Diagnosis) -> bool:
    costs = _removals(d)
    return len(costs) > 1 and max(cost for cost, _ in costs.values()) < COUNTING_LOSS


def _no_layer(d: Diagnosis) -> Iterator[Passed]:
    if _none_counts(d) and not _unsure(d):
        costs = _removals(d)
        most = max(cost for cost, _ in costs.values())
        rises = f"rises by at most {most:.3g} nats per token (of {_loss(d):.3g})" if most > 0 else "does not rise"
        text = f"without any one layer the loss {rises}"
        yield Passed(most, COUNTING_LOSS, text=text, layers=tuple(costs))


def _idle(d: Diagnosis) -> Iterator[Passed]:
    """Where no layer counts, idle layers are not named."""
    costs = {k: cost for k, (cost, error) in _removals(d).items() if max(cost, error) < IDLE_LOSS}
    if not costs or _none_counts(d):
        return
    layers, low, high = tuple(costs), min(costs.values()), max(costs.values())
    one = len(layers) == 1
    shares = [(s.attention_share or 0.0) + (s.feed_forward_share or 0.0) for s in d.of_layers(layers)]
    held = f" (branches hold {np.median(shares):.2g} of the stream's variance, median)" if shares else ""
    text = f"{named(layers)}: removing {'it' if one else 'any one'} changes the loss by {low:+.3g}"
    text += f"{'' if one else f' to {high:+.3g}'} nats per token (of {_loss(d):.3g})"
    severity: Severity = "warning" if len(layers) > MANY_IDLE * len(d.signal) else "note"
    yield Passed(high, IDLE_LOSS, text=text, layers=layers, cause=held, severity=severity)


def _loss(d: Diagnosis) -> float:
    return math.nan if d.loss is None or d.loss.value is None else d.loss.value


GROWN = 4.0  # variance after the last layer over that after the first


def _growth(d: Diagnosis) -> Iterator[Passed]:
    """The exponent p of variance ~ layer^p in every stack, against the laws of docs/theory/depth.md."""
    for stack in dict.fromkeys(s.stack for s in d.signal):
        rows = [s for s in d.signal if s.stack == stack]
        values = [s.variance for s in rows if s.variance]
        if len(values) < max(len(rows), 6) or values[-1] <= GROWN * values[0]:
            continue
        p, layers = growth_exponent(values), tuple(s.layer for s in rows)
        sort = "slowly" if p <= 1 else "between fresh weights (1) and branches aligned with the stream (2)"
        sort = sort if p <= 2.3 else "more than aligned branches give (2)"
        text = f"the stream's variance grows from {values[0]:.3g} to {values[-1]:.3g}; as layer^{p:.2f} over layers "
        remedy = "" if p <= 1 or d.casts else "low-precision formats see the largest layer: diagnose --cast"
        yield Passed(values[-1] / values[0], GROWN, text=f"{text}{ranges(layers[len(rows) // 4 :])}, {sort}",
                     layers=layers, remedy=remedy)  # fmt: skip


def _massive(d: Diagnosis) -> Iterator[Passed]:
    ratios = {s.layer: s.first_variance / s.variance for s in d.signal if s.first_variance and s.variance}
    if huge := tuple(layer for layer, ratio in ratios.items() if ratio > MASSIVE):
        most = max(ratios.values())
        text = f"{named(huge)}: the first {d.data.skip_first} positions have up to {most:.3g} times the variance of "
        yield Passed(most, MASSIVE, text=f"{text}the others, which leave them out", layers=huge)


def _beyond_float16(d: Diagnosis) -> Iterator[Passed]:
    """Trained models reach it, and run in bfloat16."""
    top = RANGES["fp16"]
    if beyond := tuple(s.layer for s in d.signal if s.largest is not None and s.largest > top):
        worst = max(d.of_layers(beyond), key=lambda s: s.largest or 0.0)
        text = f"{named(beyond)}: activations reach {worst.largest:.3g} (layer {worst.layer}), and float16 ends at "
        yield Passed(worst.largest or 0.0, top, text=f"{text}{top:,.0f}: there they become infinite", layers=beyond)


CAST_LOSS = 0.01  # nats per token, beside three standard errors


def _costly(d: Diagnosis, form: str) -> list[Cast]:
    """The casts to a format that cost something."""

    def costs(cast: Cast) -> bool:
        increase, error = cast.increase.value, cast.increase.standard_error or 0.0
        return increase is None or increase > max(CAST_LOSS, 3 * error)

    return [cast for cast in d.casts if cast.format == form and costs(cast)]


def _cost(cast: Cast) -> float:
    return math.inf if cast.increase.value is None else cast.increase.value


def _whole_numbers(cast: Cast) -> bool:
    """int8 without a scale holds whole numbers alone, so what it costs says nothing of the model."""
    return cast.format == "int8" and not cast.scaled


def _no_scale(d: Diagnosis) -> Iterator[Passed]:
    if found := [cast for cast in _costly(d, "int8") if _whole_numbers(cast)]:
        text = "int8 without a scale: the loss rises, in nats per token, by a direct cast of: "
        yield Passed(max(map(_cost, found)), CAST_LOSS, text=text + _listed(found))


def _casts(d: Diagnosis) -> Iterator[Passed]:
    """One per format."""
    for form in dict.fromkeys(cast.format for cast in d.casts):
        costly = [cast for cast in _costly(d, form) if not _whole_numbers(cast)]
        if not costly:
            continue
        worst = max(costly, key=_cost)
        ratios = [(ratio, layer) for layer, ratio in enumerate(worst.signal_to_noise) if ratio is not None]
        at = f"; least signal over noise after layer {min(ratios)[1]} ({min(ratios)[0]:.3g} dB)" if ratios else ""
        if not any(cast.scaled for cast in costly) and any(c.format == form and c.scaled for c in d.casts):
            remedy = "a scale per tensor fixes it"
        else:
            finer = "finer scales (per channel or block), or " if form in ONE_SCALE else ""
            remedy = f"{finer}that layer in bfloat16"
        text = f"{form}: the loss rises, in nats per token, by a direct cast of: {_listed(costly)}{at}"
        yield Passed(_cost(worst), CAST_LOSS, text=text, layers=(min(ratios)[1],) if ratios else (), remedy=remedy)


def _listed(casts: Sequence[Cast]) -> str:
    return ", ".join(
        f"{cast.of}{' with a scale per tensor' if cast.scaled and cast.format in ONE_SCALE else ''} "
        + ("not finite" if cast.increase.value is None else f"+{cast.increase.value:.3g}")
        for cast in casts
    )


# Shares of a matrix's or stream's gradient that may become 0, or subnormal, in float16. Small models at 65,536: below
# 1e-4 both; at 1: below 1e-3, and up to 0.79.
LOST_GRADIENT, FEWER_DIGITS = 0.05, 0.5
# What can become of it: the share, above which, and in words; the gravest first.
_IN_FLOAT16 = (("infinite", 0.0, "overflow"), ("zero", LOST_GRADIENT, "become 0"),
               ("subnormal", FEWER_DIGITS, "keep fewer digits"))  # fmt: skip


def _loss_scale(d: Diagnosis) -> Iterator[Passed]:
    """Gradients that overflow float16 at the stated loss scale, or become 0 there; else those that lose digits."""
    if (g := d.gradients) is None:
        return
    for share, bound, word in _IN_FLOAT16:
        found = sorted((t for t in g.tensors if getattr(t, share) > bound), key=lambda t: -getattr(t, share))
        if found:
            most, largest = getattr(found[0], share), max(t.largest or 0.0 for t in g.tensors)
            others = f", and of {len(found) - 1} more tensors more than {bound:.0%}" if found[1:] else ""
            yield Passed(
                most, bound, layers=tuple(sorted({t.layer for t in found if t.layer is not None})),
                severity="note" if share == "subnormal" else "warning",
                text=f"at a loss scale of {_scale(g.scale)}, {100 * most:.3g} % of the entries of the gradient of "
                f"{found[0].name} {word} in float16{others}; the largest entry is {largest:.3g}",
                remedy=f"a loss scale of {_scale(g.fitting)}: at most {100 * g.lost:.2g} % of the entries of a "
                "gradient become 0, and the largest is still 4 to 8 times below the end of the format"
                + ("" if g.lost <= LOST_GRADIENT else "; no scale holds both ends, and bfloat16 needs none"),
            )  # fmt: skip
            return


def _scale(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:.3g}"


# --- the table ---------------------------------------------------------------------------------------------------


def _do(text: str) -> tuple[Remedy, ...]:
    return (Remedy(text, lambda d: False),)


def _at_the_start(text: str) -> tuple[Remedy, ...]:
    """An initialisation; a trained model does not get this advice."""
    return (Remedy(text, lambda d: d.fresh is None),)


_EACH_LAYER = "each layer multiplies the gradient on its way down"
_CONSERVE = _at_the_start("an initialisation that conserves it: deepscalelm; signalprop predict shows which")


RULES: tuple[Rule, ...] = (
    Rule("one-hot attention", "entropy of attention over that of equal weights, mean over heads",
          "Every token attends to one other token: the softmax passes almost no gradient to queries and keys.",
          "SmolLM2 0.23",
          _one_hot, _do("QK-norm, or a smaller learning rate for queries and keys"),
          cause="queries and keys grew without bound, which stops their gradients"),
    Rule("outlier features", "largest entry over root mean square, where the effective rank is below 1.5",
          "A few features hold most of the stream: cosines and ranks describe them; casts to few bits lose the others.",
          "Gemma 3 26 to 131, of rank 1.19 to 5.6; SmolLM2 has entries of 193 whose tokens stay apart", _outliers,
          _do("keep those features in high precision when quantising"), severity="note",
          cause="trained models keep constants in single features; the gains of their norms make up for it"),
    Rule("rank collapse", "token correlation (or effective rank, below 1.1)",
          "All tokens are nearly the same vector in these layers, so attention and the head cannot distinguish them.",
          "Gemma 3 0.964 and 1.19, Whisper 0.79 "
          "and 2.8; a small model that has learnt how frequent tokens are and little else 1.24", _collapse,
          _at_the_start("larger skips or smaller attention branches (deepscalelm, noci), or shaped attention (e-spa)"),
          cause="attention averages faster than the skips and feed-forwards keep tokens apart"),
    Rule("exploding gradients", "gradient variance, largest layer over smallest",
          "The lower layers get a far larger gradient than the upper ones, so no learning rate suits all layers.",
          "Gemma 3 6,000, Whisper 423",
          partial(_gradients, grows=True), _CONSERVE, cause=_EACH_LAYER),
    Rule("vanishing gradients", "gradient variance, largest layer over smallest",
          "The lower layers get almost no gradient, so they learn almost nothing from the loss.",
          "Gemma 3 6,000, Whisper 423",
          partial(_gradients, grows=False), _CONSERVE, cause=_EACH_LAYER),
    Rule("near-identity layers", "|J - I|, root mean square",
          "These layers pass a change of their input on nearly unchanged: they transform it little.",
          "Whisper 0.37", _near_identity,
          _do("measure how much the loss needs them: diagnose --remove"), severity="note"),
    Rule("few tokens", "standard error of the loss without a layer, nats per token",
          "The text is too short to tell whether these layers change the loss: its error hides the difference.",
          "", _few_tokens,
          _do("more tokens (--tokens)"), severity="note"),
    Rule("no layer counts", "increase of the loss without the most useful layer, nats per token",
          "The model predicts as well without any one of its layers, so its layers have learnt little of this text.",
          "trained 1.7 to 12; "
          "before training, and soon after, up to 0.07", _no_layer,
          _do("train longer, or give --data of the kind that the model was trained on"), severity="note",
          cause="the model is at the start of its training, or cannot predict this text"),
    Rule("idle layers", "increase of the loss without a layer, nats per token",
          "The loss hardly changes without any one of these layers: parameters and time that buy little on this text.",
          "cheapest layers: SmolLM2 0.065, "
          "Gemma 3 0.30, Whisper 1.1, and Qwen2.5 -0.08, whose layer 8 is idle there", _idle,
          _do("remove them if the score of a task stays: diagnose --remove --task"),
          cause="what these layers add is small beside the stream, or parallel to it"),
    Rule("variance growth", "variance after the last layer over that after the first",
          "The variance of the stream grows over the layers, so that late branches are small beside it.",
          "not a fault at any size",
          _growth, (), severity="note"),
    Rule("massive activations", "variance of the first positions over that of the others",
          "The first positions are far larger than all others, and decide the range that a cast of activations needs.",
          "common in trained models",
          _massive, _do("keep the first token in high precision when quantising activations"), severity="note",
          cause="attention puts unused weight on the first token; common in trained decoders"),
    Rule("beyond float16", "largest activation",
          "Activations exceed the largest number of float16, so the model gives infinities in it.",
          "the largest number of the format", _beyond_float16,
          _do("run in bfloat16, or rescale the model with signalprop fit, which keeps its function"), severity="note",
          cause="tested: the largest activation on the text was read"),
    Rule("no scale", "increase of the loss, nats per token",
          "A cast without a scale rounds most weights to 0, so its loss says nothing of the format.",
          "", _no_scale,
          _do("at least one scale per tensor; never cast to int8 without a scale"), severity="note",
          cause="the format holds whole numbers only, so weights below one half become 0"),
    Rule("low precision", "increase of the loss, nats per token",
          "The model loses accuracy in this format.",
          "SmolLM2 in bfloat16 0.000", _casts, (),
          cause="numbers below or above the format's range, or too few digits for outliers"),
    Rule("loss scale", "share of a gradient's entries in float16",
          "At this loss scale float16 loses part of the gradient: entries become 0, or infinite.",
          "small models at 65,536: below 1e-4", _loss_scale, (),
          cause="tested: the gradients of the text were counted"),
)  # fmt: skip

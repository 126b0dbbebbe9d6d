"""What the numbers of a diagnosis mean, in words: faults first, then what the depth does, with the numbers it rests on.

Rules compare a layer with its neighbours, with what theory predicts from the live weights, or with a fixed bound. The
bounds stand in `bounds.py`; the faults that the rules have to find are planted in tests/diagnosis/test_faults.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from signalprop.diagnosis.bounds import (
    ALIKE,
    CAST_LOSS,
    COUNTING_LOSS,
    FEW_DIRECTIONS,
    FEW_FEATURES,
    FEWER_DIGITS,
    GRADIENT_RANGE,
    GROWN,
    IDLE_JACOBIAN,
    IDLE_LOSS,
    LOST_GRADIENT,
    ONE_DIRECTION,
    ONE_HOT,
)
from signalprop.diagnosis.faults import faults
from signalprop.diagnosis.result import ONE_SCALE, RANGES, Cast, Diagnosis, LayerSignal, Removal, known
from signalprop.diagnosis.whole_model import guessing, repair_of, whole_model
from signalprop.results.findings import Finding, Findings
from signalprop.results.text import named, ranges
from signalprop.theory.bounds import growth_exponent
from signalprop.watching.first_positions import MASSIVE


def verdicts(diagnosis: Diagnosis, expected: str = "") -> Findings:
    """All findings, the most severe first.

    Args:
        expected: name of the scheme that the model is meant to carry, '' if none was claimed.
    """
    rules: tuple[Callable[[Diagnosis], Iterable[Finding]], ...] = (
        partial(faults, expected=expected),
        _one_hot_attention,
        _collapse,
        _gradients,
        _idle,
        _growth,
        _massive,
        _beyond_formats,
        _casts,
        _loss_scale,
    )
    found = list(whole_model(diagnosis))
    if repair_of(diagnosis) is None:  # else all else may follow from it
        found += [verdict for rule in rules for verdict in rule(diagnosis)]
    found += guessing(diagnosis, any(verdict.severity == "fault" for verdict in found))
    order = {"fault": 0, "warning": 1, "note": 2}
    return Findings(sorted(map(_honest, found), key=lambda verdict: order[verdict.severity]))


def _for_fresh(d: Diagnosis, advice: str) -> str:
    """Advice about an initialisation, which is of no use to a model that was trained."""
    return advice if d.fresh is not None else ""


def _honest(verdict: Finding) -> Finding:
    """A cause is asserted where a test of it ran, and is possible otherwise."""
    if verdict.severity == "note" or not verdict.cause or verdict.cause.startswith(("tested", "possible")):
        return verdict
    return verdict.model_copy(update={"cause": f"possible, not tested: {verdict.cause}"})


# --- what training or depth has done -----------------------------------------------------------------------------


def _one_hot_attention(d: Diagnosis) -> Iterable[Finding]:
    entropies = {s.layer: float(np.mean(known(s.entropy))) for s in d.signal if known(s.entropy)}
    sharp = tuple(layer for layer, entropy in entropies.items() if entropy < ONE_HOT)
    if sharp:
        stds = [max(known(s.score_std), default=0.0) for s in d.of_layers(sharp)]
        yield Finding(
            severity="warning",
            name="one-hot attention",
            layers=sharp,
            text=f"{named(sharp)}: attention looks at single tokens (entropy {min(entropies[i] for i in sharp):.2g} "
            f"of that of equal weights, scores with standard deviations up to {max(stds):.3g})",
            cause="queries and keys grew without bound, which stops their gradients",
            remedy="QK-norm, or a smaller learning rate for queries and keys",
        )


def _collapse(d: Diagnosis) -> Iterable[Finding]:
    """Tokens that have grown alike; apart from those whose likeness is a few huge features, which norms' gains undo."""

    def below(s: LayerSignal, rank: float) -> bool:
        r = s.token_correlation
        return (r is not None and r > ALIKE) or (s.effective_rank is not None and s.effective_rank < rank)

    few = tuple(
        s.layer for s in d.signal if s.outlier is not None and s.outlier > FEW_FEATURES and below(s, FEW_DIRECTIONS)
    )
    alike = tuple(s.layer for s in d.signal if s.layer not in few and below(s, ONE_DIRECTION))
    if few:
        largest = max(s.outlier or 0.0 for s in d.of_layers(few))
        yield Finding(
            severity="note",
            name="outlier features",
            layers=few,
            text=f"{named(few)}: a few features carry most of the stream (largest entry {largest:.3g} times its root "
            "mean square), which makes tokens look equal there: cosines and ranks describe those features",
            cause="trained models keep constants in single features; the gains of their norms make up for it",
            remedy="keep those features in high precision when quantising",
        )
    if alike:
        worst = max(d.of_layers(alike), key=lambda s: s.token_correlation or 0.0)
        yield Finding(
            severity="warning",
            name="rank collapse",
            layers=alike,
            text=f"{named(alike)}: tokens have collapsed (correlation {worst.token_correlation or 0:.3f}, effective "
            f"rank {worst.effective_rank or 0:.3g} at layer {worst.layer})",
            cause="attention averages faster than the skips and feed-forwards keep tokens apart",
            remedy=_for_fresh(
                d, "larger skips or smaller attention branches (deepscalelm, noci), or shaped attention (e-spa)"
            ),
        )


def _gradients(d: Diagnosis) -> Iterable[Finding]:
    found = {s.layer: s.gradient for s in d.signal if s.gradient}
    if len(found) < 3:
        return
    spread = max(found.values()) / min(found.values())
    if spread > GRADIENT_RANGE:
        layers = tuple(found)
        first, last = layers[0], layers[-1]
        grows = found[first] > found[last]
        yield Finding(
            severity="warning",
            name="exploding gradients" if grows else "vanishing gradients",
            layers=layers,
            text=f"gradient variance spans a factor {spread:.3g} over the layers ({found[first]:.3g} after layer "
            f"{first}, {found[last]:.3g} after layer {last})",
            cause="each layer multiplies the gradient on its way down",
            remedy=_for_fresh(d, "an initialisation that conserves it: deepscalelm; signalprop predict shows which"),
        )


def _idle(d: Diagnosis) -> Iterable[Finding]:
    """Layers that cost nothing to remove; without removals, layers whose Jacobian is the identity's."""
    if d.removal is not None and d.removal.single:
        yield from _idle_by_removal(d, d.removal)
    elif d.identity is not None and d.identity.jacobian:
        near = tuple(i for i, e in enumerate(d.identity.jacobian) if e.value is not None and e.value < IDLE_JACOBIAN)
        if near:
            yield Finding(
                severity="note",
                name="near-identity layers",
                layers=near,
                text=f"{named(near)}: |J - I| below {IDLE_JACOBIAN:g} (root mean square), so a change of their input "
                "passes nearly unchanged",
                remedy="diagnose --remove measures what they are worth",
            )


def _idle_by_removal(d: Diagnosis, removal: Removal) -> Iterable[Finding]:
    increases = {item.layers[0]: item.increase for item in removal.single}
    costs = {layer: e.value for layer, e in increases.items() if e.value is not None}
    errors = {layer: increases[layer].standard_error or 0.0 for layer in costs}
    unsure = [k for k, cost in costs.items() if errors[k] >= IDLE_LOSS and cost < IDLE_LOSS + 2 * errors[k]]
    if unsure:
        yield Finding(
            severity="note",
            name="few tokens",
            layers=tuple(unsure),
            text=f"{named(tuple(unsure))}: whether the loss rises by less than {IDLE_LOSS:g} nats per token without "
            f"one of them cannot be seen (errors up to {max(errors[k] for k in unsure):.3g})",
            remedy="more --tokens",
        )
    idle = tuple(layer for layer, cost in costs.items() if max(cost, errors[layer]) < IDLE_LOSS)
    if len(costs) > 1 and max(costs.values()) < COUNTING_LOSS:  # idle layers are none where nothing else is at work
        if not unsure:
            yield Finding(
                severity="note",
                name="no layer counts",
                layers=tuple(costs),
                text=f"whichever layer is removed, the loss rises by at most {max(costs.values()):.3g} nats per token "
                f"(of {_loss(d):.3g})",
                cause="a model at the start of its training, or a text that it can say little of",
                remedy="train longer, or give --data that the model was trained for",
            )
        return
    if idle:
        low, high = min(costs[layer] for layer in idle), max(costs[layer] for layer in idle)
        yield Finding(
            severity="warning" if len(idle) > 0.15 * len(d.signal) else "note",
            name="idle layers",
            layers=idle,
            text=f"{named(idle)}: removing {'it' if len(idle) == 1 else 'any one'} changes the loss by {low:+.3g}"
            f"{'' if len(idle) == 1 else f' to {high:+.3g}'} nats per token (of {_loss(d):.3g})",
            cause="the branches are small against the stream, or parallel to it" + _depth_share(d, idle),
            remedy="remove them, where the score of a task bears it: diagnose --remove --task",
        )


def _loss(d: Diagnosis) -> float:
    return math.nan if d.loss is None or d.loss.value is None else d.loss.value


def _depth_share(d: Diagnosis, layers: Sequence[int]) -> str:
    shares = [(s.attention_share or 0.0) + (s.feed_forward_share or 0.0) for s in d.of_layers(layers)]
    return f" (branches hold {np.median(shares):.2g} of the stream's variance, median)" if shares else ""


def _growth(d: Diagnosis) -> Iterable[Finding]:
    """The exponent p of variance ~ layer^p in every stack, against the laws of docs/papers/curse-of-depth.md."""
    for stack in dict.fromkeys(s.stack for s in d.signal):
        rows = [s for s in d.signal if s.stack == stack]
        values = [s.variance for s in rows if s.variance]
        if len(values) < max(len(rows), 6) or values[-1] <= GROWN * values[0]:
            continue
        p = growth_exponent(values)
        sort = "slowly" if p <= 1 else "between fresh weights (1) and branches aligned with the stream (2)"
        layers = tuple(s.layer for s in rows)
        yield Finding(
            severity="note",
            name="variance growth",
            layers=layers,
            text=f"the stream's variance grows from {values[0]:.3g} to {values[-1]:.3g}; as layer^{p:.2f} over layers "
            f"{ranges(layers[len(rows) // 4 :])}, {sort if p <= 2.3 else 'more than aligned branches give (2)'}",
            remedy="" if p <= 1 or d.casts else "low-precision formats see the largest layer: diagnose --cast",
        )


def _massive(d: Diagnosis) -> Iterable[Finding]:
    ratios = {s.layer: s.first_variance / s.variance for s in d.signal if s.first_variance and s.variance}
    huge = tuple(layer for layer, ratio in ratios.items() if ratio > MASSIVE)
    if huge:
        yield Finding(
            severity="note",
            name="massive activations",
            layers=huge,
            text=f"{named(huge)}: the first {d.data.skip_first} positions have up to {max(ratios.values()):.3g} times "
            "the variance of the others, which leave them out",
            cause="attention parks weight on the first token; common in trained decoders",
            remedy="keep the first token in high precision when quantising activations",
        )


def _beyond_formats(d: Diagnosis) -> Iterable[Finding]:
    """Layers whose largest activation float16 does not hold; trained models reach it, and run in bfloat16."""
    top = RANGES["fp16"]
    beyond = tuple(s.layer for s in d.signal if s.largest is not None and s.largest > top)
    if beyond:
        worst = max(d.of_layers(beyond), key=lambda s: s.largest or 0.0)
        yield Finding(
            severity="note",
            name="beyond float16",
            layers=beyond,
            text=f"{named(beyond)}: activations reach {worst.largest:.3g} (layer {worst.layer}), and float16 ends at "
            f"{top:,.0f}: there they become infinite",
            cause="tested: the largest numbers of the text were read",
            remedy="run it in bfloat16, or rescale it with signalprop fit",
        )


def _casts(d: Diagnosis) -> Iterable[Finding]:
    """One verdict per format whose cast costs something.

    int8 without a scale is a note by itself: it holds whole numbers alone, so what it costs says nothing of the model.
    """
    for form in dict.fromkeys(cast.format for cast in d.casts):
        costly = [cast for cast in d.casts if cast.format == form and _costs(cast)]
        whole_numbers = [cast for cast in costly if form == "int8" and not cast.scaled]
        if whole_numbers:
            yield Finding(
                severity="note",
                name="no scale",
                text=f"int8 without a scale: the loss rises, in nats per token, by a direct cast of: "
                f"{_listed(whole_numbers)}",
                cause="it holds whole numbers alone, so that weights below one half become 0",
                remedy="a scale per tensor at the least; never cast to int8 without",
            )
        costly = [cast for cast in costly if cast not in whole_numbers]
        if not costly:
            continue
        worst = max(costly, key=lambda cast: math.inf if cast.increase.value is None else cast.increase.value)
        ratios = [(ratio, layer) for layer, ratio in enumerate(worst.signal_to_noise) if ratio is not None]
        at = f"; least signal over noise after layer {min(ratios)[1]} ({min(ratios)[0]:.3g} dB)" if ratios else ""
        helps = not any(cast.scaled for cast in costly) and any(c.format == form and c.scaled for c in d.casts)
        yield Finding(
            severity="warning",
            name="low precision",
            layers=(min(ratios)[1],) if ratios else (),
            text=f"{form}: the loss rises, in nats per token, by a direct cast of: {_listed(costly)}{at}",
            cause="numbers below or above the format's range, or too few digits for outliers",
            remedy="a scale per tensor fixes it"
            if helps
            else "finer scales (per channel or block), or that layer in bfloat16"
            if worst.format in ONE_SCALE
            else "that layer in bfloat16",
        )


def _listed(casts: Sequence[Cast]) -> str:
    return ", ".join(
        f"{cast.of}{' with a scale per tensor' if cast.scaled and cast.format in ONE_SCALE else ''} "
        + ("not finite" if cast.increase.value is None else f"+{cast.increase.value:.3g}")
        for cast in casts
    )


def _costs(cast: Cast) -> bool:
    increase, error = cast.increase.value, cast.increase.standard_error or 0.0
    return increase is None or increase > max(CAST_LOSS, 3 * error)


# What can become of a gradient in float16: its share, above which, and in words; the gravest first.
_IN_FLOAT16 = (("infinite", 0.0, "overflow"), ("zero", LOST_GRADIENT, "become 0"),
               ("subnormal", FEWER_DIGITS, "keep fewer digits"))  # fmt: skip


def _loss_scale(d: Diagnosis) -> Iterable[Finding]:
    """Gradients that overflow float16 at the stated loss scale, or become 0 there; else those that lose digits."""
    if (g := d.gradients) is None:
        return
    for share, bound, word in _IN_FLOAT16:
        found = sorted((t for t in g.tensors if getattr(t, share) > bound), key=lambda t: -getattr(t, share))
        if found:
            largest = max(t.largest or 0.0 for t in g.tensors)
            others = f", and of {len(found) - 1} more tensors more than {bound:.0%}" if found[1:] else ""
            yield Finding(
                severity="note" if share == "subnormal" else "warning",
                name="loss scale",
                layers=tuple(sorted({t.layer for t in found if t.layer is not None})),
                text=f"at a loss scale of {_scale(g.scale)}, {100 * getattr(found[0], share):.3g} % of the entries of "
                f"the gradient of {found[0].name} {word} in float16{others}; the largest entry is {largest:.3g}",
                cause="tested: the gradients of the text were counted",
                remedy=f"a loss scale of {_scale(g.fitting)}: at most {100 * g.lost:.2g} % of the entries of a "
                "gradient become 0, and the largest is still 4 to 8 times below the end of the format"
                + ("" if g.lost <= LOST_GRADIENT else "; no scale holds both ends, and bfloat16 needs none"),
            )
            return


def _scale(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:.3g}"

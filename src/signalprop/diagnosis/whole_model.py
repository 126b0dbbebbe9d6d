"""What the loss, the ends and the trials of a diagnosis mean, in words: faults of the whole model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from signalprop.diagnosis import sentences
from signalprop.diagnosis.bounds import (
    ABOVE_FREQUENCIES,
    FRESH_LOGITS,
    GAINS_AROUND_ZERO,
    GUESSING,
    ITSELF,
    REPAIRED,
    REPAIRED_CLEARLY,
    REPAIRED_LOSS,
    SHIFTED,
)
from signalprop.diagnosis.result import Diagnosis, known
from signalprop.diagnosis.whole_model_values import REBUILT, SETTINGS, BadTensor, Ends, Fresh, Off, Tried
from signalprop.results.findings import Finding
from signalprop.results.text import named, number


def whole_model(d: Diagnosis) -> Iterator[Finding]:
    """Faults that concern the model as a whole."""
    yield from _bad_tensors(d)
    shifted = list(_labels_shifted(d, d.ends)) if d.ends is not None else []
    yield from shifted
    repaired = [] if shifted else list(_repaired(d))
    for one in d.wired:  # what a router does follows from weights that are not this model's
        if d.fresh is not None and one.name == "unused experts":
            continue  # tokens of a deep fresh stack are similar, so that they choose the same experts
        follows = repaired and one.name in ("router collapse", "unused experts")
        design = d.fresh is None and one.name == "router gets no gradient"  # it was trained so
        yield one.model_copy(update={"severity": "note" if design else "warning"}) if follows or design else one
    yield from repaired
    yield from _cut(d)
    if d.ends is not None:
        yield from _layers_not_loaded(d, d.ends)
        yield from _gains_around_zero(d, d.ends)
        yield from _ends_not_loaded(d, d.ends)
        yield from _outlying(d.ends)
        yield from _first_loss(d, d.ends)
    if d.fresh is not None:
        yield from _unlike_initialiser(d, d.fresh)
        yield from _muted(d, d.fresh)


def repair_of(d: Diagnosis) -> Tried | None:
    """The change that repairs the model, if one does: clearly, and to a loss below that of guessing."""
    best = next(iter(d.trials), None)
    if best is None or d.ends is None or best.loss > REPAIRED_LOSS * d.ends.log_vocab:
        return None
    near = [t for t in d.trials if t.standard_error is not None and t.loss < best.loss + REPAIRED_CLEARLY]
    # an entry says where, a factor only how much; what has its default was more likely left out than what was set
    ordered = [t for name in SETTINGS for t in near if t.name == name] + [t for t in near if t.name != REBUILT]
    best = next(iter(ordered), best)
    gain, error = best.before - best.loss, best.standard_error
    clear = REPAIRED if error is None else max(REPAIRED_CLEARLY, 4 * error)
    return best if gain > clear and not best.further else None


def _bad_tensors(d: Diagnosis) -> Iterable[Finding]:
    for one in d.bad_tensors[:8]:
        yield Finding(
            severity="fault",
            name="not finite",
            layers=() if one.layer is None else (one.layer,),
            text=sentences.not_finite(one.name, one.nan, one.infinite, one.n, one.first, one.kind),
            cause=_why_not_finite(one),
            remedy="restore it from the last good checkpoint"
            if one.kind == "parameter"
            else "compute the buffer again (reload the model, or run what fills it after to_empty)",
        )
    left = len(d.bad_tensors) - 8
    if left > 0:
        yield Finding(severity="fault", name="not finite", text=f"{left} more tensors hold NaN or infinite numbers")


def _why_not_finite(one: BadTensor) -> str:
    if one.kind == "buffer":
        return "possible, not tested: memory that was never filled, as to_empty leaves it"
    if one.nan + one.infinite == one.n:
        return "possible, not tested: an optimiser's step with a gradient that was not finite"
    return "possible, not tested: a damaged file, or a step whose gradient was not finite there"


_REPAIRS = dict.fromkeys(SETTINGS, ("another configuration", "set it in the configuration")) | {
    REBUILT: ("altered model", "look for hooks, replaced modules and buffers that are not the class's")
}


def _repaired(d: Diagnosis) -> Iterable[Finding]:
    found = repair_of(d)
    if found is not None:
        name, remedy = _REPAIRS.get(
            found.name, ("weights of another convention", "convert the checkpoint again with this change")
        )
        yield Finding(
            severity="fault",
            name=name,
            text=f"{found.fault}: with {found.repair} the loss of a short text falls from {found.before:.2f} to "
            f"{found.loss:.2f}",
            cause="tested: of the changes that were tried, this one repairs the loss",
            remedy=f"{remedy}; the other findings may follow from it",
        )
    for one in d.trials[:1] if found is None else ():
        if one.further:
            yield Finding(
                severity="warning",
                name="several conventions",
                text=f"with {one.repair} the loss of a short text falls from {one.before:.2f} to {one.loss:.2f}, and "
                f"further with {one.further}",
                cause="possible, not tested: weights that were changed in several ways, or in one that was not tried",
                remedy="diagnose again after the first change",
            )


def _labels_shifted(d: Diagnosis, e: Ends) -> Iterable[Finding]:
    """A model that says another word than the next, and says it well."""
    value = None if d.loss is None else d.loss.value
    if not e.other_losses or value is None or not e.learnt:
        return
    itself, after = e.other_losses
    bound = GUESSING * e.log_vocab if e.frequencies is None else e.frequencies
    for loss, most, which, why in (
        (itself, ITSELF, "the word itself", "labels that were not shifted by one"),
        (after, bound, "the word after the next (2 ahead)", "labels that were shifted twice"),
    ):
        if loss < min(most, value - SHIFTED):
            yield Finding(
                severity="fault",
                name="labels shifted",
                text=f"the model says {which}: its loss is {loss:.2f} there, and {value:.2f} for the next word",
                cause=f"tested: by the loss of a short text; it was trained with {why}",
                remedy="shift labels by one, once: models of transformers do it themselves where labels= is given",
            )


def _cut(d: Diagnosis) -> Iterable[Finding]:
    """Layers that no gradient reaches, below others that it does reach."""
    found = {s.layer: s.gradient for s in d.signal}
    last = max((k for k, g in found.items() if g == 0), default=None)
    cut = tuple(k for k, g in found.items() if g == 0)
    if last is not None and any(g for k, g in found.items() if k > last):
        yield Finding(
            severity="fault",
            name="no gradient arrives",
            layers=cut,
            text=f"{named(cut)}: the gradient of the loss is exactly 0 there, and is not above layer {last}",
            cause="tested by a backward pass: the stream is cut above",
            remedy="look for detach(), no_grad, a checkpoint (use_reentrant=False), or a factor of 0",
        )


def _layers_not_loaded(d: Diagnosis, e: Ends) -> Iterable[Finding]:
    if e.drawn_layers and len(e.drawn_layers) <= len(d.signal) / 2 and e.learnt:
        one = len(e.drawn_layers) == 1
        yield Finding(
            severity="fault",
            name="layers not loaded",
            layers=e.drawn_layers,
            text=f"{named(e.drawn_layers)} {'was' if one else 'were'} not trained: matrices are independent draws and "
            "norm gains are all one number, while other layers are trained",
            cause="possible, not tested: the checkpoint has no weights under the names that the model needs",
            remedy="look at what the loader reports as missing and unexpected keys",
        )


def _layer_gain(d: Diagnosis) -> float | None:
    """The middle one of the layers' norms, by the root mean square of their gains."""
    gains = sorted(known(gain for weights in d.weights for gain in weights.norm_gain))
    return gains[len(gains) // 2] if gains else None


def _around_zero(d: Diagnosis, e: Ends) -> bool:
    """Whether the gains of all norms lie around 0, and differ, which no training leaves."""
    gains = (_layer_gain(d), e.final_gain)
    return e.layer_gains_constant is False and all(g is not None and g < GAINS_AROUND_ZERO for g in gains)


def _gains_around_zero(d: Diagnosis, e: Ends) -> Iterable[Finding]:
    if _around_zero(d, e):
        yield Finding(
            severity="fault",
            name="norm gains around 0",
            text=f"the gains of the layers' norms have rms {number(_layer_gain(d))} (median), those of the final norm "
            f"{number(e.final_gain)}; gains start at 1 and stay near it",
            cause="possible, not tested: gains stored around 0, for norms that add 1 to them, and read as they are",
            remedy="add 1 to the gains, or use the model class whose norms add 1",
        )


def _ends_not_loaded(d: Diagnosis, e: Ends) -> Iterable[Finding]:
    if not e.learnt or e.layer_gains_constant is not False or _around_zero(d, e):
        return
    if e.final_gain_constant is not None:
        zero = e.final_gain_constant == 0
        yield Finding(
            severity="fault",
            name="final norm not loaded",
            text=f"the gains of the final norm are all {e.final_gain_constant:g}, while the gains in the layers were "
            "trained" + (": the logits are the same for every word" if zero else ""),
            cause="possible, not tested: the loader found no weights for it",
            remedy="look for the final norm's name among the checkpoint's unexpected keys",
        )
    if e.head_drawn and not e.tied and e.final_gain_constant is None and e.head_rms:
        yield Finding(
            severity="fault",
            name="head not loaded",
            text=f"the head looks freshly drawn (independent draws, standard deviation {e.head_rms:.3g}), while other "
            "weights are trained",
            cause="possible, not tested: the checkpoint has no head, as its model uses the token table as its head",
            remedy="set tie_word_embeddings, or load the head's weights",
        )


def _copied_head(d: Diagnosis, e: Ends, value: float) -> Iterable[Finding]:
    if e.head_copies_table and value > GUESSING * e.log_vocab:
        yield Finding(
            severity="fault",
            name="head not loaded",
            text=f"the head holds the token table's numbers, is not tied to it, and the loss is {value:.2f} "
            f"(ln V {e.log_vocab:.2f})",
            cause="possible, not tested: the head was tied on loading or saving, although it was trained separately",
            remedy="load the head's weights (lm_head) from a checkpoint that has them",
        )


def guessing(d: Diagnosis, others: bool) -> Iterable[Finding]:
    """A trained model that predicts no better than guessing, and where its logits come from.

    Args:
        others: whether a fault was found that can be why.
    """
    value, e = None if d.loss is None else d.loss.value, d.ends
    if e is None or value is None or not e.learnt or len(e.drawn_layers) == len(d.signal):
        return
    frequent = e.frequencies is not None and value > e.frequencies + ABOVE_FREQUENCIES
    if value < GUESSING * e.log_vocab and not frequent:
        return
    yield from _copied_head(d, e, value)
    how = "worse than guessing" if value > e.log_vocab else "hardly better than guessing"
    if value < GUESSING * e.log_vocab:
        how = f"worse than how often each word of the text comes ({e.frequencies:.2f})"
    parts = [
        f"{word} {x:.3g}"
        for word, x in (
            ("logits have variance", e.logits_variance),
            ("the last stream has variance", e.stream_variance),
            ("final gains have rms", e.final_gain),
            ("the head reads numbers of rms", e.read_rms),
            ("its weights have rms", e.head_rms if e.head_rms is not None else e.table_rms),
        )
        if x is not None
    ]
    tried = f"; {len(d.trials)} other conventions of its weights were tried, none repairs it" if d.trials else ""
    yield Finding(
        severity="warning" if others else "fault",
        name="no better than guessing",
        text=f"the loss is {value:.2f} and ln V is {e.log_vocab:.2f}, {how}, though weights were trained "
        f"({e.learnt}): {', '.join(parts)}{tried}",
        cause="possible, not tested: weights of another model or convention, or a tokenizer that is not this model's",
        remedy="" if d.trials else "diagnose without --no-trials tries the usual conventions",
    )


def _outlying(e: Ends) -> Iterable[Finding]:
    for one in e.outlying:
        more = f", {one.count} rows beyond {number(one.bound)} times" if one.count > 1 else ""
        if one.losses:
            before, after = one.losses
            more += f"; without them among the answers the loss of a short text falls from {before:.2f} to {after:.2f}"
        yield Finding(
            severity="fault" if one.losses else "warning",
            name="outlying rows",
            text=f"row {one.row} of the {one.table} is {one.ratio:.3g} times as large as its median row{more}",
            cause="possible, not tested: a row that was added, never trained, or overwritten",
            remedy="compare the row with the checkpoint it came from; new words start at the mean of the others",
        )


# --- fresh weights -----------------------------------------------------------------------------------------------


def _first_loss(d: Diagnosis, e: Ends) -> Iterable[Finding]:
    """A fresh model should guess: its loss is ln V, and half of the variance of its logits above."""
    value = None if d.loss is None else d.loss.value
    if e.learnt or value is None or e.logits_variance is None:
        return
    if e.logits_variance > FRESH_LOGITS:
        weights = "the token table, which is the head," if e.tied else "the head"
        size = e.table_rms if e.tied else e.head_rms
        yield Finding(
            severity="fault",
            name="first loss far above ln V",
            text=f"the weights are fresh and the loss is {value:.2f}, where guessing costs ln V = {e.log_vocab:.2f}: "
            f"logits have variance {e.logits_variance:.3g}, as {weights} has entries of rms {number(size)} and reads "
            f"numbers of rms {number(e.read_rms)}",
            remedy="draw it with a standard deviation of 0.02 (or below 1/sqrt(d_model)), or multiply the logits down",
        )
    elif e.logits_variance == 0 and not any(one.name.endswith("of zeros") for one in d.wired):
        yield Finding(
            severity="fault",
            name="all logits are equal",
            text=f"every word has the same logit (loss {value:.2f}, ln V {e.log_vocab:.2f}): the final gains have rms "
            f"{number(e.final_gain)}, the head's weights {number(e.table_rms if e.head_rms is None else e.head_rms)}",
            cause="tested: one of the two is 0" if 0 in (e.final_gain, e.head_rms, e.table_rms) else "",
            remedy="gains start at 1; a head of zeros trains, a head after gains of 0 does not",
        )


def _unlike_initialiser(d: Diagnosis, f: Fresh) -> Iterable[Finding]:
    n = len(d.signal)
    # zeros in some layers, or in the maps that end every branch, are designs that `_muted` speaks of
    ends = ("output", "down", "expert_down")
    off = [one for one in f.off if not (one.zeros and one.layers and (len(one.layers) < n or one.name in ends))]
    said = [_off_words(one, n, path=one is off[0]) for one in off]
    if not said:
        return
    scaled = next((one for one in f.off if _depth_scaled(one, n)), None)
    cause = ""
    if scaled is not None:
        cause = (
            f"possible, not tested: {scaled.name} has the factor 1/sqrt(2 N) that is meant for maps that end a branch"
        )
    yield Finding(
        severity="warning",
        name="unlike its initialiser",
        layers=tuple(sorted({layer for one in f.off for layer in one.layers})),
        text="the weights are fresh, but their sizes are not those that this family's initialiser draws: "
        + "; ".join(said[:4])
        + (f"; and {len(said) - 4} more" if len(said) > 4 else ""),
        cause=cause,
        remedy="signalprop check MODEL --scheme huggingface lists every weight; after apply, give that scheme's name "
        "instead, since its weights are meant to differ",
    )


def _off_words(one: Off, n: int, *, path: bool) -> str:
    where = "" if not one.layers else " in every layer" if len(one.layers) == n else f" in {named(one.layers)}"
    at = f" ({one.paths[0]})" if path and one.paths else ""
    return f"{one.place} {one.name}{where}{at} is {number(one.measured)} instead of {number(one.wanted)}"


def _depth_scaled(one: Off, n: int) -> bool:
    """Whether a map that does not end a branch has GPT-2's factor for depth."""
    if one.name in ("output", "down") or not one.wanted or not one.measured or len(one.layers) < n:
        return False
    return bool(abs(one.measured / one.wanted * math.sqrt(2 * n) - 1) < 0.1)


def _muted(d: Diagnosis, f: Fresh) -> Iterable[Finding]:
    """Layers that add nothing: whether they can learn was tried."""
    silent = [s.layer for s in d.signal if s.attention_share == 0 and s.feed_forward_share == 0]
    counts = {layer: [r.reached for r in f.reached if r.layer == layer] for layer in silent}
    dead = tuple(layer for layer in silent if counts[layer] and 0 in counts[layer])
    if dead:
        never = [f"{r.kind} of layer {r.layer}" for r in f.reached if r.layer in dead and not r.reached]
        yield Finding(
            severity="fault",
            name="no gradient arrives",
            layers=dead,
            text=f"{named(dead)}: nothing is added to the stream, and no gradient reaches any weight of: "
            f"{', '.join(never[:6])}",
            cause="tested by a backward pass; norms with gains of 0 mute what reads them and what they read",
            remedy="set the gains to 1, and mute a new block by zero weights in its output and down maps instead",
        )

"""Whether a trained model's weights were stored for another model: cheap changes, each tried, with the loss of each.

A checkpoint that was converted by another convention loads without a word and predicts nothing. What such conventions
are is known: gains stored around 0 or 1, queries and keys in either order of rotary pairs, query heads grouped either
way, a head that is the table, layers in the order of their names, matrices the other way round, another base of the
rotation, another factor on scores or embeddings. Every trial makes one such change, asks for the loss of a short text,
and takes the change back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from signalprop.attachment.anatomy import Anatomy
from signalprop.data.batches import Batch
from signalprop.diagnosis.layers import Progress
from signalprop.diagnosis.layout_trials import layout_trials
from signalprop.diagnosis.setting_trials import setting_trials
from signalprop.diagnosis.stream import LossResult, loss
from signalprop.diagnosis.temporary_changes import Trial
from signalprop.diagnosis.value_trials import value_trials
from signalprop.diagnosis.whole_model_values import REBUILT, SETTINGS, Tried

PROMISING = 0.04  # nats per token
FURTHER = 0.15  # by which another change lowers the loss of a model that one has not repaired
GUESSING = 0.5  # of ln V


def try_all(
    attached: Anatomy, short: Batch, text: Sequence[Batch], progress: Progress | None = None
) -> tuple[Tried, ...]:
    """The loss under every change that fits the model, the lowest first.

    Every change is tried on one short sequence. The best three that lower its loss by more than `PROMISING` are tried
    on more text, for the standard error of the difference.

    Args:
        attached: a model; it is left as it was.
        short: one sequence. text: the sequences of the second look; two at least, for an error.
        progress: called with (trials done, all).
    """

    def of(batches: Sequence[Batch]) -> LossResult:
        return loss(attached, batches)

    whole = of([short]).mean
    chance = math.log(attached.mapping.architecture.vocab_size)
    every = list(trials(attached, short, guessing=whole > GUESSING * chance))
    found: list[tuple[float, Trial]] = []
    for done, trial in enumerate(every):
        try:
            with trial.change():
                found.append((of([short]).mean, trial))
        except Exception:  # whatever a model raises that was configured for other weights
            pass
        if progress is not None:
            progress(done + 1, len(every))
    found = sorted((one for one in found if math.isfinite(one[0])), key=lambda one: one[0])
    control = next((value for value, trial in found if trial.name == REBUILT), math.inf)
    if whole - control > PROMISING:  # entries have to do more than a new model does
        found = [one for one in found if one[1].name not in SETTINGS or control - one[0] > PROMISING]
    closer = [trial for value, trial in found[:3] if whole - value > PROMISING]
    before = of(text) if closer else None
    out = []
    for value, trial in found:  # those that were looked at closer come first: the two losses do not compare
        words: dict[str, Any] = {"name": trial.name, "fault": trial.fault, "repair": trial.repair}
        if before is None or not any(trial is one for one in closer):
            out.append(Tried(**words, loss=value, before=whole))
            continue
        with trial.change():
            after = of(text)
        error = after.above(before).standard_error
        out.append(Tried(**words, loss=after.mean, before=before.mean, standard_error=error))
    near = sorted(out[: len(closer)], key=lambda one: one.loss - one.before)
    if near:
        at = next(trial for trial in closer if (trial.name, trial.repair) == (near[0].name, near[0].repair))
        others = [trial for value, trial in found if whole - value > PROMISING and trial.name != at.name]
        near[0] = near[0].model_copy(update=_beyond(at, others, lambda: of([short]).mean))
    return (*near, *out[len(closer) :])


def _beyond(best: Trial, others: Sequence[Trial], loss_now: Callable[[], float]) -> dict[str, Any]:
    """What lowers the loss further where a change is in effect: a model that it repairs leaves nothing to be gained."""
    with best.change():
        before = loss_now()
        for trial in others:
            with trial.change():
                after = loss_now()
            if before - after > FURTHER:
                return {"further": trial.repair}
    return {}


def trials(attached: Anatomy, short: Batch, *, guessing: bool) -> Iterator[Trial]:
    """All that fit a model; guessing: it says little more of the text than chance."""
    yield from value_trials(attached, short, guessing=guessing)
    yield from layout_trials(attached)
    yield from setting_trials(attached, short.inputs.shape[1])

"""Training runs: curves over steps, and the signal through time with a step slider."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from signalprop.report import findings
from signalprop.report.autopsy import autopsy
from signalprop.report.parts import Items, Part
from signalprop.report.sections import Card, Chart, Curve, Section, Severity, Table, Text
from signalprop.report.shown_profiles import Shown
from signalprop.report.signal import charts
from signalprop.results.findings import Finding, Findings
from signalprop.results.text import number, spread
from signalprop.results.verdicts import findings_of
from signalprop_lab.report.runs import Run, as_double, is_run, read_run

REMEDY = "a smaller learning rate, a longer warm-up, or a scheme that conserves the signal (deepscalelm)"
MAX_POINTS = 400  # of a curve over steps
MAX_FRAMES = 16  # of the signal through time
_RATE = "_per_second"
_CURVES = (
    ("loss", "Loss", "nats", True), ("eval_loss", "Loss in evaluation", "nats", True),
    ("learning_rate", "Learning rate", "rate", True), ("grad_norm", "Norm of the gradient", "norm", True),
)  # fmt: skip


def training_section(runs: Mapping[str, Run]) -> Section:
    """Metrics over steps, how runs ended, and what they were."""
    made = []
    for name, title, axis, positive in _shown(runs):
        curves = [
            over_steps(label, *run.metrics[name], colour=k)
            for k, (label, run) in enumerate(runs.items()) if name in run.metrics
        ]  # fmt: skip
        if curves:
            made.append(Chart(title, curves, "step", axis, positive=positive, zero=False))
    return Section("Training", [*made, _results(runs), *_recipes(runs)])


def over_steps(label: str, steps: Sequence[int], values: Sequence[float], colour: int) -> Curve:
    """A metric as a curve of at most MAX_POINTS points."""
    x, y = thinned(steps, values)
    return Curve(label, np.array(x, np.float64), np.array(y, np.float64), colour=colour)


def _shown(runs: Mapping[str, Run]) -> list[tuple[str, str, str, bool]]:
    """The known metrics, and whatever else was logged; not what only counts up, as tokens beside tokens per second."""
    logged = dict.fromkeys(name for run in runs.values() for name in run.metrics)
    known = {name for name, *_ in _CURVES} | {name.removesuffix(_RATE) for name in logged if name.endswith(_RATE)}
    others = [(name, name.replace("_", " ").capitalize(), "", False) for name in logged if name not in known]
    return [*_CURVES, *others]


def thinned(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """At most MAX_POINTS points: both ends, and of every stretch the lowest and the highest, so that spikes stay."""
    n = len(steps)
    if n <= MAX_POINTS:
        return list(steps), list(values)
    array = np.asarray(values, np.float64)
    keep = {0, n - 1}
    for part in np.array_split(np.arange(n), MAX_POINTS // 2 - 1):
        inside = array[part]
        finite = part[np.isfinite(inside)]
        keep |= {int(part[0])} if not finite.size else {int(finite[f(array[finite])]) for f in (np.argmin, np.argmax)}
    chosen = sorted(keep)
    return [steps[i] for i in chosen], [values[i] for i in chosen]


def _results(runs: Mapping[str, Run]) -> Table:
    rows = []
    for name, run in runs.items():
        result = run.result or {}
        last = run.metrics.get("loss")
        losses = [number(as_double(result.get(key))) for key in ("train_loss", "eval_loss")]
        if not result and last is not None:
            losses[0] = number(last[1][-1])
        steps = result.get("steps", max((steps[-1] for steps, _ in run.metrics.values() if steps), default=None))
        rows.append(
            [
                name, str(result.get("status", "running")), str(result.get("reason") or ""),
                "-" if steps is None else str(steps), *losses, number(as_double(result.get("seconds"))),
            ]
        )  # fmt: skip
    return Table("Runs", ["run", "status", "reason", "steps", "loss", "loss in evaluation", "seconds"], rows, left=3)


def _recipes(runs: Mapping[str, Run]) -> list[Text]:
    out = []
    for name, run in runs.items():
        if run.recipe:
            out.append(Text(f"Recipe of {name}", run.recipe))
        if run.environment:
            lines = (f"{key}: {value}" for key, value in run.environment.items())
            out.append(Text(f"Environment of {name}", "\n".join(lines)))
    return out


def through_time_section(runs: Mapping[str, Run]) -> Section | None:
    """The signal over depth at every step that was recorded; None where no run recorded any."""
    found: list[Shown] = []
    for k, (name, run) in enumerate(runs.items()):
        frames = spread(run.signal, MAX_FRAMES)
        found += [Shown(profile, name, colour=k, frame=str(step)) for step, profile in frames]
        found += [
            Shown(profile, name, label=f"{name}, step {step}", colour=k, line="dotted") for step, profile in frames[:1]
        ]
    if not found:
        return None
    found.sort(key=lambda item: -1 if item.frame is None else int(item.frame))
    lead = "Move the slider through the steps; the dotted line is the first step."
    return Section("The signal through training", charts(found, slider="step"), lead)


def _cards(runs: Mapping[str, Run]) -> list[Card]:
    """A card per run: how it ended, and what stands out in its last signal."""
    out: list[Card] = []
    for name, run in runs.items():
        result = run.result or {}
        if found_dead := autopsy(name, events_of(run)):
            out.append(found_dead[0])
            continue
        status = str(result.get("status", "running"))
        texts = [str(result["reason"])] if result.get("reason") else []
        last = run.signal[-1] if run.signal else None
        stands_out = [] if last is None else findings.warnings(last[1], step=last[0])
        found = [] if last is None else [f"{line} (step {last[0]})" for line in stands_out]
        severity: Severity = "warning" if found or status not in ("finished", "running") else "good"
        if not texts and not found:
            loss = as_double(result.get("eval_loss", result.get("train_loss")))
            texts = [f"loss {number(loss)}" if loss is not None else "nothing stands out"]
        out.append(Card(severity, name, status, [*texts, *found]))
    return out


def events_of(run: Run) -> Findings:
    """What stood out of a run's signals, each thing at the first step that had it, and what it died of."""
    result, seen = run.result or {}, dict[str, Finding]()
    for step, profile in run.signal:
        for one in findings_of(profile, step=step or None):
            seen.setdefault(one.name, one.model_copy(update={"step": step}))
    if result.get("status") == "diverged":
        steps = result.get("steps")
        cause = "possible, not tested: an update that was too large"
        text = str(result.get("reason") or "the loss is not finite")
        seen["diverged"] = Finding(
            name="diverged",
            severity="fault",
            text=text,
            step=steps if isinstance(steps, int) else None,
            cause=cause,
            remedy=REMEDY,
        )
    return Findings(seen.values())


def _sections(items: Items, _: Path | None) -> list[Section]:
    through_time = through_time_section(items)
    dead = [found[1] for name, run in items.items() if (found := autopsy(name, events_of(run)))]
    return [*dead, training_section(items), *([] if through_time is None else [through_time])]


PART = Part(
    types=(Run,),
    sections=_sections,
    cards=_cards,
    names=list,
    folder=lambda path: {path.resolve().name: read_run(path)} if is_run(path) else None,
)

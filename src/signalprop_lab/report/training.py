"""Training runs: curves over steps, and the signal through time with a step slider."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from signalprop.report import findings
from signalprop.report.html import blocks, signal
from signalprop.report.html.blocks import Block
from signalprop.report.html.curves import Curve
from signalprop.report.html.parts import Items, Part
from signalprop.report.html.signal_cards import cure_of
from signalprop.results.text import number, spread
from signalprop_lab.report.runs import Run, as_double, is_run, read_run

MAX_POINTS = 1200  # of a curve over steps
MAX_FRAMES = 60  # of the signal through time
_RATE = "_per_second"
_CURVES = (
    ("loss", "Loss", "nats", True), ("eval_loss", "Loss in evaluation", "nats", True),
    ("learning_rate", "Learning rate", "rate", True), ("grad_norm", "Norm of the gradient", "norm", True),
)  # fmt: skip


def training_section(runs: Mapping[str, Run]) -> Block:
    """Metrics over steps, how runs ended, and what they were."""
    places: list[Block] = []
    made = []
    for name, title, axis, positive in _shown(runs):
        curves = []
        for k, run in enumerate(runs.values()):
            if name in run.metrics:
                steps, values = thinned(*run.metrics[name])
                places.append(blocks.place(steps, [f"step {step}" for step in steps]))
                curves.append(blocks.series(k, 0, len(places) - 1, values))
        if curves:
            made.append(blocks.chart(f"run-{name}", title, curves, x="step", y=axis, positive=positive, zero=False))
    return blocks.section(
        "training",
        "Training",
        [*made, _results(runs), *_recipes(runs)],
        groups=list(runs),
        sources=[("logged", "line")],
        places=places,
    )


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


def _results(runs: Mapping[str, Run]) -> Block:
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
    return blocks.table(
        "Runs", ["run", "status", "reason", "steps", "loss", "loss in evaluation", "seconds"], rows, left=3
    )


def _recipes(runs: Mapping[str, Run]) -> list[Block]:
    out = []
    for name, run in runs.items():
        if run.recipe:
            out.append(blocks.text(f"Recipe of {name}", run.recipe))
        if run.environment:
            lines = (f"{key}: {value}" for key, value in run.environment.items())
            out.append(blocks.text(f"Environment of {name}", "\n".join(lines)))
    return out


def through_time_section(runs: Mapping[str, Run]) -> Block | None:
    """The signal over depth at every step that was recorded; None where no run recorded any."""
    recorded = {name: spread(run.signal, MAX_FRAMES) for name, run in runs.items() if run.signal}
    if not recorded:
        return None
    groups = list(runs)
    steps = sorted({step for frames in recorded.values() for step, _ in frames})
    firsts = [Curve(name, "measured", frames[0][1]) for name, frames in recorded.items()]
    places, at = signal.places_of(firsts)
    made: dict[str, Block] = {}
    for (name, frames), k in zip(recorded.items(), at, strict=True):
        for step, profile in frames:
            for chart in signal.charts([Curve(name, "at the step", profile)], groups, ["at the step"], [k]):
                whole = made.setdefault(chart["id"], {**chart, "id": f"time-{chart['id']}", "series": []})
                if chart["scale"] == "log":
                    whole["scale"] = "log"
                whole["series"] += [{**item, "step": step} for item in chart["series"]]
    return blocks.section(
        "through-time",
        "The signal through training",
        [_with_start(chart) for chart in made.values()],
        lead="Move the slider through the steps; the thin dotted line is the first step.",
        groups=groups,
        sources=[("at the step", "line"), ("at the first step", "dotted")],
        places=places,
        slider={"label": "step", "values": [str(step) for step in steps], "start": len(steps) - 1},
    )


def _with_start(chart: Block) -> Block:
    """The chart with every run's first frame as a curve that stays."""
    firsts: dict[int, Block] = {}
    for item in chart["series"]:
        firsts.setdefault(item["group"], item)
    stay = [{key: value for key, value in item.items() if key != "step"} | {"source": 1} for item in firsts.values()]
    return {**chart, "series": [*chart["series"], *stay]}


def training_findings(runs: Mapping[str, Run]) -> list[Block]:
    """A card per run: how it ended, and what stands out in its last signal."""
    out: list[Block] = []
    for name, run in runs.items():
        result = run.result or {}
        status = str(result.get("status", "running"))
        texts = [str(result["reason"])] if result.get("reason") else []
        last = run.signal[-1] if run.signal else None
        stands_out = [] if last is None else findings.warnings(last[1], step=last[0])
        found = [] if last is None else [f"{line} (step {last[0]})" for line in stands_out]
        severity: blocks.Severity = (
            "fault" if status == "diverged" else "warning" if found or status not in ("finished", "running") else "good"
        )
        if not texts and not found:
            loss = as_double(result.get("eval_loss", result.get("train_loss")))
            texts = [f"loss {number(loss)}" if loss is not None else "nothing stands out"]
        if status == "diverged":
            cure = "a smaller learning rate, a longer warm-up, or a scheme that conserves the signal (deepscalelm)"
        else:
            cure = cure_of(last[1]) if found and last is not None else ""
        out.append(blocks.card(severity, name, status, [*texts, *found], cure))
    return out


def _sections(items: Items, _: Path | None) -> list[Block]:
    through_time = through_time_section(items)
    return [training_section(items), *([] if through_time is None else [through_time])]


PART = Part(
    types=(Run,),
    sections=_sections,
    cards=training_findings,
    names=list,
    folder=lambda path: {path.resolve().name: read_run(path)} if is_run(path) else None,
)

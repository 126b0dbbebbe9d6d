"""Monitored trainings: what a SignalMonitor wrote, layer by layer through the steps, and where two of them part."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from signalprop.errors import InputError
from signalprop.files.storage import read_text
from signalprop.network.moments import FloatArray
from signalprop.report.autopsy import autopsy
from signalprop.report.parts import Items, Part
from signalprop.report.sections import Card, Chart, Curve, HeatMap, Section, Table, all_positive, numbers
from signalprop.results.findings import Finding, Findings
from signalprop.results.text import number, spread

_LAYER = re.compile(r"[^/].*?/layer_([0-9]{1,5})/(.+)")
_CELLS = 20_000_000  # steps times layers of a file
_FRAMES = 16  # steps on the slider
_APART = 2.0  # runs part where a layer's numbers are this many times as large
_SIGNED = ("token_correlation", "alignment", "cosine", "removal")  # compared by their difference, of a tenth
_DIFFERENT = 0.1
_NAMES = ("largest_score_head", "lowest_entropy_head", "least_loaded_expert")  # whose number it is, not how much
_Row = dict[str, list[float | None]]


@dataclass(frozen=True, eq=False)
class Monitored:
    """What was written of one training.

    Attributes:
        steps: that were sampled. layers: (steps, layers) by quantity, NaN where not measured. whole: (steps,) by name.
        warnings: (step, text). jumps: of the loss or the gradients, as they were written. events: the warnings with
            cause and next action, in the order of the steps.
    """

    steps: tuple[int, ...]
    layers: Mapping[str, FloatArray]
    whole: Mapping[str, FloatArray]
    warnings: tuple[tuple[int, str], ...] = ()
    jumps: tuple[tuple[int, Mapping[str, Any]], ...] = ()
    events: Findings = field(default_factory=Findings)


def read_monitored(path: str | Path) -> Monitored:
    """The JSONL file that a SignalMonitor wrote; of a step that was sampled twice (a resumed run) the last."""
    lines = read_text(path).split("\n")
    sampled: dict[int, dict[str, float]] = {}
    warnings: list[tuple[int, str]] = []
    jumps, events = [], list[Finding]()
    for k, line in enumerate(lines):
        if not line.strip() or k == len(lines) - 1:  # without its newline: cut off
            continue
        row = _row(line, f"{path}, line {k + 1}")
        step = row["step"]
        warnings += [(step, str(text)) for text in row.get("warnings", ())]
        events += events_of(row)
        if "jump" in row:
            jumps.append((step, row["jump"]))
        else:
            sampled[step] = {name: float(v) for name, v in row.items() if "/" in name and isinstance(v, (int, float))}
    layers = {int(found[1]) for row in sampled.values() for name in row if (found := _LAYER.fullmatch(name))}
    if (max(layers, default=0) + 1) * len(sampled) > _CELLS:
        raise InputError(f"{path}: layer {max(layers)} at {len(sampled)} steps; expected {_CELLS} numbers at most")
    if not sampled:
        raise InputError(f"{path}: no sampled step; give the file that SignalMonitor(jsonl=...) wrote")
    steps = tuple(sorted(sampled))
    cells: dict[str, dict[tuple[int, int], float]] = {}
    whole: dict[str, FloatArray] = {}
    for i, step in enumerate(steps):
        for name, value in sampled[step].items():
            found = _LAYER.fullmatch(name)
            if found:
                cells.setdefault(found[2], {})[i, int(found[1])] = value
            else:
                whole.setdefault(name.rpartition("/")[2], np.full(len(steps), np.nan))[i] = value
    return Monitored(
        steps, {q: _table(len(steps), at) for q, at in cells.items()}, whole, tuple(warnings), tuple(jumps),
        Findings(sorted(events, key=lambda one: one.step or 0)),
    )  # fmt: skip


def line_of_log(line: str, where: str) -> dict[str, Any]:
    """A line of a SignalMonitor's file; it has a step, and its warnings are a list.

    Args:
        where: file and line, in words.

    Raises:
        InputError: it is something else.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict) or type(row.get("step")) is not int or not isinstance(row.get("warnings", []), list):
        raise _refused(where)
    return row


def events_of(row: Mapping[str, Any]) -> Findings:
    """What a line warns of, with cause and remedy."""
    return Findings.from_json(row.get("events", []))


def _refused(where: str) -> InputError:
    return InputError(f"{where}: this is not a line of a SignalMonitor's file")


def _row(line: str, where: str) -> dict[str, Any]:
    """The same, of numbers that can be drawn."""
    row = line_of_log(line, where)
    given = [v for v in row.values() if isinstance(v, (int, float))]
    if not all(abs(v) < 1e300 for v in given) or ("jump" in row and not _is_jump(row["jump"])):
        raise _refused(where)
    return row


def _is_jump(data: Any) -> bool:
    ring: Any = data.get("ring") if isinstance(data, dict) else None
    try:
        shapes = [numbers(ring[name]).shape for name in ("step", "loss")]
        tables = [np.array([numbers(row) for row in ring[name]]).shape for name in ("gradient_norm", "update")]
    except (TypeError, ValueError, KeyError):
        return False
    places = ring.get("place")
    if places is not None and not (isinstance(places, list) and all(isinstance(one, str) for one in places)):
        return False
    return shapes[0] == shapes[1] and all(len(t) == 2 and t[:1] == shapes[0] for t in tables)


def _table(steps: int, cells: Mapping[tuple[int, int], float]) -> FloatArray:
    out = np.full((steps, 1 + max(layer for _, layer in cells)), np.nan)
    for place, value in cells.items():
        out[place] = value
    return out


def partings(a: Monitored, b: Monitored) -> list[tuple[str, int, int, float, float]]:
    """(quantity, step, layer, value in a, value in b) where two trainings part first, in the order of the steps.

    That is a factor of 2, or a tenth where numbers have a sign; the layer is the one furthest apart at that step.
    """
    common = sorted(set(a.steps) & set(b.steps))
    out = []
    for quantity in [q for q in a.layers if q in b.layers and q not in _NAMES]:
        depth = min(a.layers[quantity].shape[1], b.layers[quantity].shape[1])
        for step in common:
            x, y = (m.layers[quantity][m.steps.index(step), :depth] for m in (a, b))
            with np.errstate(divide="ignore", invalid="ignore"):
                far = np.abs(y - x) / _DIFFERENT if quantity in _SIGNED else np.abs(np.log(y / x)) / math.log(_APART)
            far = np.where(np.isnan(far), 0.0, far)
            k = int(far.argmax())
            if far[k] > 1:
                out.append((quantity, step, k, float(x[k]), float(y[k])))
                break
    return sorted(out, key=lambda item: item[1])


def _layers_section(runs: Mapping[str, Monitored]) -> Section:
    made = []
    for quantity in dict.fromkeys(q for run in runs.values() for q in run.layers if q not in _NAMES):
        curves = []
        for k, (name, run) in enumerate(runs.items()):
            if quantity in run.layers:
                x = np.arange(float(run.layers[quantity].shape[1]))
                names = [f"layer {i}" for i in range(len(x))]
                rows = {step: run.layers[quantity][run.steps.index(step)] for step in spread(run.steps, _FRAMES)}
                curves += [Curve(name, x, y, colour=k, names=names, frame=str(step)) for step, y in rows.items()]
                first = f"{name}, step {run.steps[0]}"
                curves.append(Curve(first, x, rows[run.steps[0]], colour=k, names=names, line="dotted"))
        curves.sort(key=lambda curve: -1 if curve.frame is None else int(curve.frame))
        title, positive = quantity.replace("_", " "), all_positive(curves)
        log = positive and quantity in ("variance", "gradient", "update")
        made.append(Chart(title, curves, "layer", title, log=log, positive=positive, slider="step"))
    lead = "Move the slider through the sampled steps; the dotted line is the first."
    return Section("The signal of the training", made, lead)


def _steps_section(runs: Mapping[str, Monitored]) -> Section:
    made: list[Any] = []
    for quantity in dict.fromkeys(name for run in runs.values() for name in run.whole):
        curves = [
            Curve(name, np.array(run.steps, np.float64), run.whole[quantity], colour=k)
            for k, (name, run) in enumerate(runs.items()) if quantity in run.whole
        ]  # fmt: skip
        title = quantity.replace("_", " ")
        made.append(Chart(title, curves, "step", title, positive=all_positive(curves), zero=False))
    for name, run in runs.items():
        made += [_before_a_jump(f"{name}, " if len(runs) > 1 else "", step, jump) for step, jump in run.jumps]
    items = list(runs.items())
    return Section("Through the steps", [*made, *(_apart(*items[0], *other) for other in items[1:])])


def _before_a_jump(name: str, step: int, jump: Mapping[str, Any]) -> HeatMap:
    table = np.array([numbers(row) for row in jump["ring"]["update"]]).T
    with np.errstate(all="ignore"):
        usual = np.nanmedian(np.where(np.isfinite(table), table, np.nan), axis=1, keepdims=True)
        logs = np.clip(np.log10(table / usual), -3, 3)
    what = "the loss" if jump.get("what", "loss") == "loss" else "the norm of the gradients"
    places = jump["ring"].get("place")
    named = "" if not places else f"Sublayers: {'; '.join(f'{k}: {place}' for k, place in enumerate(places[:60]))}."
    return HeatMap(
        f"{name}before {what} jumped at step {step}", {"": logs}, "step", "sublayer" if places else "layer", (-3, 3),
        origin=(jump["ring"]["step"][0], 0), value="log10 of update over its median", caption=named,
    )  # fmt: skip


def _apart(one: str, a: Monitored, other: str, b: Monitored) -> Table:
    rows = [
        [quantity.replace("_", " "), str(step), str(layer), number(x), number(y)]
        for quantity, step, layer, x, y in partings(a, b)
    ]
    caption = "The first common step at which a layer differs by a factor of 2, or by 0.1 where numbers have a sign."
    title = f"Where {other} parts from {one}" + ("" if rows else ": nowhere")
    return Table(title, ["quantity", "step", "layer", one, other], rows, caption=caption)


def _cards(items: Items) -> list[Card]:
    out = []
    for name, run in items.items():
        if found := autopsy(name, run.events):
            out.append(found[0])
        texts = [text for _, text in run.warnings]
        title = f"{len(texts)} warning{'s' * (len(texts) != 1)}" if texts else "no warning"
        told = [*texts[:8], *([f"and {len(texts) - 8} more"] if len(texts) > 8 else [])]
        told = told or [f"{len(run.steps)} sampled steps, {run.steps[0]} to {run.steps[-1]}"]
        out.append(Card("warning" if texts else "good", name, title, told))
    return out


PART = Part(
    types=(Monitored,),
    sections=lambda items, _: [
        *(found[1] for name, run in items.items() if (found := autopsy(name, run.events))),
        _layers_section(items),
        _steps_section(items),
    ],
    cards=_cards,
    names=list,
    lines=lambda path: {path.stem: read_monitored(path)},
)

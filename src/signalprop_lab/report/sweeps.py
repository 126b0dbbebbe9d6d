"""Sweeps: means with errors, verdicts on the claim, every rung that was tried, curves of the best runs, all runs."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

import numpy as np

from signalprop.errors import InputError
from signalprop.files.storage import is_below, read_json
from signalprop.report.parts import Part
from signalprop.report.sections import Card, Chart, Curve, Link, Section, Severity, Table, all_positive, with_errors
from signalprop.results.text import number
from signalprop_lab.report.runs import Run, as_double, read_run
from signalprop_lab.report.training import over_steps
from signalprop_lab.training import tables, verdicts
from signalprop_lab.training.sweep_cells import Summary, state_of, summaries
from signalprop_lab.training.sweep_definition import SEPARATOR, Sweep

RESULTS = "results.json"
_STARTED = "sweep.json"  # what a sweep's directory has from its beginning on
_COURSE = (
    "Above 0: as claimed. Mean ± standard error over the seeds, paired; every column is the mean over a fifth of the "
    "steps. A difference that fades is a faster start, not a better model."
)
_SEVERITIES: dict[str, Severity] = {verdicts.CONFIRMED: "good", verdicts.CONTRADICTED: "warning"}
_LOSSES = (("loss", "Loss of the best runs"), ("eval_loss", "Loss in evaluation of the best runs"))
_NUMBERS = ("score", "train_loss", "eval_loss", "chance", "seconds")  # of a row; None if it has none
_LARGEST = 1e150  # score of a run, whose square is still a number
_APART = 0.07  # between what is compared, in distances between two ticks


@dataclass(frozen=True)
class Swept:
    """What a sweep came to.

    Attributes:
        store: as `results.json` has it. best: by cell, the first run at its best rung, where its directory is there.
        root: the sweep's directory, where it is known.
    """

    store: Mapping[str, Any]
    best: Mapping[str, Run] = field(default_factory=dict)
    root: Path | None = None

    @property
    def sweep(self) -> Sweep:
        """The grid."""
        return Sweep(**self.store["sweep"])


def results_of(root: Path) -> Path:
    """The stored results in a sweep's directory."""
    if not (root / RESULTS).is_file():
        raise InputError(f"{root} has no {RESULTS} yet; write it: signalprop sweep SWEEP --out {root} --jobs 0")
    return root / RESULTS


def of_results(data: Any, root: Path) -> Swept:
    """A sweep from its stored results, and the best runs as far as their directories lie below `root`."""
    swept = Swept(_checked(data), root=root)
    best = {}
    for item in summaries(swept.store):
        if not item.rows:  # only runs that did not tune have ended
            continue
        folder = _folder(swept, item.rows[0])
        if folder is not None:
            try:
                best[item.name] = read_run(folder)
            except InputError:
                continue  # a run that left nothing to draw is still a row of the table
    return Swept(swept.store, best, root)


def _checked(data: Any) -> dict[str, Any]:
    if not isinstance(data, dict) or data.get("schema") != tables.SCHEMA or not isinstance(data.get("sweep"), dict):
        raise InputError(f"these are not the results of a sweep; expected schema {tables.SCHEMA} and the sweep")
    sweep = Sweep(**data["sweep"])
    rows, failed = data.get("rows"), data.get("failed", [])
    if not isinstance(rows, list) or not isinstance(failed, list):
        raise InputError("the results of a sweep have no list of rows; write them again with sweep --jobs 0")
    names, column = set(sweep.names()), sweep.tune.column if sweep.tune else None
    for k, row in enumerate(rows):
        if not isinstance(row, dict) or not isinstance(row.get("cell"), str) or row["cell"] not in names:
            raise InputError(f"row {k} is of no cell of the sweep; write the results again with sweep --jobs 0")
        known = isinstance(row.get("seed"), int) and isinstance(row.get("status"), str) and "score" in row
        known = known and (column is None or (as_double(row.get(column)) or 0.0) > 0)
        known = known and isinstance(row.get("scores") or {}, dict)
        if not known or not all(map(_can_be_averaged, (row.get(name) for name in _NUMBERS))):
            raise InputError(
                f"row {k} lacks its seed, status{f' or {column}' if column else ''}, or one of its numbers is not "
                "a number; write the results again with sweep --jobs 0"
            )
    return {"environments": [], **data, "failed": failed}


def _can_be_averaged(value: Any) -> bool:
    """Whether a value is None, or a number whose square is one."""
    return value is None or abs(as_double(value) or (0.0 if value == 0 else math.inf)) <= _LARGEST


def _folder(swept: Swept, row: Mapping[str, Any]) -> Path | None:
    """The directory of a run, if it is there; never one outside the sweep's."""
    given = row.get("directory")
    if swept.root is None or not isinstance(given, str) or not given:
        return None
    folder = swept.root / given
    return folder if is_below(given) and folder.is_dir() else None


# --- sections ----------------------------------------------------------------------------------------------------


def sweep_sections(items: Mapping[str, Swept], beside: Path | None = None) -> list[Section]:
    """Two sections for each: the result, and its runs.

    Args:
        beside: directory of the report, from which links lead to runs; None: no links.
    """
    out = []
    for swept in items.values():
        cells = summaries(swept.store)
        if cells:
            out += [_result_section(swept, cells), _runs_section(swept, cells, beside)]
    return out


def _result_section(swept: Swept, cells: Sequence[Summary]) -> Section:
    sweep, store = swept.sweep, swept.store
    header, rows = tables.results_rows(store)
    close, same = tables.not_told_apart(store), verdicts.same_functions(cells)
    caption = [tables.legend(store, sweep)]
    caption += ["Not distinguished: " + "; ".join(line[2:] for line in close) + "."] if close else []
    caption += [f"The same function, equal to the last digit at every seed: {'; '.join(same)}."] if same else []
    found = verdicts.verdicts(store)
    claim = [
        Table(
            "Verdict on the claim", ["claim", "verdict", "numbers"],
            [[verdicts.claim_of(one.check), one.words, one.told] for one in found], left=3,
        )
    ] if found else []  # fmt: skip
    lead = " ".join(part for part in (sweep.claim, sweep.description) if part)
    lead = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", lead)  # links lead to pages beside the other one, in Markdown
    header = [name.replace("_", " ") for name in header]
    table = Table("Result", header, rows, left=len(sweep.axes), caption=" ".join(caption))
    more = []
    if course := verdicts.course_rows(sweep, {item.name: item for item in cells}):
        header = ["difference", *(f"to {(i + 1) / verdicts.PARTS:.0%} of the steps" for i in range(verdicts.PARTS))]
        more.append(Table("Training loss over the steps", header, course, left=1, caption=_COURSE))
    if budget := tables.beside_the_paper(store):
        more.append(Table("What the paper ran", *budget, left=3))
    return Section(sweep.title or sweep.name, [_means(sweep, cells), *claim, table, *more], lead)


def _means(sweep: Sweep, cells: Sequence[Summary]) -> Chart:
    """Means with errors: what is compared over the other axes, or by itself if there are none.

    A single other axis whose labels are numbers is drawn to scale.
    """
    methods, others = [*dict.fromkeys(item.labels[0] for item in cells)], sweep.compared[1:]
    combinations = [*dict.fromkeys(item.labels[1:] for item in cells)]
    if others:
        scale = [_as_number(labels[0]) for labels in combinations] if len(others) == 1 else [None]
        numeric = [x for x in scale if x is not None]
        to_scale = len(numeric) == len(combinations) > 1
        at = dict(zip(combinations, numeric if to_scale else range(len(combinations)), strict=True))
        ticks = [(float(x), SEPARATOR.join(labels)) for labels, x in at.items()]
    else:
        to_scale, at = False, {(): 0}
        ticks = [(float(k), method) for k, method in enumerate(methods)]
    curves = []
    for k, method in enumerate(methods):
        own = sorted((item for item in cells if item.labels[0] == method), key=lambda item: at[item.labels[1:]])
        shift = k if not others else 0.0 if to_scale else (k - (len(methods) - 1) / 2) * _APART
        x, y = (np.array(column, np.float64) for column in ([at[item.labels[1:]] + shift for item in own],
                                                            [item.mean for item in own]))  # fmt: skip
        errors = [math.nan if item.error is None else item.error for item in own]
        names = [item.name for item in own]
        curves.append(with_errors(Curve(method, x, y, colour=k, line="points", names=names), errors))
    return Chart(
        f"{_words(sweep.score)}: means and errors", curves, SEPARATOR.join(others) or sweep.compared[0], _unit(sweep),
        zero=False, bars=True, ticks=ticks, positive=all_positive(curves),
        caption="At the best value of every cell. A bar is two standard errors over seeds to either side.",
    )  # fmt: skip


def _runs_section(swept: Swept, cells: Sequence[Summary], beside: Path | None) -> Section:
    names = [item.name for item in cells]
    made = [*_rungs(swept.sweep, cells), *_losses(swept, names)]
    return Section(f"Runs of {swept.sweep.name}", [*made, _runs(swept, beside)])


def _rungs(sweep: Sweep, cells: Sequence[Summary]) -> Iterator[Chart]:
    """The score over the tuned number, on a logarithmic axis."""
    if sweep.tune is None:
        return
    sign = 1.0 if sweep.direction == "minimize" else -1.0
    curves = []
    for k, item in enumerate(cells):
        tried = [(rate, cost) for rate, cost in item.tried.items() if rate is not None]
        x, y = (np.array(column, np.float64) for column in ([math.log10(rate) for rate, _ in tried],
                                                            [sign * cost for _, cost in tried]))  # fmt: skip
        curves.append(Curve(item.name, x, y, colour=k, names=[f"{rate:g}" for rate, _ in tried]))
    rates = sorted({rate for item in cells for rate in item.tried if rate is not None})
    which = "mean over the seeds" if sweep.seeds_at == "all" else f"seed {sweep.seeds[0]}"
    yield Chart(
        f"{_words(sweep.score)} over the {_words(sweep.tune.column).lower()}", curves,
        _words(sweep.tune.column).lower(), _unit(sweep), zero=False,
        ticks=[(math.log10(rate), f"{rate:g}") for rate in rates], positive=all_positive(curves),
        caption=f"Of the runs that tuned: {which}. A run that failed is a gap.",
    )  # fmt: skip


def _losses(swept: Swept, names: Sequence[str]) -> Iterator[Chart]:
    """Curves over steps of the best run of every cell."""
    for metric, title in _LOSSES:
        curves = [
            over_steps(name, *run.metrics[metric], colour=names.index(name))
            for name, run in swept.best.items() if len(run.metrics.get(metric, ((),))[0]) > 1
        ]  # fmt: skip
        if curves:
            yield Chart(title, curves, "step", "nats", positive=True, zero=False)


def _runs(swept: Swept, beside: Path | None) -> Table:
    sweep = swept.sweep
    column = sweep.tune.column if sweep.tune else None
    header = [
        "cell",
        *([_words(column).lower()] if column else []),
        "seed",
        "state",
        _words(sweep.score).lower(),
        "seconds",
        "run",
    ]
    rows: list[list[str | Link]] = []
    for row in swept.store["rows"]:
        rows.append(
            [
                str(row["cell"]), *([f"{row[column]:g}"] if column else []), str(row["seed"]), state_of(row),
                number(row["score"]), number(row.get("seconds")), _link(swept, row, beside),
            ]
        )  # fmt: skip
    for item in swept.store["failed"]:
        if isinstance(item, dict):
            error = " ".join(str(item.get("error", "")).split())[:200]
            rate = item.get("rate")
            shown = [f"{rate:g}" if as_double(rate) is not None else "-"] if column else []
            rows.append([str(item.get("cell")), *shown, str(item.get("seed")), f"failed: {error}", "-", "-", "-"])
    return Table("All runs", header, rows)


def _link(swept: Swept, row: Mapping[str, Any], beside: Path | None) -> str | Link:
    """To the run's report, or to its directory."""
    folder = _folder(swept, row)
    if folder is None or beside is None:
        return str(row.get("directory") or "-")
    page = folder / "report.html"
    target = os.path.relpath(page if page.is_file() else folder, beside)
    return Link("report" if page.is_file() else "files", quote(PurePosixPath(Path(target)).as_posix()))


def _words(name: str) -> str:
    text = name.rpartition(".")[2].replace("_", " ")
    return text[:1].upper() + text[1:]


def _unit(sweep: Sweep) -> str:
    better = "lower" if sweep.direction == "minimize" else "higher"
    return f"{'nats' if sweep.score.endswith('loss') else _words(sweep.score).lower()}, {better} is better"


def _as_number(label: str) -> float | None:
    try:
        value = float(label)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _cards(items: Mapping[str, Swept]) -> list[Card]:
    """A card per sweep: the verdict on its claim, part by part, and what is best."""
    out: list[Card] = []
    for swept in items.values():
        found = verdicts.verdicts(swept.store)
        overall = verdicts.overall(found)
        texts = [f"{verdicts.claim_of(one.check).rstrip('.')}: {one.words}" for one in found]
        n, failed = len(swept.store["rows"]), len(swept.store["failed"])
        texts.append(f"{n} runs" + (f", {failed} more failed with an error" if failed else ""))
        kinds = {one.kind for one in found}
        severity = "warning" if failed else _SEVERITIES.get(kinds.pop(), "note") if len(kinds) == 1 else "note"
        out.append(Card(severity, swept.sweep.name, f"claim: {overall}" if found else f"{n} runs", texts))
    return out


def _directory(path: Path) -> dict[str, Any] | None:
    if not ((path / RESULTS).is_file() or (path / _STARTED).is_file()):
        return None
    results = results_of(path)
    try:
        return {path.resolve().name: of_results(read_json(results), path)}
    except InputError as error:
        raise InputError(f"{results}: {error}") from None


PART = Part(
    types=(Swept,),
    sections=sweep_sections,
    cards=_cards,
    names=lambda items: [item.sweep.name for item in items.values()],
    readers={tables.SCHEMA: lambda source, data: {source.stem: of_results(data, source.parent)}},
    folder=_directory,
)

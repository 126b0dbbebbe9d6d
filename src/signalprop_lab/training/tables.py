"""What a sweep comes to: one row per run (CSV), means with errors, verdicts on the paper's claim.

Everything is made from one stored value (`results.json`): the sweep, its runs, where they ran.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from signalprop.errors import InputError
from signalprop.files.storage import finite, read_json, write_json, write_text
from signalprop_lab.training.budgets import budgets
from signalprop_lab.training.grid import Grid, Point, grid_of
from signalprop_lab.training.run_locks import Entry, refuse_other_settings
from signalprop_lab.training.sweep_cells import (
    STALLED,
    Row,
    Store,
    Summary,
    error_of_difference,
    number,
    pooled_variance,
    result_text,
    summaries,
)
from signalprop_lab.training.sweep_definition import SEPARATOR, Sweep
from signalprop_lab.training.verdicts import (
    Judged,
    claim_of,
)

SCHEMA = "signalprop/results/1"


# --- rows -------------------------------------------------------------------------------------------------------------


def store_of(grid: Grid, entries: Sequence[Entry]) -> dict[str, Any]:
    """The sweep, its runs and where they ran, as JSON has it."""
    sweep = grid.sweep
    done = {entry.point: entry for entry in entries if entry.row is not None and entry.point.cell in grid.cells}
    errors = {entry.point: entry.error for entry in entries if entry.error and entry.point.cell in grid.cells}
    rows, environments = [], []
    for point in sorted(done, key=lambda p: (list(grid.cells).index(p.cell), p.rate or 0, p.seed)):
        result = dict(done[point].row or {})
        environment = result.pop("environment", {})
        if environment and environment not in environments:
            environments.append(environment)
        row = _row(grid, point, result)
        rows.append(row | ({"environment": environments.index(environment)} if environment else {}))
    return {
        "schema": SCHEMA,
        "sweep": sweep.to_json(),
        "base": finite(dict(grid.base)),
        "environments": environments,
        "rows": rows,
        "failed": [
            {"cell": p.cell, "rate": p.rate, "seed": p.seed, "error": errors[p]} for p in errors if p not in done
        ],
    }


def _row(grid: Grid, point: Point, result: Row) -> dict[str, Any]:
    sweep = grid.sweep
    row: dict[str, Any] = {"cell": point.cell}
    row |= dict(zip(sweep.axes, grid.cells[point.cell].labels, strict=True))
    if sweep.tune is not None:
        row[sweep.tune.column] = point.rate
    row |= {"seed": point.seed, "status": result["status"], "score": sweep.score_of(result)}
    row |= {key: value for key, value in result.items() if key not in row and key not in ("name", "folded")}
    return row | {"directory": grid.directory(point)}


def stored_entries(grid: Grid, file: Path) -> list[Entry]:
    """The runs of a stored value that a sweep has too, each with the settings of the recipe that was stored with it.

    Raises:
        InputError: no such value, or runs of other settings.
    """
    store = read_json(file)
    if not isinstance(store, dict) or store.get("schema") != SCHEMA:
        raise InputError(f"{file} holds no results of a sweep; give one that `signalprop sweep` has written")
    sweep = Sweep(**store["sweep"])
    then, column = grid_of(sweep, store["base"]), sweep.tune.column if sweep.tune else None
    dropped = {"cell", "score", "directory", "environment", column, *sweep.axes}  # `store_of` writes them anew
    entries = []
    for row in store["rows"]:
        point = Point(row["cell"], row[column] if column else None, row["seed"])
        if point.cell not in grid.cells:
            continue
        result = {key: value for key, value in row.items() if key not in dropped}
        if row.get("environment") is not None:
            result["environment"] = store["environments"][row["environment"]]
        elif len(store["environments"]) == 1:  # stored before rows said which
            result["environment"] = store["environments"][0]
        entries.append(Entry(point, then.settings(point), result))
    refuse_other_settings(grid, entries, file)
    return entries


def as_csv(rows: Sequence[Row]) -> str:
    """One line per run, with a header: a score `x` is a column `score_x`; `course` is left out."""
    lines = [
        {key: value for key, value in row.items() if key not in ("scores", "course")}
        | {f"score_{key}": value for key, value in (row.get("scores") or {}).items()}
        for row in rows
    ]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, [*dict.fromkeys(key for line in lines for key in line)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return buffer.getvalue()


def writers(store: dict[str, Any], out: Path) -> dict[Path, Callable[[Path], None]]:
    """What writes each file of a sweep's results into its directory; the stored value comes first.

    Raises (each of them):
        InputError: `out` cannot be written.
    """
    return {
        out / "results.json": lambda path: write_json(path, store),
        out / "results.csv": lambda path: write_text(path, as_csv(store["rows"])),
    }


# --- text -------------------------------------------------------------------------------------------------------------


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that can also be read as it is."""
    lines = [[cell.replace("|", "\\|") for cell in line] for line in (header, *rows)]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(header))]
    shown = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines]
    return "\n".join([shown[0], "| " + " | ".join("-" * width for width in widths) + " |", *shown[1:]])


def groups(items: Sequence[Summary]) -> list[tuple[tuple[str, ...], list[Summary]]]:
    """Cells that differ only in the first axis, which is what a sweep compares; keyed by the other labels."""
    found: dict[tuple[str, ...], list[Summary]] = {}
    for item in items:
        found.setdefault(item.labels[1:], []).append(item)
    return list(found.items())


def _ranked(items: Sequence[Summary], sweep: Sweep) -> list[Summary]:
    """Cells whose runs all finished, the best first."""
    chosen = [item for item in items if item.scores and not item.failed]
    return sorted(chosen, key=lambda item: item.mean, reverse=sweep.direction == "maximize")


Cells = tuple[list[str], list[list[str]]]  # a table's header and its rows


def results_table(store: Store) -> str:
    """`results_rows` as Markdown."""
    header, rows = results_rows(store)
    return markdown_table(header, rows) if rows else "No run has ended yet."


def results_rows(store: Store) -> Cells:
    """One row per cell: the best rung, the score and the training loss, and how far it is from the best cell."""
    sweep, items = Sweep(**store["sweep"]), summaries(store)
    pooled = pooled_variance(items)
    best = {key: ranked[0] for key, group in groups(items) if (ranked := _ranked(group, sweep))}
    header = [*sweep.compared, *sweep.best_of, *([sweep.tune.column] if sweep.tune else []), sweep.score]
    header += ["train_loss"] * (sweep.score != "train_loss") + ["from best"]
    header += [sweep.reference.label] if sweep.reference is not None else []
    lines = []
    for item in items:
        line = [*item.labels, *item.tuned.values()]
        if sweep.tune is not None:
            line.append(f"{item.rate:g}" + (" (edge)" if item.edge else ""))
        line.append(result_text(item) + ("" if item.complete else " (runs missing)"))
        if sweep.score != "train_loss":
            losses = [row["train_loss"] for row in item.rows if row.get("train_loss") is not None]
            line.append(f"{statistics.fmean(losses):.4f}" if losses else "-")
        line.append(_from_best(item, best.get(item.labels[1:]), pooled))
        if sweep.reference is not None:
            line.append(f"{sweep.reference.cells.get(item.name, '')}")
        lines.append(line)
    return header, lines


def _from_best(item: Summary, best: Summary | None, pooled: float | None) -> str:
    if best is None or item.failed or not item.scores:
        return "-"
    if item is best:
        return "best"
    error = error_of_difference(item, best, pooled)
    text = number(item.mean - best.mean, "+")
    return text if error is None or abs(item.mean - best.mean) > 2 * error else f"{text} ≈"


def not_told_apart(store: Store) -> list[str]:
    """Pairs that differ by less than two standard errors: one line for every combination of the other axes."""
    sweep, items = Sweep(**store["sweep"]), summaries(store)
    pooled = pooled_variance(items)
    lines = []
    for key, group in groups(items):
        close = []
        for one, other in itertools.combinations(_ranked(group, sweep), 2):
            error = error_of_difference(one, other, pooled)
            if error is not None and abs(one.mean - other.mean) <= 2 * error:
                close.append(f"{one.labels[0]} and {other.labels[0]}")
        if close:
            lines.append(f"- {SEPARATOR.join(key)}: {', '.join(close)}" if key else f"- {', '.join(close)}")
    return lines


def verdict_lines(found: Sequence[Judged]) -> list[str]:
    """One per part of the claim: the part, the verdict with the budget, the numbers."""
    return [f"{claim_of(one.check).rstrip('.')}: **{one.words}** ({one.told})" for one in found]


def beside_the_paper(store: Store) -> Cells | None:
    """What the paper ran beside what was run here; None where no paper's claim is judged."""
    sweep = Sweep(**store["sweep"])
    paper, had = sweep.paper, [*budgets(store, summaries(store)).values()] if sweep.paper else []
    if paper is None or not had:
        return None
    tuned = {key for axis in sweep.best_of for settings in sweep.axes[axis].values() for key in settings}
    how = "the best, tuned with the rate" if "schedule.warmup" in tuned else "not tuned"
    rates = sorted({row[sweep.tune.column] for row in store["rows"]}) if sweep.tune is not None else []
    spent = dict.fromkeys(f"{find([one.per_parameter for one in had]):.2g}" for find in (min, max))
    return ["", "paper", "here"], [
        ["variant", paper.variant, ", ".join(dict.fromkeys(one.scheme for one in had))],
        ["warm-up", paper.warm_up, f"{', '.join(dict.fromkeys(one.warm_up for one in had))} ({how})"],
        ["learning rates", paper.rates, ", ".join(f"{rate:g}" for rate in rates)],
        [f"{paper.unit} per parameter", f"{paper.per_parameter:g}", " to ".join(spent)],
    ]


def legend(store: Store, sweep: Sweep) -> str:
    chances = [row["chance"] for row in store["rows"] if row.get("chance") is not None]
    text = "±: standard error over the seeds. Diverged: a loss was not finite. "
    if chances:
        low, high = min(chances), max(chances)
        shown = f"{low:.3f}" if high - low < 5e-4 else f"{low:.3f} to {high:.3f}"
        text += (
            f"On the plateau: the validation loss did not fall {STALLED:g} below chance (entropy of the labels: "
            f"{shown} nats) by the end of the run. "
        )
    if sweep.tune is not None:
        text += "Edge: the best value is the outermost one that was tried; a better one may be beyond. "
    along, *others = sweep.compared
    text += f"From best: against the best {along} of the same {' and '.join(others) or 'sweep'}; "
    pooled = pooled_variance(summaries(store))
    text += "≈: less than two standard errors of the difference, paired by seed"
    if pooled is not None:
        text += (
            f" (its standard deviation between seeds counts as at least {number(math.sqrt(pooled))}, pooled over cells)"
        )
    return text + "."


def duration(seconds: float) -> str:
    """In the unit that people would use."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

"""What a sweep comes to: one row per run (Parquet, CSV), means with errors, verdicts on the paper's claim, a page.

Everything is made from one stored value (`results.json`): the sweep, its runs, where they ran.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import statistics
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from signalprop.errors import InputError, require
from signalprop.files.storage import finite, read_json, write_bytes, write_json, write_text
from signalprop_lab.training.claims import Entry
from signalprop_lab.training.grid import SEPARATOR, Check, Grid, Point, Sweep
from signalprop_lab.training.ladder import best_rung, on_edge, wanted

SCHEMA = "signalprop/results/1"
STALLED = 0.02  # nats: a run that ends less than this below chance has learnt nothing of its input
Row = Mapping[str, Any]
Store = Mapping[str, Any]


# --- rows -------------------------------------------------------------------------------------------------------------


def store_of(grid: Grid, entries: Sequence[Entry]) -> dict[str, Any]:
    """The sweep, its runs and where they ran, as JSON has it.

    Raises:
        InputError: runs lack the score that the sweep compares.
    """
    sweep = grid.sweep
    done = {entry.point: entry for entry in entries if entry.row is not None and entry.point.cell in grid.cells}
    errors = {entry.point: entry.error for entry in entries if entry.error and entry.point.cell in grid.cells}
    rows, environments = [], []
    for point in sorted(done, key=lambda p: (list(grid.cells).index(p.cell), p.rate or 0, p.seed)):
        result = dict(done[point].row or {})
        environment = result.pop("environment", {})
        if environment and environment not in environments:
            environments.append(environment)
        rows.append(_row(grid, point, result))
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


def flat(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows without nesting, all with the same columns: a score `x` is a column `score_x`."""
    found = []
    for row in rows:
        scores = row.get("scores") or {}
        plain = {key: value for key, value in row.items() if key != "scores"}
        found.append(plain | {f"score_{key}": value for key, value in scores.items()})
    columns = list(dict.fromkeys(key for row in found for key in row))
    return [{column: row.get(column) for column in columns} for row in found]


def as_csv(rows: Sequence[Row]) -> str:
    """One line per run, with a header."""
    lines = flat(rows)
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(lines[0]) if lines else ["cell"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return buffer.getvalue()


def as_parquet(rows: Sequence[Row]) -> bytes:
    """One row per run."""
    pyarrow = require("pyarrow", "training")
    parquet = require("pyarrow.parquet", "training")
    buffer = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(flat(rows)), buffer)
    return buffer.getvalue()


def writers(store: dict[str, Any], out: Path) -> dict[Path, Callable[[], None]]:
    """What writes each file of a sweep's results into its directory; the stored value comes first.

    Raises (each of them):
        InputError: `out` cannot be written.
    """
    return {
        out / "results.json": lambda: write_json(out / "results.json", store),
        out / "results.csv": lambda: write_text(out / "results.csv", as_csv(store["rows"])),
        out / "results.parquet": lambda: write_bytes(out / "results.parquet", as_parquet(store["rows"])),
        out / "table.md": lambda: write_text(out / "table.md", page(store)),
    }


# --- cells ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """The runs of a cell at its best rung.

    Attributes:
        labels: of the axes. rate: the best rung. edge: it is the outermost one. rows: its runs, by seed.
        complete: nothing is left to run. tried: cost by rung, the mean over the seeds that tuned.
        scores: of the runs that finished.
    """

    name: str
    labels: tuple[str, ...]
    rate: float | None
    edge: bool
    rows: tuple[Row, ...]
    complete: bool
    tried: Mapping[float | None, float]
    scores: tuple[float, ...]

    @property
    def states(self) -> list[str]:
        """Of every run at the best rung: `trained`, `stalled`, `diverged` or `pruned`."""
        return [state_of(row) for row in self.rows]

    @property
    def failed(self) -> bool:
        """Whether a run has no score."""
        return len(self.scores) < len(self.rows)

    @property
    def mean(self) -> float:
        """Of the scores of finished runs."""
        return statistics.fmean(self.scores) if self.scores else math.nan

    @property
    def variance(self) -> float | None:
        """Between seeds, unbiased; None for fewer than two."""
        return statistics.variance(self.scores) if len(self.scores) > 1 else None

    @property
    def error(self) -> float | None:
        """Standard error of the mean."""
        return None if self.variance is None else math.sqrt(self.variance / len(self.scores))


def state_of(row: Row) -> str:
    """`diverged` (a loss was not finite), `pruned`, `stalled` (ends at chance or above), else `trained`."""
    if row["status"] != "finished" or row["score"] is None:
        return "pruned" if row["status"] == "pruned" else "diverged"
    loss, chance = row.get("eval_loss"), row.get("chance")
    return "stalled" if loss is not None and chance is not None and loss > chance - STALLED else "trained"


def summaries(store: Store) -> list[Summary]:
    """Of every cell that has a run."""
    sweep = Sweep(**store["sweep"])
    found = []
    for labels in sweep.labels():
        name = SEPARATOR.join(labels)
        rows = {(_rate(sweep, row), row["seed"]): row for row in store["rows"] if row["cell"] == name}
        if not rows:
            continue
        costs = {place: sweep.cost_of(row) for place, row in rows.items()}
        choice = (sweep.tune, sweep.seeds, sweep.seeds_at, costs)
        best = best_rung(*choice)
        chosen = tuple(rows[best, seed] for seed in sweep.seeds if (best, seed) in rows)
        tuning = sweep.seeds if sweep.seeds_at == "all" else sweep.seeds[:1]
        by_rate = {
            rate: statistics.fmean([costs[rate, seed] for seed in tuning if (rate, seed) in costs])
            for rate in sorted({rate for rate, seed in costs if seed in tuning}, key=lambda rate: rate or 0)
        }
        scores = tuple(float(row["score"]) for row in chosen if row["score"] is not None)
        found.append(Summary(name, labels, best, on_edge(*choice), chosen, not wanted(*choice), by_rate, scores))
    return found


def _rate(sweep: Sweep, row: Row) -> float | None:
    return None if sweep.tune is None else row[sweep.tune.column]


def pooled_variance(items: Sequence[Summary]) -> float | None:
    """Between seeds of a cell, over all cells whose runs all trained; None: no cell has two."""
    chosen = [item for item in items if item.variance is not None and set(item.states) == {"trained"}]
    freedom = sum(len(item.scores) - 1 for item in chosen)
    return sum((len(item.scores) - 1) * (item.variance or 0.0) for item in chosen) / freedom if freedom else None


def error_of_difference(one: Summary, other: Summary, pooled: float | None) -> float | None:
    """Standard error of the difference of two means.

    Two seeds may agree by chance, so a cell's variance counts as no less than the pooled one.
    """
    total = 0.0
    for item in (one, other):
        known = [variance for variance in (item.variance, pooled) if variance is not None]
        if not known or not item.scores:
            return None
        total += max(known) / len(item.scores)
    return math.sqrt(total)


# --- verdicts ---------------------------------------------------------------------------------------------------------

CONFIRMED, CONTRADICTED, INVISIBLE = "confirmed", "contradicted", "not visible at this scale"
OPEN, NONE = "runs are missing", "no verdict"


def verdict(check: Check, items: Mapping[str, Summary], sweep: Sweep, pooled: float | None) -> tuple[str, str]:
    """What the results say to one part of the claim, and the numbers behind it."""
    if any(name not in items or not items[name].complete for name in check.cells):
        return OPEN, ", ".join(name for name in check.cells if name not in items or not items[name].complete)
    if check.less is not None:
        return _less(check, items[check.less[0]], items[check.less[1]], sweep, pooled)
    wrong = []
    for item in (items[name] for name in check.cells):
        good = [state for state in item.states if (state == "trained") == (check.trains is not None)]
        if len(good) < len(item.rows):
            wrong.append(item)
    told = "; ".join(f"{item.name}: {counted(item)}" for item in (wrong or [items[name] for name in check.cells]))
    return (CONTRADICTED if wrong else CONFIRMED), told


def _less(check: Check, one: Summary, other: Summary, sweep: Sweep, pooled: float | None) -> tuple[str, str]:
    worst = math.inf if sweep.direction == "minimize" else -math.inf
    a, b = (worst if item.failed else item.mean for item in (one, other))
    told = f"{one.name}: {result_text(one)}; {other.name}: {result_text(other)}"
    if math.isinf(a) and math.isinf(b):
        return NONE, f"neither trains; {told}"
    if math.isinf(a) or math.isinf(b):
        return (CONFIRMED if a < b else CONTRADICTED), told
    if {*one.states, *other.states} == {"stalled"}:
        return INVISIBLE, f"neither leaves chance; {told}"
    error = error_of_difference(one, other, pooled)
    if error is None:
        return NONE, f"the spread between seeds is not known; {told}"
    told += f"; difference {b - a:+.4f}, standard error {error:.4f}"
    least = 2 * error if check.by == "spread" else max(2 * error, check.by)
    if b - a > least:
        return CONFIRMED, told
    return (CONTRADICTED if a - b > 2 * error else INVISIBLE), told


def verdicts(store: Store) -> list[tuple[Check, str, str]]:
    """Of every part of the claim: the verdict, and the numbers behind it."""
    sweep = Sweep(**store["sweep"])
    items = summaries(store)
    by_name, pooled = {item.name: item for item in items}, pooled_variance(items)
    return [(check, *verdict(check, by_name, sweep, pooled)) for check in sweep.verdict]


def overall(found: Sequence[str]) -> str:
    """The verdict on the whole claim."""
    kinds = set(found)
    if not kinds or kinds == {NONE}:
        return NONE
    if OPEN in kinds:
        return OPEN
    if len(kinds) == 1:
        return found[0]
    counts = Counter(found)
    return ", ".join(
        f"{counts[kind]} of {len(found)} {kind}" for kind in (CONFIRMED, INVISIBLE, CONTRADICTED, NONE) if counts[kind]
    )


# --- text -------------------------------------------------------------------------------------------------------------


def counted(item: Summary) -> str:
    """How many runs of a cell did what."""
    counts = Counter(item.states)
    return ", ".join(f"{n} of {len(item.rows)} {state}" for state, n in counts.items())


def result_text(item: Summary) -> str:
    """A cell's mean and standard error over its seeds, and what went wrong."""
    bad = Counter(state for state in item.states if state != "trained")
    words = [state if n == len(item.rows) else f"{n} of {len(item.rows)} {state}" for state, n in bad.items()]
    if not item.scores:
        return ", ".join(words) or "-"
    text = f"{item.mean:.4f}" + (f" ± {item.error:.4f}" if item.error is not None else "")
    if len(item.scores) == 1:
        words.append("1 seed")
    return f"{text} ({', '.join(words)})" if words else text


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
    header = [*sweep.axes, *([sweep.tune.column] if sweep.tune else []), sweep.score]
    header += ["train_loss"] * (sweep.score != "train_loss") + ["from best"]
    header += [sweep.reference.label] if sweep.reference is not None else []
    lines = []
    for item in items:
        line = list(item.labels)
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
    text = f"{item.mean - best.mean:+.4f}"
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


def rates_table(store: Store) -> str:
    """`rates_rows` as Markdown; empty where nothing was tuned."""
    found = rates_rows(store)
    return "" if found is None else markdown_table(*found)


def rates_rows(store: Store) -> Cells | None:
    """The score on every rung that a cell tried, of the seeds that tuned; None where nothing was tuned."""
    sweep, items = Sweep(**store["sweep"]), summaries(store)
    if sweep.tune is None:
        return None
    rates = sorted({rate for item in items for rate in item.tried if rate is not None})
    lines = []
    for item in items:
        cells = []
        for rate in rates:
            cost = item.tried.get(rate)
            cells.append("" if cost is None else f"{abs(cost):.4f}" if math.isfinite(cost) else "failed")
        lines.append([item.name, *cells])
    return [sweep.tune.column, *(f"{rate:g}" for rate in rates)], lines


def page(store: Store) -> str:
    """Markdown: the claim, what was run, the table with errors, verdicts, the rungs that were tried.

    Raises:
        InputError: the stored value is not one that `store_of` makes.
    """
    if store.get("schema") != SCHEMA:
        raise InputError(f"these are no results of a sweep: schema {store.get('schema')!r}; expected {SCHEMA}")
    sweep = Sweep(**store["sweep"])
    found = verdicts(store)
    parts = [f"# {sweep.title or sweep.name}"]
    if sweep.claim:
        parts += ["## The claim", wrapped(sweep.claim)]
    parts += [
        "## What was run",
        *([wrapped(sweep.description)] if sweep.description else []),
        *_what_was_run(store, sweep),
    ]
    parts += ["## Result", results_table(store), wrapped(legend(store, sweep))]
    close = not_told_apart(store)
    if close:
        parts += ["Not told apart (less than two standard errors between them):", "\n".join(close)]
    if found:
        parts += ["## Verdict", f"**{overall([kind for _, kind, _ in found])}**", "\n".join(map(_verdict_line, found))]
    if sweep.tune is not None and store["rows"]:
        which = "mean over the seeds" if sweep.seeds_at == "all" else f"seed {sweep.seeds[0]}"
        parts += [f"## Every {sweep.tune.column.replace('_', ' ')}", f"{sweep.score}, {which}:", rates_table(store)]
    return "\n\n".join(parts) + "\n"


def _verdict_line(found: tuple[Check, str, str]) -> str:
    check, kind, told = found
    return f"- {claim_of(check).rstrip('.')}: **{kind}** ({told})"


def claim_of(check: Check) -> str:
    """A part of the claim in words."""
    if check.claim:
        return check.claim
    if check.less is not None:
        return f"{check.less[0]} ends below {check.less[1]}"
    return f"{', '.join(check.cells)}: {'every run trains' if check.trains is not None else 'no run trains'}"


def _what_was_run(store: Store, sweep: Sweep) -> list[str]:
    lines = []
    for axis, values in sweep.axes.items():
        lines += [f"- {axis}:", *(f"  - {label}: {_settings(keys)}" for label, keys in values.items())]
    if sweep.tune is not None:
        ladder = ", ".join(f"{value:g}" for value in sweep.tune.values)
        more = (
            f", and up to {sweep.tune.extend} further on either side while the best is outermost"
            if sweep.tune.extend
            else ""
        )
        lines.append(f"- {sweep.tune.key}: tuned for every cell by {sweep.score}: {ladder}{more}")
    where = "at the best value" if sweep.seeds_at == "best" and sweep.tune is not None else "everywhere"
    lines.append(f"- seeds {', '.join(map(str, sweep.seeds))}, {where}")
    if sweep.prune is not None:
        lines.append(
            f"- runs are stopped after {sweep.prune.after:.0%} of the steps when their training loss is "
            f"{sweep.prune.worse_by:g} nats above the best of their cell"
        )
    rows = store["rows"]
    seconds = sum(row.get("seconds") or 0.0 for row in rows)
    statuses = Counter(row["status"] for row in rows)
    revisions = sorted({str(row["revision"])[:10] for row in rows if row.get("revision")})
    text = (
        f"{len(rows)} runs ({', '.join(f'{n} {kind}' for kind, n in statuses.items())}), {duration(seconds)} together."
    )
    text += "".join(f" {_environment(environment)}." for environment in store["environments"])
    text += f" Revision {', '.join(revisions)}." if revisions else ""
    yaml = require("yaml", "training")
    base = yaml.safe_dump(store["base"], sort_keys=False, allow_unicode=True, width=110, default_flow_style=None)
    return ["\n".join(lines), wrapped(text), "Every run, but for what the axes set:", f"```yaml\n{base}```"]


def _settings(keys: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in keys.items()) or "as below"


def _environment(environment: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in environment.get("versions", {}).items())
    return ", ".join(part for part in (environment.get("machine"), environment.get("device"), versions) if part)


def legend(store: Store, sweep: Sweep) -> str:
    chances = [row["chance"] for row in store["rows"] if row.get("chance") is not None]
    text = "±: standard error over the seeds. Diverged: a loss was not finite. "
    if chances:
        low, high = min(chances), max(chances)
        shown = f"{low:.3f}" if high - low < 5e-4 else f"{low:.3f} to {high:.3f}"
        text += (
            f"Stalled: the validation loss ends above {STALLED:g} below chance (entropy of the labels: {shown} nats). "
        )
    if sweep.tune is not None:
        text += "Edge: the best value is the outermost one that was tried; a better one may lie beyond. "
    along = next(iter(sweep.axes))
    text += f"From best: against the best {along} of the same {' and '.join([*sweep.axes][1:]) or 'sweep'}; "
    pooled = pooled_variance(summaries(store))
    text += "≈: less than two standard errors of the difference"
    if pooled is not None:
        text += f" (a standard deviation between seeds counts as at least {math.sqrt(pooled):.4f}, pooled over cells)"
    return text + "."


def duration(seconds: float) -> str:
    """In the unit that people would use."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def wrapped(text: str) -> str:
    """Paragraphs in lines of 120 columns; lists, tables and code as they are."""
    parts = []
    for part in text.strip().split("\n\n"):
        plain = not part.lstrip().startswith(("|", "-", "#", "!", "```"))
        parts.append(
            "\n".join(textwrap.wrap(part, 120, break_long_words=False, break_on_hyphens=False)) if plain else part
        )
    return "\n\n".join(parts)


def write_results_page(results: Path, target: Path) -> str:
    """Write the page of a stored value; the verdict on its claim.

    Raises:
        InputError: no such file, no results of a sweep, or a page that cannot be written.
    """
    store = read_json(results)
    if not isinstance(store, dict):
        raise InputError(f"{results} holds no results of a sweep")
    note = f"Written by `python -m benchmarks.results` from `{results.name}`: do not edit."
    title, rest = page(store).split("\n\n", 1)
    write_text(target, f"{title}\n\n{note}\n\n{rest}")
    return overall([kind for _, kind, _ in verdicts(store)])

"""The cells of a sweep: their runs at the best setting, how each ended, and how far two of them are apart."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from signalprop_lab.training.ladder import alternatives, best_of, best_rung, on_edge, wanted_of_cells
from signalprop_lab.training.sweep_definition import SEPARATOR, Sweep

STALLED = 0.02  # nats: a run that ends less than this below chance has learnt nothing of its input
PLATEAU = "on the plateau"
Row = Mapping[str, Any]
Store = Mapping[str, Any]


@dataclass(frozen=True)
class Summary:
    """The runs of a cell at its best rung; of cells that differ in what `best_of` tunes, the best one's.

    Attributes:
        name, labels: of the axes that are compared. tuned: the best label of every other one.
        rate: the best rung. edge: it is the outermost one. outer: axes of `best_of` with three values or more of which
            the best one is the outermost, with it. rows: its runs, by seed.
        complete: nothing is left to run. tried: cost by rung, the mean over the seeds that tuned.
        by_seed: scores of the runs that finished.
    """

    name: str
    labels: tuple[str, ...]
    tuned: Mapping[str, str]
    rate: float | None
    edge: bool
    outer: tuple[str, ...]
    rows: tuple[Row, ...]
    complete: bool
    tried: Mapping[float | None, float]
    by_seed: Mapping[int, float]

    @property
    def scores(self) -> tuple[float, ...]:
        """Of the runs that finished."""
        return tuple(self.by_seed.values())

    @property
    def states(self) -> list[str]:
        """Of every run at the best rung, as `state_of`."""
        return [state_of(row) for row in self.rows]

    @property
    def told(self) -> list[str]:
        """The states, those on the plateau with the steps that were not enough, where the row has them."""
        return [
            f"{state} after {row['steps']} steps" if state == PLATEAU and "steps" in row else state
            for state, row in zip(self.states, self.rows, strict=True)
        ]

    @property
    def failed(self) -> bool:
        """Whether a run has no score."""
        return len(self.scores) < len(self.rows)

    @property
    def mean(self) -> float:
        """Of the scores of finished runs."""
        return statistics.fmean(self.scores) if self.scores else math.nan

    @property
    def error(self) -> float | None:
        """Standard error of the mean over seeds; None for fewer than two."""
        return statistics.stdev(self.scores) / math.sqrt(len(self.scores)) if len(self.scores) > 1 else None


def state_of(row: Row) -> str:
    """`diverged` (a loss was not finite), `on the plateau` (ends at chance or above), else `trained`."""
    if row["status"] != "finished":
        return "diverged"
    loss, chance = row.get("eval_loss"), row.get("chance")
    if loss is not None and chance is not None and loss > chance - STALLED:
        return PLATEAU
    return "trained" if row["score"] is not None else "diverged"


def summaries(store: Store) -> list[Summary]:
    """Of every cell that is compared and has a run."""
    sweep = Sweep(**store["sweep"])
    rows: dict[str, dict[tuple[float | None, int], Row]] = {name: {} for name in sweep.names()}
    for row in store["rows"]:
        if row["cell"] in rows:
            rows[row["cell"]][_rate(sweep, row), row["seed"]] = row
    costs = {name: {place: sweep.cost_of(row) for place, row in own.items()} for name, own in rows.items()}
    missing = wanted_of_cells(sweep, costs)
    return [
        _summary(sweep, labels, rows[best], costs[best], complete=not any(missing[name] for name in names))
        for labels, names in alternatives(sweep).items()
        if rows[best := best_of(sweep, names, costs)]
    ]


def _summary(
    sweep: Sweep,
    labels: tuple[str, ...],
    rows: Mapping[tuple[float | None, int], Row],
    costs: Mapping[tuple[float | None, int], float],
    *,
    complete: bool,
) -> Summary:
    best = best_rung(sweep, costs)
    chosen = tuple(rows[best, seed] for seed in sweep.seeds if (best, seed) in rows)
    tuning = sweep.tuning_seeds
    by_rate = {
        rate: statistics.fmean([costs[rate, seed] for seed in tuning if (rate, seed) in costs])
        for rate in sorted({rate for rate, seed in costs if seed in tuning}, key=lambda rate: rate or 0)
    }
    scores = {row["seed"]: float(row["score"]) for row in chosen if row["score"] is not None}
    tuned = {axis: next(iter(rows.values()))[axis] for axis in sweep.best_of}
    ladders = {axis: list(sweep.axes[axis]) for axis in tuned}
    outer = tuple(
        f"{axis} {tuned[axis]}"
        for axis, all_ in ladders.items()
        if len(all_) > 2 and tuned[axis] in (all_[0], all_[-1])
    )
    edge = on_edge(sweep, costs)
    return Summary(SEPARATOR.join(labels), labels, tuned, best, edge, outer, chosen, complete, by_rate, scores)


def _rate(sweep: Sweep, row: Row) -> float | None:
    return None if sweep.tune is None else row[sweep.tune.column]


def paired(one: Summary, other: Summary) -> list[float]:
    """Differences of two cells at equal seeds: their batches are equal, and a part of their noise."""
    return [one.by_seed[seed] - other.by_seed[seed] for seed in one.by_seed if seed in other.by_seed]


def pooled_variance(items: Sequence[Summary]) -> float | None:
    """Between seeds, of the paired difference of two cells: the mean over all pairs of cells that differ and whose runs
    all trained; None where no two of them share two seeds."""
    chosen = [item for item in items if set(item.states) == {"trained"}]
    pairs = [differences for a, b in itertools.combinations(chosen, 2) if len(differences := paired(a, b)) > 1]
    freedom = sum(len(differences) - 1 for differences in pairs if any(differences))
    total = math.fsum(statistics.variance(d) * (len(d) - 1) for d in pairs if any(d))
    return total / freedom if freedom else None


def error_of_difference(one: Summary, other: Summary, pooled: float | None) -> float | None:
    """Standard error of the mean paired difference; None: the two share no seed, or the spread is not known.

    Args:
        pooled: `pooled_variance`. Two seeds may agree by chance, so a pair's variance counts as no less than it.
    """
    differences = paired(one, other)
    known = [] if pooled is None else [pooled]
    if len(differences) > 1:
        known.append(statistics.variance(differences))
    return math.sqrt(max(known) / len(differences)) if known and differences else None


def number(value: float, sign: str = "") -> str:
    """A score: losses to four decimals, counts of steps to one. sign: `+` writes that of a positive one too."""
    return f"{value:{sign}.{4 if abs(value) < 10 else 1}f}"


def counted(item: Summary) -> str:
    """How many runs of a cell did what."""
    counts = Counter(item.told)
    return ", ".join(f"{n} of {len(item.rows)} {state}" for state, n in counts.items())


def result_text(item: Summary) -> str:
    """A cell's mean and standard error over its seeds, and what went wrong."""
    bad = Counter(state for state in item.told if state != "trained")
    words = [state if n == len(item.rows) else f"{n} of {len(item.rows)} {state}" for state, n in bad.items()]
    if not item.scores:
        return ", ".join(words) or "-"
    text = number(item.mean) + (f" ± {number(item.error)}" if item.error is not None else "")
    if len(item.scores) == 1:
        words.append("1 seed")
    return f"{text} ({', '.join(words)})" if words else text

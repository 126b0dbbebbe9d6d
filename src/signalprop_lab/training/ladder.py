"""Tuning one number on a geometric ladder: which runs are wanted next, which rung is best, whether it is the outermost.

Costs are what is minimised; infinite where a run has failed. The first seed tunes; the others run at its best rung,
or everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from signalprop_lab.training.sweep_definition import SEPARATOR, Sweep, Tune

Costs = Mapping[tuple[float | None, int], float]


class Run(NamedTuple):
    """A run that is wanted: the rung, the seed, and how urgent it is (0: the ladder; 1: beyond it; 2: seeds)."""

    rate: float | None
    seed: int
    stage: int


def further(values: Sequence[float], *, up: bool) -> float:
    """The rung after the last one, or before the first.

    A ladder of 1, 3, 10, ..., times any number, goes on as such; any other one with the ratio of its two outermost
    rungs.
    """
    near, edge = (values[-2], values[-1]) if up else (values[1], values[0])
    if any(math.isclose(max(edge / near, near / edge), ratio, rel_tol=1e-6) for ratio in (3.0, 10.0 / 3.0)):
        return float(f"{near * 10 if up else near / 10:.3g}")
    return float(f"{edge * edge / near:.3g}")


def rungs(tune: Tune | None, costs: Costs) -> list[float | None]:
    """The sweep's values and those that runs went on to, ascending."""
    if tune is None:
        return [None]
    return [*sorted({*tune.values, *(rate for rate, _ in costs if rate is not None)})]


def cost_of(rate: float | None, costs: Costs, seeds: Iterable[int]) -> float:
    """The mean over these seeds; infinite where one of them has failed or is missing."""
    found = [costs.get((rate, seed), math.inf) for seed in seeds]
    return math.fsum(found) / len(found)


def best_rung(sweep: Sweep, costs: Costs) -> float | None:
    """The rung of the least cost; the lowest one of equals, so that a ladder on which all fails goes on downwards."""
    return min(rungs(sweep.tune, costs), key=lambda rate: cost_of(rate, costs, sweep.tuning_seeds))


def on_edge(sweep: Sweep, costs: Costs) -> bool:
    """Whether the best rung has no neighbour on one side: a better one may lie beyond."""
    tried = rungs(sweep.tune, costs)
    return sweep.tune is not None and best_rung(sweep, costs) in (tried[0], tried[-1])


def wanted(sweep: Sweep, costs: Costs) -> list[Run]:
    """Runs that a cell lacks, as far as is known now; none: the cell is done."""
    tune, tuning = sweep.tune, sweep.tuning_seeds
    tried = rungs(tune, costs)
    own = list(tune.values) if tune is not None else [None]
    middle = (len(own) - 1) / 2
    inner_first = sorted(own, key=lambda rate: abs(own.index(rate) - middle))
    beyond = [rate for rate in tried if rate not in own]
    open_runs = [
        Run(rate, seed, stage)
        for stage, rates in enumerate((inner_first, beyond))
        for rate in rates
        for seed in tuning
        if (rate, seed) not in costs
    ]
    if open_runs:
        return open_runs
    best = best_rung(sweep, costs)
    if tune is not None and best is not None:
        numbers = [rate for rate in tried if rate is not None]
        above = sum(rate > tune.values[-1] for rate in numbers)
        below = sum(rate < tune.values[0] for rate in numbers)
        for edge, used, up in ((numbers[0], below, False), (numbers[-1], above, True)):
            if best == edge and used < tune.extend:
                return [Run(further(numbers, up=up), seed, 1) for seed in tuning]
    return [Run(best, seed, 2) for seed in sweep.seeds if (best, seed) not in costs]


def wanted_of_cells(sweep: Sweep, costs: Mapping[str, Costs]) -> dict[str, list[Run]]:
    """By cell: the runs that it lacks, as far as is known now.

    Args:
        costs: of every cell, by its name. Of cells that differ only in what `best_of` tunes, the middle one tunes its
            ladder. The best run of them all then needs a neighbour on both sides, on its ladder and along every axis
            of `best_of`; so the search walks on until nothing around is better. Only that run has further seeds.
    """
    found: dict[str, list[Run]] = {}
    for names in alternatives(sweep).values():
        found |= {names[0]: wanted(sweep, costs[names[0]])} if len(names) == 1 else _walk(sweep, names, costs)
    return {name: found.get(name, []) for name in costs}


def _walk(sweep: Sweep, names: Sequence[str], costs: Mapping[str, Costs]) -> dict[str, list[Run]]:
    middle = names[len(names) // 2]
    ladder = [run for run in wanted(sweep, costs[middle]) if run.stage < 2]
    if ladder:
        return {middle: ladder}
    best = best_of(sweep, names, costs)
    rate, seed = best_rung(sweep, costs[best]), sweep.seeds[0]
    together = {place: cost for name in names for place, cost in costs[name].items()}
    around = [(name, rate) for name in names if _adjacent(sweep, name, best)]
    around += [(best, other) for other in _beside(sweep.tune, rungs(sweep.tune, together), rate)]
    missing: dict[str, list[Run]] = {}
    for name, other in around:
        if (other, seed) not in costs[name]:
            missing.setdefault(name, []).append(Run(other, seed, 1))
    return missing or {best: [Run(rate, seed, 2) for seed in sweep.seeds if (rate, seed) not in costs[best]]}


def _beside(tune: Tune | None, tried: Sequence[float | None], rate: float | None) -> list[float]:
    """The rungs on either side of one, beyond the outermost ones as far as the ladder may be extended."""
    if tune is None or rate is None:
        return []
    numbers = [value for value in tried if value is not None]
    i = numbers.index(rate)
    found = numbers[max(i - 1, 0) : i] + numbers[i + 1 : i + 2]
    if i == 0 and sum(value < tune.values[0] for value in numbers) < tune.extend:
        found.append(further(numbers, up=False))
    if i == len(numbers) - 1 and sum(value > tune.values[-1] for value in numbers) < tune.extend:
        found.append(further(numbers, up=True))
    return found


def _adjacent(sweep: Sweep, name: str, other: str) -> bool:
    """Whether two cells are neighbours along one axis of `best_of` and equal in all others."""
    pairs = zip(sweep.axes.values(), name.split(SEPARATOR), other.split(SEPARATOR), strict=True)
    steps = [abs(list(values).index(one) - list(values).index(two)) for values, one, two in pairs if one != two]
    return steps == [1]


def alternatives(sweep: Sweep) -> dict[tuple[str, ...], list[str]]:
    """By the labels that are compared: the cells of which the best one stands for all (`Sweep.best_of`)."""
    found: dict[tuple[str, ...], list[str]] = {}
    for labels in sweep.labels():
        found.setdefault(sweep.compared_labels(labels), []).append(SEPARATOR.join(labels))
    return found


def best_of(sweep: Sweep, names: Sequence[str], costs: Mapping[str, Costs]) -> str:
    """The cell of the least cost of the first seed at its best rung; the first one of equals."""
    return min(
        names,
        key=lambda name: min(
            [cost for (_, seed), cost in costs[name].items() if seed == sweep.seeds[0]], default=math.inf
        ),
    )

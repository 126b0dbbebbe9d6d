"""What the results of a sweep say to a paper's claim, part by part, and what they could not have seen."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from signalprop_lab.training.budgets import budgets, in_words, near, ratio, share_of
from signalprop_lab.training.sweep_cells import (
    PLATEAU,
    Store,
    Summary,
    counted,
    error_of_difference,
    number,
    paired,
    pooled_variance,
    result_text,
    summaries,
)
from signalprop_lab.training.sweep_definition import Check, Sweep

CONFIRMED, CONTRADICTED, INVISIBLE = "confirmed", "contradicted", "not visible"
FOR, AGAINST = "for the claim", "against the claim"  # what the two are called far from the paper's budget
OPEN, NONE, CONTROL = "runs are missing", "no verdict", "control failed"
PARTS = 5  # equal stretches of the steps over which training losses are averaged


class Judged(NamedTuple):
    """One part of a claim.

    Attributes:
        kind: `confirmed` and `contradicted` without a paper, or if its budget is within a factor of 5; else
            `for the claim` and `against the claim`; or one of the others.
        told: the numbers that support it. shares: budgets of the cells over the paper's, if it has one. unit: of them.
    """

    check: Check
    kind: str
    told: str
    shares: tuple[float, ...] = ()
    unit: str = "tokens"

    @property
    def budget(self) -> str:
        """Such as `1/1,900`: the smallest share."""
        return ratio(self.shares)

    @property
    def words(self) -> str:
        """The kind, with the budget."""
        return ", ".join(filter(None, (self.kind, in_words(self.shares, self.unit))))


def verdict(check: Check, items: Mapping[str, Summary], sweep: Sweep, pooled: float | None) -> tuple[str, str]:
    """What the results say about one part of the claim, and the numbers that support it."""
    missing = [n for n in (*check.cells, *(check.needs or ())) if n not in items or not items[n].complete]
    if missing:
        return OPEN, ", ".join(missing)
    if check.needs is not None:
        alone = check.model_copy(update={"less": check.needs, "by": "spread", "effect": None})
        kind, told = _less(alone, items[check.needs[0]], items[check.needs[1]], sweep, pooled)
        if kind == CONTRADICTED:
            return CONTROL, f"{check.needs[0]} does not end below {check.needs[1]} within this budget: {told}"
    if check.trains is None and any({*items[name].states} - {"trained"} for name in check.cells):
        # that a network does not train means something only if those train that do in the paper
        bad = [items[name] for name in sweep.controls if name in items and {*items[name].states} - {"trained"}]
        if bad:
            told = "; ".join(f"{item.name}: {counted(item)}" for item in bad)
            return CONTROL, f"cells that train in the paper do not train within this budget: {told}"
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
    sign = 1.0 if sweep.direction == "minimize" else -1.0
    told = f"{one.name}: {result_text(one)}; {other.name}: {result_text(other)}"
    if one.failed and other.failed:
        return NONE, f"neither trains; {told}"
    if one.failed or other.failed:
        lower = other.failed if sweep.direction == "minimize" else one.failed  # a failed score is the worst there is
        return (CONFIRMED if lower else CONTRADICTED), told
    if {*one.states, *other.states} == {PLATEAU}:
        return NONE, f"neither leaves the plateau at chance; {told}"
    worse = max((one, other), key=lambda item: sign * item.mean)
    rate = (f"{worse.rate:g}",) if worse.edge and len(worse.tried) > 1 else ()
    if found := (*rate, *worse.outer):  # the better one's edge could only take it further ahead
        outermost = f"{' and '.join(found)}, the best of {worse.name}, is the outermost that was tried"
        return NONE, f"not tuned: {outermost}; {told}"
    error = error_of_difference(one, other, pooled)
    if error is None:
        return NONE, f"the spread between seeds is not known; {told}"
    error = math.hypot(error, sweep.shared_error)
    difference = statistics.fmean(paired(other, one))
    told += f"; difference {number(difference, '+')}, standard error {number(error)}"
    if check.effect is not None and 2 * error > check.effect:
        told += f"; the paper's {check.effect:g} could not have been seen: the smallest that could is {2 * error:.2g}"
    least = 2 * error if check.by == "spread" else max(2 * error, check.by)
    if difference > least:
        return CONFIRMED, told
    return (CONTRADICTED if -difference > 2 * error else INVISIBLE), told


def foresight(sweep: Sweep) -> list[str]:
    """What the sweep can see of the paper's effects, before it runs; nothing where no spread is expected."""
    if sweep.spread is None:
        return []
    visible = 2 * sweep.spread * math.sqrt(2 / len(sweep.seeds))  # two standard errors; runs scatter independently
    lines = [f"smallest difference that {len(sweep.seeds)} seeds can see: {visible:.2g} ({sweep.score})"]
    for check in sweep.verdict:
        if check.effect is not None:
            word = "can be seen" if check.effect >= visible else "cannot be seen"
            lines.append(f"{claim_of(check)}: the paper's {check.effect:g} {word}")
    return lines


def same_functions(items: Sequence[Summary]) -> list[str]:
    """Cells whose losses are equal to the last digit at every seed: the same function under two names."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for item in items:
        losses = tuple((row["seed"], row.get("train_loss"), row.get("eval_loss")) for row in item.rows)
        if item.scores and not item.failed:
            found.setdefault(losses, []).append(item.name)
    return [" and ".join(names) for names in found.values() if len(names) > 1]


def verdicts(store: Store) -> list[Judged]:
    """Of every part of the claim."""
    sweep = Sweep(**store["sweep"])
    items = summaries(store)
    by_name, pooled = {item.name: item for item in items}, pooled_variance(items)
    had = budgets(store, items) if sweep.paper is not None and sweep.verdict else {}
    found = []
    for check in sweep.verdict:
        kind, told = verdict(check, by_name, sweep, pooled)
        shares = [share for name in check.cells if (share := share_of(name, had, sweep)) is not None]
        if shares and not near(shares):
            kind = {CONFIRMED: FOR, CONTRADICTED: AGAINST}.get(kind, kind)
        if cells := [f"{name}: {had[name].scheme}, warm-up {had[name].warm_up}" for name in check.cells if name in had]:
            told += f" [{'; '.join(cells)}]"
        found.append(Judged(check, kind, told, tuple(shares), sweep.paper.unit if sweep.paper else "tokens"))
    return found


def overall(found: Sequence[Judged]) -> str:
    """The verdict on the whole claim, with the smallest budget."""
    counts = Counter(one.kind for one in found)
    if not counts or [*counts] == [NONE]:
        return NONE
    if OPEN in counts:
        return OPEN
    order = (CONFIRMED, FOR, INVISIBLE, CONTRADICTED, AGAINST, CONTROL, NONE)
    each = [f"{counts[kind]} of {len(found)} {kind}" for kind in order if counts[kind]]
    text = next(iter(counts)) if len(counts) == 1 else ", ".join(each)
    shares = [share for one in found for share in one.shares]
    return ", ".join(filter(None, (text, in_words(shares, found[0].unit))))


def claim_of(check: Check) -> str:
    """A part of the claim in words."""
    if check.claim:
        return check.claim
    if check.less is not None:
        return f"{check.less[0]} ends below {check.less[1]}"
    return f"{', '.join(check.cells)}: {'every run trains' if check.trains is not None else 'no run trains'}"


# --- over the steps ---------------------------------------------------------------------------------------------------


def course_of(lines: Iterable[Mapping[str, Any]], steps: int) -> list[float] | None:
    """Mean training loss of every fifth of the steps, (5,); None: a part has no finite loss.

    Args:
        lines: of metrics.jsonl. steps: that were done.
    """
    parts: list[list[float]] = [[] for _ in range(PARTS)]
    for line in lines:
        loss = line.get("loss")
        if loss is not None and 0 < line["step"] <= steps:
            parts[(line["step"] - 1) * PARTS // steps].append(float(loss))
    means = [math.fsum(part) / len(part) if part else math.nan for part in parts]
    return means if all(map(math.isfinite, means)) else None


def course_rows(sweep: Sweep, items: Mapping[str, Summary]) -> list[list[str]]:
    """One row per claim that one cell ends below another: the training loss of the other less that of the one (above 0:
    as claimed), mean and standard error over the seeds, for every fifth of the steps.

    Where high scores are good, the cell with the lower one is claimed to have the higher loss: the one less the other.
    Cells of which fewer than two seeds have such losses are left out.
    """
    rows = []
    for check in sweep.verdict:
        if check.less is None or not all(name in items for name in check.less):
            continue
        one, other = (
            {row["seed"]: row["course"] for row in items[name].rows if row.get("course") and row["score"] is not None}
            for name in (check.less if sweep.direction == "minimize" else reversed(check.less))
        )
        parts = [[other[seed][i] - one[seed][i] for seed in one if seed in other] for i in range(PARTS)]
        if len(parts[0]) > 1:
            errors = [statistics.stdev(part) / math.sqrt(len(part)) for part in parts]
            told = [f"{statistics.fmean(part):+.4f} ± {error:.4f}" for part, error in zip(parts, errors, strict=True)]
            rows.append([claim_of(check), *told])
    return rows

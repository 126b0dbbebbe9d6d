"""How two cells differ over the steps: a lead that fades was a faster start, one that stays is a better model."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from signalprop_lab.training.cells import Summary
from signalprop_lab.training.sweep_definition import Sweep
from signalprop_lab.training.verdicts import claim_of

PARTS = 5  # equal stretches of the steps over which training losses are averaged


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

"""When a run has left the plateau at chance, where a network knows how frequent labels are and nothing of its input."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

BELOW = 0.1  # nats below chance that count as having learnt something of the input
SMOOTHED = 50  # steps over which the training loss is averaged


def left_at(lines: Iterable[Mapping[str, Any]], chance: float) -> int | None:
    """The first step at which the mean training loss of the last 50 steps is .1 nats below chance; None: not yet.

    Args:
        lines: of metrics.jsonl, in order. chance: nats, `Result.chance`.
    """
    recent: list[tuple[int, float]] = []
    for line in lines:
        loss = line.get("loss")
        if loss is None:
            continue
        recent = [(step, value) for step, value in recent if step > line["step"] - SMOOTHED] + [(line["step"], loss)]
        mean = math.fsum(value for _, value in recent) / len(recent)
        if line["step"] >= SMOOTHED and mean < chance - BELOW:
            return int(line["step"])
    return None

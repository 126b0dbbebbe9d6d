"""What timed benchmarks make of their numbers."""

from __future__ import annotations

import math
import statistics
import sys
from typing import Any

import torch

from signalprop.storage import write_json


def summary(values: list[float]) -> dict[str, float]:
    """Median, quartiles, and the standard error of the median (1.253 s / sqrt(n), normal errors)."""
    low, median, high = statistics.quantiles(values, n=4)
    spread = (high - low) / 1.349  # a standard deviation that outliers do not move
    return {
        "median": median,
        "low": low,
        "high": high,
        "standard_error": 1.253 * spread / math.sqrt(len(values)),
        "n": len(values),
    }


def write_rows(path: str | None, rows: list[dict[str, Any]]) -> None:
    """Write the rows of a table as JSON, where a file is named."""
    if path:
        write_json(path, {"torch": torch.__version__, "python": sys.version.split()[0], "rows": rows})

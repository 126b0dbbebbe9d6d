"""Predicted variances of fresh models of every family: signalprop beside AnyInit, accuracy and time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.peers import PEERS, DidNotRun, result_of
from benchmarks.peers.predicted_variances import LAYERS, SEQUENCES, TOKENS
from benchmarks.timing import table

TITLE = "Predicted variances of fresh models"
ABOUT = f"""
`python -m benchmarks variances`: models of transformers' families ({LAYERS} layers, width 256), one network each,
initialised by AnyInit and read by both on the same {SEQUENCES} x {TOKENS} random ids. AnyInit predicts the outputs of
the layers that it scales (those that feed a norm, whose size does not matter to it, left out), signalprop every branch
and stream; each is held against its own measurement of those tensors. *Error*: median over a model's layers of
|ln(predicted / measured)|, which for single networks has the scatter of their weights in it; then median over models
[quartiles]. CPU time holds the initialisation (AnyInit) or the reading of the weights (signalprop), prediction and
measurement.
"""


def measured() -> Iterator[str]:
    """The section of the page."""
    try:
        rows = result_of("anyinit", "benchmarks.peers.predicted_variances")
    except DidNotRun as reason:
        yield f"{' '.join(PEERS['anyinit'])} did not run here: {reason}"
        return
    both = [row for row in rows if all(isinstance(row[name], list) for name in ("anyinit", "signalprop"))]
    lines = [_line(name, rows) for name in ("signalprop", "anyinit")]
    lines += [_line(name, both, " (models with both)") for name in ("signalprop", "anyinit")]
    yield table(["package", "models with numbers", "error", "layers of a model", "CPU time of a model"], lines)
    for name in ("signalprop", "anyinit"):
        reasons = Counter(row[name] for row in rows if isinstance(row[name], str))
        if reasons:
            yield f"No numbers of {name}: " + "; ".join(f"{why} ({n})" for why, n in reasons.most_common(6)) + "."


def _line(name: str, rows: list[dict[str, Any]], which: str = "") -> list[str]:
    found = [row[name] for row in rows if isinstance(row[name], list)]
    if not found:
        return [name + which, f"0 of {len(rows)}", "", "", ""]
    low, middle, high = np.percentile([error for error, _ in found], [25, 50, 75])
    return [
        name + which, f"{len(found)} of {len(rows)}", f"{middle:.4f} [{low:.4f}, {high:.4f}]",
        f"{np.median([n for _, n in found]):.0f}", f"{np.median([row[f'{name} seconds'] for row in rows]):.2f} s",
    ]  # fmt: skip

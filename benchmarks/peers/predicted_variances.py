"""Variances that AnyInit and signalprop predict of fresh models, as JSON.

    python -m benchmarks.peers.predicted_variances [FAMILY ...]

AnyInit initialises each model, which is what both then predict: AnyInit the output of every layer that it scales,
signalprop every branch and stream. Each is held against its own measurement on the same tokens.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from typing import Any

import numpy as np
import torch

import signalprop as sp
from benchmarks.battery import DRAWN
from benchmarks.fresh_families import VOCABULARY, configuration
from benchmarks.small_models import model_classes
from benchmarks.timing import one_thread
from signalprop.families import names

LAYERS, TOKENS, SEQUENCES = 4, 64, 8


def families() -> list[str]:
    """Model types of transformers that signalprop reads and that need no drawing."""
    return [name for name in names() if name not in DRAWN]


def of_peer(model: Any, ids: Any) -> list[float]:
    """|ln of predicted over measured| of every layer that AnyInit predicts and measures."""
    import anyinit  # type: ignore[import-not-found]

    layers = [x for x in anyinit.initialize(model, "analytic", ids, seed=0).layers if x.constrained]
    return [abs(float(np.log(x.predicted / x.measured))) for x in layers if x.predicted and x.measured]


def of_ours(model: Any, ids: Any) -> list[float]:
    """The same of branches and streams, of the same weights."""
    found = sp.predict(model, ids, fidelity="auto"), sp.measure(model, ids)
    return [
        abs(float(x)) for point in ("branch", "stream_out")
        for x in found[0].forward[point].log_variance - found[1].forward[point].log_variance if np.isfinite(x)
    ]  # fmt: skip


def examined(family: str) -> dict[str, Any]:
    """Median error, number of layers and CPU seconds of both; in words why there are none."""
    torch.manual_seed(0)
    config = configuration(family, LAYERS)
    model = model_classes(family, config)[0](config).eval()
    ids = torch.randint(3, VOCABULARY, (SEQUENCES, TOKENS))
    row: dict[str, Any] = {"family": family}
    for name, of in (("anyinit", of_peer), ("signalprop", of_ours)):
        began = time.process_time()
        try:
            errors = of(model, ids)
            row[name] = [float(np.median(errors)), len(errors)] if errors else "no layer with both numbers"
        except Exception as error:  # whatever ends a peer is its row
            row[name] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        row[f"{name} seconds"] = time.process_time() - began
    return row


if __name__ == "__main__":
    one_thread()
    warnings.simplefilter("ignore")
    logging.disable()
    rows = []
    for family in sys.argv[1:] or families():
        try:
            rows.append(examined(family))
        except Exception as error:  # no such model here
            print(family, error, file=sys.stderr)
    print(json.dumps(rows))

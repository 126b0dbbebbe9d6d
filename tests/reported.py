"""What the tests of the report are about: profiles, runs and names that would break out of a careless page."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from signalprop.data.batches import default_statistics
from signalprop.files.storage import write_json
from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import Parametrization
from signalprop.prediction import predict
from signalprop.results.profile import Profile
from signalprop.results.series import Series
from signalprop.schemes import scheme

HOSTILE = (
    "</script><script>window.broken=1</script>",
    "<img src=x onerror=window.broken=1>",
    "\"'`${window.broken=1}&lt;b&gt;\u2028\u2029]]>",
    "%{x} <a href='javascript:window.broken=1'>y</a> <b>bold</b>",
)


def table_of(name: str, **changes: Any) -> Parametrization:
    """A scheme on a small network."""
    a = Architecture.preset("tgs", **{"n_layers": 6, "d_model": 64, "vocab_size": 500, "seq_len": 32, **changes})
    return scheme(name)(a, default_statistics(a))


def predicted(name: str, **changes: Any) -> Profile:
    """The prediction for it from scalars."""
    return predict(table_of(name, **changes), fidelity="moments")


def as_measured(p: Profile, seed: int = 0) -> Profile:
    """The profile as a measurement of it with errors would be."""
    rng = np.random.default_rng(seed)

    def noisy(series: Series) -> Series:
        shape = series.variance.shape
        return Series.of(
            log_variance=series.log_variance + 0.05 * rng.standard_normal(shape),
            token_correlation=np.clip(series.token_correlation + 0.02 * rng.standard_normal(shape), -1, 1),
            mean=series.mean,
            variance_se=np.full(shape, 0.05),
            token_correlation_se=np.full(shape, 0.02),
        )

    gradient = None if p.gradient is None else {point: noisy(series) for point, series in p.gradient.items()}
    forward = {point: noisy(series) for point, series in p.forward.items()}
    return replace(p, source="measured", fidelity="model", n_seeds=8, forward=forward, gradient=gradient)


def write_run(root: Path, *, steps: int = 40, status: str | None = None, recipe: str = "scheme: xavier\n") -> Path:
    """The directory of a run that logs every step and measures every tenth; it goes on unless it has a status."""
    root.mkdir()
    p = table_of("xavier")
    metrics = [{"step": step, "loss": 10.0 / step, "learning_rate": 2.5e-6 * step, "tokens": step,
                "tokens_per_second": 100.0}
               for step in range(1, steps + 1)]  # fmt: skip
    metrics += [{"step": step, "eval_loss": 10.5 / step} for step in range(10, steps + 1, 10)]
    signal = []
    for step in range(0, steps + 1, 10):
        grown = p.with_columns(weight__output=p.weights["output"] * (1 + step / 10))
        profile = replace(predict(grown, fidelity="moments"), source="measured", fidelity="model")
        signal.append({"step": step, "profile": profile.to_json()})
    for name, rows in (("metrics.jsonl", metrics), ("signal.jsonl", signal)):
        (root / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "recipe.yaml").write_text(recipe)
    write_json(root / "environment.json", {"python": "3.11"})
    if status is not None:
        result = {"schema": "signalprop/run/1", "status": status, "reason": None, "steps": steps, "seconds": 1.5}
        write_json(root / "result.json", result | {"train_loss": 10.0 / steps, "eval_loss": 10.5 / steps})
    return root


def figures_of(page: str) -> list[list[dict[str, Any]]]:
    """The traces of every drawing of a page."""
    starts = [found.end() for found in re.finditer(r'Plotly\.newPlot\(\s*"c[0-9]+",\s*', page)]
    return [json.JSONDecoder().raw_decode(page, at)[0] for at in starts]


def titles_of(page: str) -> list[str]:
    """Of the sections, after the summary."""
    return re.findall(r"<h2>(.*?)</h2>", page)[1:]

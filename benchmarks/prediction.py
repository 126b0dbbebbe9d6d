"""Speed of the closed-form prediction: one deep model, a sweep, and the command's cold start.

    python -m benchmarks.prediction [--json FILE]

Ratios to a floor measured in the same run: for one model, a bare Python loop with the same number of NumPy scalar
operations per sublayer (20 forward, 10 backward); for the cold start, `python -c "import numpy, pydantic, typer"`.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from signalprop.architecture import Architecture
from signalprop.inputs import zipf
from signalprop.parametrization import Parametrization
from signalprop.schemes import scheme
from signalprop.storage import write_json
from signalprop.theory.network import predict_moments


def timed(action: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """(median, spread) of CPU seconds."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        action()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds), max(seconds) - min(seconds)


def bare_loop(n_sublayers: int) -> float:
    """Thirty scalar logarithms per sublayer: what any sublayer-by-sublayer recursion in NumPy has to pay."""
    x = 1.0
    for _ in range(n_sublayers):
        for _ in range(30):
            x = float(np.log(1.0 + x * x))
    return x


def deep_model(n_layers: int = 768) -> dict[str, float]:
    """One prediction, forward and backward."""
    p = scheme("xavier")(Architecture.preset("tgs", n_layers=n_layers))
    inputs = zipf(32_000)
    predict_moments(p, inputs)
    median, spread = timed(lambda: predict_moments(p, inputs), 9)
    floor, _ = timed(lambda: bare_loop(2 * n_layers), 9)
    return {"layers": n_layers, "seconds": median, "spread": spread, "over_bare_loop": median / floor}


def sweep(size: int = 10_000, n_layers: int = 192) -> dict[str, float]:
    """Forward and backward of `size` parametrizations at once (branch multiplier and query/key scale vary)."""
    base = scheme("xavier")(Architecture.preset("tgs", n_layers=n_layers))
    rng = np.random.default_rng(0)
    branch = rng.uniform(0.1, 1.0, (size, 1)) * np.ones(base.n_sublayers)
    query = base.weights["query"] * rng.uniform(0.5, 1.2, (size, 1))
    start = time.process_time()
    items: Parametrization = base.with_columns(branch=branch, weight__query=query)
    built = time.process_time() - start
    inputs = zipf(32_000)
    start = time.process_time()
    profile = predict_moments(items, inputs)
    seconds = time.process_time() - start
    assert profile.forward["stream_out"].variance.shape == (size, base.n_sublayers)
    single, _ = timed(lambda: predict_moments(base, inputs), 3)
    return {
        "parametrizations": size,
        "layers": n_layers,
        "seconds": seconds,
        "seconds_to_build": built,
        "one_by_one_over_sweep": size * single / seconds,
    }


def cold_start(repeats: int = 5) -> dict[str, float]:
    """Wall time of the command in a fresh process, over importing its dependencies alone."""

    def wall(arguments: list[str]) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        return time.perf_counter() - start

    command = ["-m", "signalprop", "predict", "tgs", "--layers", "768"]
    floor = ["-c", "import numpy, pydantic, typer"]
    pairs = [(wall(command), wall(floor)) for _ in range(repeats)]
    return {
        "seconds": statistics.median(a for a, _ in pairs),
        "over_imports": statistics.median(a / b for a, b in pairs),
    }


def main() -> None:
    """Command line of the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    results = {"deep_model": deep_model(), "sweep": sweep(), "cold_start": cold_start()}
    for name, numbers in results.items():
        print(name, ", ".join(f"{key} {value:.4g}" for key, value in numbers.items()))
    if arguments.json:
        write_json(arguments.json, results)


if __name__ == "__main__":
    main()

"""How well predictions agree with random-weight networks on real text, cell by cell: writes docs/accuracy.md.

    python -m benchmarks.accuracy --minutes 60     # simulate what out/accuracy/ lacks, predict anew, write the page
    python -m benchmarks.accuracy --minutes 0      # only predict anew and write the page
    python -m benchmarks.accuracy --minutes 0 --refine 30   # more networks where standard errors are too large

Measured profiles are kept in out/accuracy/ (one file per cell), so that a change of a formula needs no new simulation;
the page's numbers are in docs/accuracy.json. Networks scatter, so a cell draws networks until the standard error of
every quantity is half its target, or until its share of the time is spent; a cell whose standard error stays above half
of the target is marked and does not count.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy_grid import MEASURED, TARGETS, Cell, gradient_target, grid
from benchmarks.accuracy_page import page
from signalprop.files.storage import read_json, write_json, write_text
from signalprop.network.moments import FloatArray
from signalprop.prediction import predict
from signalprop.results.comparison import r_squared, relative_errors, rms, scores
from signalprop.results.profile import POINTS, Profile, average
from signalprop.results.series import Series

STORE = Path("docs/accuracy.json")
PAGE = Path("docs/accuracy.md")
MIN_SEEDS = 3


def summary(predicted: Series, reference: Series, networks: int) -> dict[str, float | None]:
    """Errors and standard errors of one quantity over the sublayers; z by the predicted scatter of so many networks."""
    z = scores(predicted, reference, networks)
    signed, r_signed = relative_errors(predicted, reference)
    errors, r_errors = np.abs(signed), np.abs(r_signed)
    assert reference.variance_se is not None and reference.token_correlation_se is not None
    r_se = reference.token_correlation_se / np.maximum(np.abs(reference.token_correlation), 0.1)
    return {
        "median": float(np.median(errors)),
        "p95": float(np.percentile(errors, 95)),
        "se": float(np.median(reference.variance_se)),
        "r_median": float(np.median(r_errors)),
        "r_p95": float(np.percentile(r_errors, 95)),
        "r_se": float(np.median(r_se)),
        "signed": float(np.mean(signed)),
        "r_signed": float(np.mean(r_signed)),
        "z": rms(z[0]),
        "r_z": rms(z[1]),
        "r_squared": r_squared(predicted.log_variance, reference.log_variance),
    }


def draw(cell: Cell, first_seed: int, seconds: float) -> Profile:
    """Networks from `first_seed` on until the standard errors are half the targets or the time is up: their mean."""
    from signalprop.measurement.simulation import simulate

    a = cell.architecture()
    p, batch = cell.parametrization(a), cell.batch(a)
    started = time.perf_counter()
    profiles: list[Profile] = []
    while True:
        profiles.append(simulate(p, batch=batch, n_seeds=1, seed=first_seed + len(profiles)))
        spent = time.perf_counter() - started
        if len(profiles) >= MIN_SEEDS:
            measured = average(profiles)
            if precise(cell, measured) or spent + spent / len(profiles) > seconds:
                return replace(measured, statistics={"seconds": round(spent, 1)})


def imprecision(cell: Cell, measured: Profile) -> float:
    """The largest standard error over half of its target."""
    forward, gradient = measured.forward["stream_out"], measured.gradient
    assert gradient is not None and forward.variance_se is not None and forward.token_correlation_se is not None
    gradient_se = gradient["stream_in"].variance_se
    assert gradient_se is not None
    r_se = forward.token_correlation_se / np.maximum(np.abs(forward.token_correlation), 0.1)
    goal = TARGETS[cell.group][0] / 2
    ratios = [np.median(forward.variance_se) / goal, np.median(r_se) / goal]
    return float(max(*ratios, np.median(gradient_se) / (gradient_target(cell) / 2)))


def precise(cell: Cell, measured: Profile) -> bool:
    """Whether every standard error is at most half of its target."""
    return imprecision(cell, measured) <= 1


def row_of(cell: Cell, measured: Profile) -> dict[str, Any]:
    """Predict the cell and compare: its row of the store."""
    a = cell.architecture()
    predicted = predict(cell.parametrization(a), cell.batch(a).statistics(a))
    return (
        asdict(cell)
        | measure_row(predicted, measured)
        | {
            "n_seeds": measured.n_seeds,
            "seconds": measured.statistics["seconds"],
            "fidelity": predicted.fidelity,
        }
    )


def measure_row(predicted: Profile, measured: Profile) -> dict[str, Any]:
    """Agreement of one cell, in the form of the store."""
    assert predicted.gradient is not None and measured.gradient is not None
    bottom = measured.gradient["stream_in"].log_variance[0]
    return {
        "forward": summary(predicted.forward["stream_out"], measured.forward["stream_out"], measured.n_seeds or 1),
        "gradient": summary(predicted.gradient["stream_in"], measured.gradient["stream_in"], measured.n_seeds or 1),
        "pool": pool(predicted.gradient["stream_in"].log_variance, measured.gradient["stream_in"].log_variance),
        **first_gradient(predicted.gradient["stream_in"], float(bottom), measured.n_seeds or 1),
        "growth_measured": float(np.exp(bottom)),
        "growth_se": float(measured.gradient["stream_in"].variance_se[0]),  # type: ignore[index]
    }


def first_gradient(predicted: Series, log_measured: float, networks: int) -> dict[str, float | None]:
    """The predicted gradient of the first sublayer, and its z against a measured one."""
    log_predicted, z = float(predicted.log_variance[0]), None
    if predicted.variance_sd is not None and predicted.variance_excess is not None:
        above = log_predicted + float(predicted.variance_excess[0]) - log_measured
        z = above / (float(predicted.variance_sd[0]) / math.sqrt(networks))
    return {"growth_predicted": math.exp(log_predicted), "growth_z": z}


def predicted_again(cell: Cell, row: dict[str, Any]) -> dict[str, Any]:
    """A stored row whose profile is not there any more: its first gradient is predicted anew, its errors are older."""
    a = cell.architecture()
    gradient = predict(cell.parametrization(a), cell.batch(a).statistics(a)).gradient
    assert gradient is not None
    return row | first_gradient(gradient["stream_in"], math.log(row["growth_measured"]), row["n_seeds"])


def pool(predicted: FloatArray, reference: FloatArray) -> dict[str, float]:
    """What a coefficient of determination over many cells needs of one."""
    residual = float(np.sum((predicted - reference) ** 2))
    return {
        "n": len(reference),
        "residual": residual,
        "sum": float(reference.sum()),
        "squares": float(reference @ reference),
    }


def merged(one: Profile, other: Profile) -> Profile:
    """The mean of two means over different networks, with the standard error of the whole."""
    n, m = one.n_seeds or 1, other.n_seeds or 1

    def join(a: Series, b: Series) -> Series:
        assert a.variance_se is not None and b.variance_se is not None
        assert a.token_correlation_se is not None and b.token_correlation_se is not None
        variance = (n * a.variance + m * b.variance) / (n + m)
        spread = np.hypot(n * a.variance_se * a.variance, m * b.variance_se * b.variance) / (n + m)
        return Series.of(
            variance,
            (n * a.token_correlation + m * b.token_correlation) / (n + m),
            variance_se=np.divide(spread, variance, out=np.zeros_like(spread), where=variance > 0),
            token_correlation_se=np.hypot(n * a.token_correlation_se, m * b.token_correlation_se) / (n + m),
        )

    assert one.gradient is not None and other.gradient is not None
    return replace(
        one,
        forward={k: join(one.forward[k], other.forward[k]) for k in POINTS},
        gradient={k: join(one.gradient[k], other.gradient[k]) for k in POINTS},
        n_seeds=n + m,
        statistics={"seconds": one.statistics["seconds"] + other.statistics["seconds"]},
    )


def refine(minutes: float, only: str | None) -> None:
    """Draw more networks for the measured cells that do not count yet, those nearest to counting first."""
    deadline = time.monotonic() + 60 * minutes
    waiting: list[tuple[float, Cell]] = []
    for cell in grid():
        if cell.file.exists() and (only is None or cell.group == only):
            measured = Profile.load(cell.file)
            if not precise(cell, measured):
                # standard errors fall with the root of the time
                waiting.append((measured.statistics["seconds"] * imprecision(cell, measured) ** 2, cell))
    for _, cell in sorted(waiting, key=lambda item: item[0]):
        if time.monotonic() > deadline:
            return
        measured = Profile.load(cell.file)
        while not precise(cell, measured) and time.monotonic() < deadline:
            more = draw(cell, measured.n_seeds or 1, min(60.0, deadline - time.monotonic()))
            measured = merged(measured, more)
            measured.save(cell.file)
        print(f"{cell.name}: now {measured.n_seeds} networks", flush=True)


def run(minutes: float, only: str | None, shallowest: int) -> list[dict[str, Any]]:
    """Simulate for as long as allowed; then predict every cell that has been measured."""
    cells = [cell for cell in grid() if cell.n_layers >= shallowest]
    todo = [cell for cell in cells if not cell.file.exists() and (only is None or cell.group == only)]
    deadline = time.monotonic() + 60 * minutes
    while todo and time.monotonic() < deadline:
        cell = todo.pop(0)
        share = max(15.0, (deadline - time.monotonic()) / (len(todo) + 1))
        measured = draw(cell, 0, share)
        measured.save(cell.file)
        print(f"{cell.name}: {measured.n_seeds} networks, {measured.statistics['seconds']} s", flush=True)
    stored = {Cell(**{k: row[k] for k in Cell.__dataclass_fields__}): row for row in read_json(STORE)["cells"]}
    rows = []
    for cell in grid():
        if cell.file.exists():
            rows.append(row_of(cell, Profile.load(cell.file)))
        elif cell in stored:
            rows.append(predicted_again(cell, stored[cell]))
    write_json(STORE, {"schema": "signalprop/accuracy/1", "cells": rows})
    return rows


def main() -> None:
    """Command line of the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="time for new cells")
    parser.add_argument("--refine", type=float, default=0.0, help="minutes for cells that are not precise enough yet")
    parser.add_argument("--group", choices=list(TARGETS), help="only one group")
    parser.add_argument("--layers-from", type=int, default=1, help="only cells of at least so many layers")
    arguments = parser.parse_args()
    MEASURED.mkdir(parents=True, exist_ok=True)
    refine(arguments.refine, arguments.group)
    rows = run(arguments.minutes, arguments.group, arguments.layers_from)
    write_text(PAGE, page(rows))
    print(f"wrote {PAGE}: {len(rows)} cells")


if __name__ == "__main__":
    main()

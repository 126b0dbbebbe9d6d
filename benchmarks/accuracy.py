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
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from signalprop.data.batches import Batch, load_text, text_batch, word_ids
from signalprop.files.storage import read_json, write_json, write_text
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import IntArray
from signalprop.network.moments import FloatArray
from signalprop.prediction import predict
from signalprop.results.comparison import r_squared, relative_errors, rms, scores
from signalprop.results.profile import POINTS, Profile, average
from signalprop.results.series import Series
from signalprop.schemes import scheme

STORE = Path("docs/accuracy.json")
MEASURED = Path("out/accuracy")
PAGE = Path("docs/accuracy.md")
MIN_SEEDS = 3
LARGE = 6e7  # n_layers * d_model^2 from which only two cells of a size are run, minutes each
LARGEST = 4e8


@dataclass(frozen=True)
class Cell:
    """One network of the grid. `group` names the row of the issue's table that it belongs to."""

    group: str
    preset: str
    n_layers: int
    d_model: int
    placement: str
    scheme: str
    activation: str
    dropout: float
    qk_gain: float = 1.0
    seq_len: int = 128
    batch_size: int = 1

    @property
    def name(self) -> str:
        """All fields, as a file name."""
        return "_".join(str(value) for value in asdict(self).values()).replace("/", "-").replace(" ", "-")

    @property
    def file(self) -> Path:
        """Where the measured profile is kept."""
        return MEASURED / f"{self.name}.json"

    def batch(self, architecture: Architecture) -> Batch:
        """The one real batch that the cell reads."""
        return text_batch(architecture, _ids(architecture.vocab_size), self.batch_size, 0, "sotu")

    def architecture(self) -> Architecture:
        changes: dict[str, Any] = {"n_layers": self.n_layers, "d_model": self.d_model, "seq_len": self.seq_len}
        changes |= {"dropout": self.dropout, "activation": self.activation, "norm_placement": self.placement}
        if self.preset.startswith("llama"):  # grouped heads: four query heads share a key/value head
            changes["n_kv_heads"] = max(1, self.d_model // 64 // 4)
        return Architecture.preset(self.preset, **changes)

    def parametrization(self, architecture: Architecture) -> Any:
        options = {"qk_gain": self.qk_gain} if self.qk_gain != 1 else {}
        return scheme(self.scheme, **options)(architecture)


def grid() -> list[Cell]:
    """The cells, cheap ones first, so that a short run already covers every group."""
    return sorted(_cells(), key=lambda cell: cell.n_layers * cell.d_model**2)


def _cells() -> Iterator[Cell]:
    variants = [("relu", 0.1), ("gelu", 0.1), ("relu", 0.0), ("gelu", 0.0)]
    schemes = ("xavier", "fixed", "deepscalelm", "deepscalelm-simple")
    sizes = [(n, d) for d in (128, 256, 512, 1024, 4096) for n in (1, 2, 12, 48, 192, 768)]
    # 4096 up to 12 layers; 768 layers of width 1024 (10^10 weights) take a quarter of an hour for one network: left out
    sizes = [(n, d) for n, d in sizes if not (d == 4096 and n > 12) and n * d**2 <= LARGEST]
    turn = 0
    for n, d in sorted(sizes, key=lambda size: size[0] * size[1] ** 2):
        for placement in ("pre", "post"):
            for name in schemes:
                activation, p = variants[turn % len(variants)]
                turn += 1
                if n * d**2 <= LARGE or (placement, name) in (("pre", "xavier"), ("post", "deepscalelm")):
                    yield Cell("bidirectional", "tgs", n, d, placement, name, activation, p)
        turn += 1  # the next size pairs schemes with other activations and dropouts
    for n in (12, 48):
        for d in (256, 512):
            for preset, activation in (("gpt2", "gelu_tanh"), ("llama-130m", "silu")):
                for name in ("huggingface", "xavier", "deepscalelm"):
                    yield Cell("causal", preset, n, d, "pre", name, activation, 0.0)
    for n in (24, 192):
        yield Cell("Q/K at twice Xavier", "tgs", n, 256, "pre", "xavier", "relu", 0.1, qk_gain=2.0)


TARGETS = {  # (forward variance and token correlation, gradient variance): median errors
    "bidirectional": (0.02, 0.03),
    "causal": (0.02, 0.07),
    "Q/K at twice Xavier": (0.02, 0.25),
}


def gradient_target(cell: Cell) -> float:
    """Post-norm gradients scatter more, and have a wider target."""
    return 0.06 if cell.group == "bidirectional" and cell.placement == "post" else TARGETS[cell.group][1]


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


@lru_cache(maxsize=4)
def _ids(vocab_size: int) -> IntArray:
    return word_ids(load_text(), vocab_size)


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


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def page(rows: list[dict[str, Any]]) -> str:
    """The Markdown page."""
    lines = [
        "# Measured accuracy of the predictions",
        "",
        "Generated by `python -m benchmarks.accuracy` from `docs/accuracy.json`: do not edit. Each row is one "
        "network shape on one sequence of real text (package `sotu`, 128 tokens), predicted from the exact token "
        "statistics and compared with the mean over random networks (`simulate`, dropout active, gradient of the "
        "true cross-entropy). Errors are in percent: 100 |ln(predicted / measured)| for variances, |difference| "
        "/ max(|r|, 0.1) for correlations; median and 95th percentile over the sublayers; mean errors with their sign, "
        "positive where the prediction is too high. `rms z` is the difference over what so many networks scatter by, "
        "as [predicted](theory/scatter.md): about 1 where nothing but scatter is left. `se` is the median "
        "standard error of the measured mean. **A row counts for a quantity where `se` is at most half of its "
        "target**; others stand in brackets.",
        "",
        *missing(rows),
        "## By depth",
        "",
        "All cells that were simulated anew, whether they count or not; first gradients of all cells.",
        "",
        *by_depth(rows),
        "",
    ]
    for group in TARGETS:
        chosen = [row for row in rows if row["group"] == group]
        fresh = [row for row in chosen if anew(row)]
        if chosen:
            pooled = [*overview(group, fresh), ""] if fresh else []
            lines += [f"## {group[0].upper() + group[1:]}", "", *pooled, *table(group, chosen), ""]
    return "\n".join(lines)


def anew(row: dict[str, Any]) -> bool:
    """Whether a row's errors are those of the present formulas."""
    return "z" in row["forward"]


def missing(rows: list[dict[str, Any]]) -> list[str]:
    """What of the grid was not simulated anew."""
    count = sum(map(anew, rows))
    if count == len(rows):
        return []
    return [
        f"**{count} of {len(rows)} cells, of 12 layers and more, were simulated anew**, in half an hour of a busy "
        "machine: few networks each, so most of these do not count by the rule above, and `rms z` says more than their "
        "errors. Of the others (marked * below, left out of all overviews) the measured first gradient is kept and "
        "predicted anew; their errors are those of older formulas, |predicted - measured| / measured. "
        "`python -m benchmarks.accuracy` simulates the whole grid, in hours.",
        "",
    ]


def overview(group: str, rows: list[dict[str, Any]]) -> list[str]:
    """Pooled medians over the cells that count."""
    lines = [
        "| quantity | target: median | cells that count | median of cells | worst cell | 95th pct, median of cells |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    forward_target = TARGETS[group][0]
    cells = [Cell(**{k: row[k] for k in Cell.__dataclass_fields__}) for row in rows]
    quantities = [
        ("forward variance", "forward", "median", "p95", "se"),
        ("token correlation", "forward", "r_median", "r_p95", "r_se"),
        ("gradient variance", "gradient", "median", "p95", "se"),
    ]
    for name, where, median, p95, se in quantities:
        for placement in sorted({cell.placement for cell in cells}, reverse=True):
            if name == "forward variance" and placement == "post":
                continue  # a norm makes it 1
            chosen = [row for cell, row in zip(cells, rows, strict=True) if cell.placement == placement]
            one = next(cell for cell in cells if cell.placement == placement)
            target = gradient_target(one) if where == "gradient" else forward_target
            counted = [row[where] for row in chosen if row[where][se] <= target / 2]
            line = f"| {name}, {placement}-norm | {percent(target)} | {len(counted)} of {len(chosen)} |"
            if counted:
                medians = [item[median] for item in counted]
                line += f" {percent(float(np.median(medians)))} | {percent(max(medians))} |"
                line += f" {percent(float(np.median([item[p95] for item in counted])))} |"
            lines.append(line if counted else line + " – | – | – |")
    pools = [
        row["pool"] for cell, row in zip(cells, rows, strict=True) if row["gradient"]["se"] <= gradient_target(cell) / 2
    ]
    if pools:
        n, total = sum(p["n"] for p in pools), sum(p["sum"] for p in pools)
        residual = sum(p["residual"] for p in pools)
        spread = sum(p["squares"] for p in pools) - total**2 / n
        within = sum(p["squares"] - p["sum"] ** 2 / p["n"] for p in pools)
        lines.append(
            f"\nThe logarithm of the gradient variance over all sublayers of the {len(pools)} cells that count ({n}"
            f" points together): rms error {math.sqrt(residual / n):.3f}, R² {1 - residual / spread:.4f}, around the"
            f" means of single cells {1 - residual / within:.4f}."
        )
    return lines


def mean_square(values: list[float | None]) -> str:
    """Root mean square of what there is."""
    known = [value for value in values if value is not None]
    return f"{math.sqrt(float(np.mean(np.square(known)))):.2f}" if known else "–"


def by_depth(rows: list[dict[str, Any]]) -> list[str]:
    """Errors of all cells of a depth, with their sign and in units of the predicted scatter; how many cells count."""
    lines = [
        "| layers | norm | quantity | cells | that count | median error | mean error | rms z |", "| --- " * 8 + "|",
    ]  # fmt: skip
    quantities = (
        ("forward variance", "forward", "", "se"),
        ("token correlation", "forward", "r_", "r_se"),
        ("gradient variance", "gradient", "", "se"),
    )
    for depth, placement in sorted({(row["n_layers"], row["placement"]) for row in rows}):
        every = [row for row in rows if (row["n_layers"], row["placement"]) == (depth, placement)]
        logs = np.array([math.log(row["growth_predicted"] / row["growth_measured"]) for row in every])
        lines.append(
            f"| {depth} | {placement} | first gradient | {len(every)} | – | {percent(float(np.median(np.abs(logs))))} |"
            f" {100 * float(np.mean(logs)):+.1f} | {mean_square([row['growth_z'] for row in every])} |"
        )
        chosen = [row for row in every if anew(row)]
        for name, where, prefix, se in quantities:
            if name == "forward variance" and placement == "post":
                continue  # a norm makes it 1
            if not chosen:
                continue
            counted = 0
            for row in chosen:
                cell = Cell(**{k: row[k] for k in Cell.__dataclass_fields__})
                target = gradient_target(cell) if where == "gradient" else TARGETS[cell.group][0]
                counted += row[where][se] <= target / 2
            lines.append(
                f"| {depth} | {placement} | {name} | {len(chosen)} | {counted} |"
                f" {percent(float(np.median([row[where][f'{prefix}median'] for row in chosen])))} |"
                f" {100 * float(np.mean([row[where][f'{prefix}signed'] for row in chosen])):+.1f} |"
                f" {mean_square([row[where][f'{prefix}z'] for row in chosen])} |"
            )
    return lines


def table(group: str, rows: list[dict[str, Any]]) -> list[str]:
    """One line per cell."""
    lines = [
        "| N | d | norm | scheme | activation | p | networks | forward var: median, 95th (se) | r: median, 95th (se) |"
        " gradient var: median, 95th (se) | R² log gradient | gradient first/last: predicted, measured (se) |",
        "| --- " * 12 + "|",
    ]

    def errors(item: dict[str, float], a: str, b: str, se: str, target: float) -> str:
        text = f"{percent(item[a])}, {percent(item[b])} ({percent(item[se])})"
        return text if item[se] <= target / 2 else f"[{text}]"

    for row in sorted(rows, key=lambda r: (r["preset"], r["n_layers"], r["d_model"], r["placement"], r["scheme"])):
        cell = Cell(**{k: row[k] for k in Cell.__dataclass_fields__})
        forward, gradient = row["forward"], row["gradient"]
        r2 = "–" if gradient["r_squared"] is None else f"{gradient['r_squared']:.4f}"
        shape = ("" if cell.preset == "tgs" else f" ({cell.preset})") + " *" * (not anew(row))
        lines.append(
            f"| {cell.n_layers} | {cell.d_model} | {cell.placement} | {cell.scheme}{shape} | {cell.activation} |"
            f" {cell.dropout:g} | {row['n_seeds']} | {errors(forward, 'median', 'p95', 'se', TARGETS[group][0])} |"
            f" {errors(forward, 'r_median', 'r_p95', 'r_se', TARGETS[group][0])} |"
            f" {errors(gradient, 'median', 'p95', 'se', gradient_target(cell))} | {r2} |"
            f" {row['growth_predicted']:.4g}, {row['growth_measured']:.4g} ({percent(row['growth_se'])} %) |"
        )
    return lines


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

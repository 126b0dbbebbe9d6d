"""The best rate of a training over depth and width, by scheme, beside the rate that the first step's change allows.

python -m benchmarks.rate_transfer    # docs/first-steps/rate-predictions.json, before anything is trained
signalprop sweep sweep-transfer       # the trainings; `python -m benchmarks.results sweeps/transfer` stores them

`python -m benchmarks.first_steps --page` writes the section of docs/first-steps.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np

from benchmarks.first_steps import FOLDER
from benchmarks.timing import table
from signalprop.data.batches import default_statistics
from signalprop.files.storage import read_json, write_json
from signalprop.frontier import frontier
from signalprop_lab.training.grid import Grid, Point, load_sweep
from signalprop_lab.training.networks import table_of
from signalprop_lab.training.recipe import architecture_of

PREDICTIONS = FOLDER / "rate-predictions.json"
RESULTS = FOLDER.parent / "results" / "transfer.json"
FITTED = "Xavier"  # the scheme that the one constant of each form is taken from
LEARNT = 0.1  # nats below chance
FACTOR, CLOSE = 2.0, 0.2  # what the claims allow: of a rate, of an exponent
SHARE = 0.8  # of the rates and of the exponents
SHAPE = ("layers", "width")
SMALLEST = (6, 64)
SAME = ("CompleteP", *SMALLEST)  # at its base it is the fitted scheme
FORMS = ("first step", "the same rate")


def shape_of(label: str) -> tuple[int, int]:
    """Layers and width of a cell's label."""
    layers, width = label.split("/")
    return int(layers), int(width)


def predict_all() -> None:
    """Write the rate of every network at which Adam's first step changes its last stream by a tenth."""
    grid: Grid = load_sweep("sweep-transfer")
    cells = []
    for name, cell in grid.cells.items():
        recipe = grid.recipe(Point(name, grid.sweep.tune.values[0] if grid.sweep.tune else None, 0))
        facts = {"vocab_size": recipe.data.tokenizer.vocab_size, "seq_len": recipe.data.seq_len}
        a = architecture_of(recipe, facts)
        made = table_of(recipe.model, a, default_statistics(a))
        found = frontier([made], sequences=recipe.budget.batch_size).cells[0]
        method, label = cell.labels
        cells.append({"method": method, **dict(zip(SHAPE, shape_of(label), strict=True)), "rate": found.rate})
    write_json(PREDICTIONS, {"schema": "signalprop/rate-predictions/1", "change": 0.1, "cells": cells})


@dataclass(frozen=True)
class Measured:
    """A cell of the sweep.

    Attributes:
        predicted: rate of the first step. best: by seed, between rungs. edge: a seed's best rung is the outermost.
        largest: rung at which the mean over seeds is still `LEARNT` below chance; None: none is. open_above: it is the
            last one that was tried.
    """

    method: str
    layers: int
    width: int
    predicted: float
    best: tuple[float, ...]
    edge: bool
    largest: float | None
    open_above: bool

    @property
    def rate(self) -> float:
        """The best one, geometric mean over seeds."""
        return float(np.exp(np.mean(np.log(self.best))))


def between(costs: dict[float, float]) -> tuple[float, bool]:
    """The least cost's rate, by a parabola in the log of the rate through the best rung and its neighbours; whether
    that rung is the outermost. Beside a rung that failed it is the rung itself."""
    rungs = sorted(costs)
    at = min(range(len(rungs)), key=lambda k: costs[rungs[k]])
    if at in (0, len(rungs) - 1):
        return rungs[at], True
    x, y = np.log(rungs[at - 1 : at + 2]), np.array([costs[rate] for rate in rungs[at - 1 : at + 2]])
    if not np.isfinite(y).all():
        return rungs[at], False
    curve, slope, _ = np.polyfit(x - x[1], y, 2)
    return float(np.exp(x[1] - slope / (2 * curve))) if curve > 0 else rungs[at], False


def measured() -> list[Measured]:
    """Every predicted cell that has runs of all seeds at some rates."""
    rows = read_json(RESULTS)["rows"] if RESULTS.is_file() else []
    out = []
    for cell in read_json(PREDICTIONS)["cells"]:
        layers, width = cell["layers"], cell["width"]
        own = [r for r in rows if (r["method"], r["shape"]) == (cell["method"], f"{layers}/{width}")]
        seeds = sorted({r["seed"] for r in own})
        costs: dict[int, dict[float, float]] = {seed: {} for seed in seeds}
        for r in own:
            costs[r["seed"]][r["learning_rate"]] = np.inf if r["score"] is None else r["score"]
        shared = [rate for rate in costs[seeds[0]] if all(rate in costs[s] for s in seeds)] if seeds else []
        if len(shared) < 3:
            continue
        found = [between({rate: costs[seed][rate] for rate in shared}) for seed in seeds]
        chance = own[0]["chance"]
        learnt = [rate for rate in shared if np.mean([costs[s][rate] for s in seeds]) < chance - LEARNT]
        largest = max(learnt, default=None)
        out.append(Measured(cell["method"], layers, width, cell["rate"], tuple(rate for rate, _ in found),
                            any(edge for _, edge in found), largest, largest == max(shared)))  # fmt: skip
    return out


# --- what it comes to -------------------------------------------------------------------------------------------------


def form_rate(form: str, cell: Measured) -> float:
    """What a form says of a cell, up to its constant."""
    return cell.predicted if form == "first step" else 1.0


def ratios(form: str, cells: list[Measured]) -> dict[tuple[str, int, int], float]:
    """Best rate over that of a form, whose constant makes the fitted scheme's 1 in the geometric mean."""
    logs = {(c.method, c.layers, c.width): np.log(c.rate / form_rate(form, c)) for c in cells if not c.edge}
    fitted = [x for key, x in logs.items() if key[0] == FITTED]
    return {key: float(np.exp(x - np.mean(fitted))) for key, x in logs.items()} if fitted else {}


def slope(cells: list[Measured], axis: str, rates: list[float]) -> float:
    """Of the log of the rates over that of the depth or the width."""
    return float(np.polyfit(np.log([getattr(c, axis) for c in cells]), np.log(rates), 1)[0])


def exponents(cells: list[Measured]) -> dict[tuple[str, str], tuple[float, float, float]]:
    """By scheme and axis: the exponent that the first step predicts, the measured one and half the seeds' distance."""
    out = {}
    for method in dict.fromkeys(c.method for c in cells):
        for axis, other, held in (("layers", "width", SMALLEST[1]), ("width", "layers", SMALLEST[0])):
            line = [c for c in cells if c.method == method and getattr(c, other) == held]
            if len(line) > 1 and not any(c.edge for c in line):
                by_seed = [slope(line, axis, [c.best[k] for c in line]) for k in range(len(line[0].best))]
                told = slope(line, axis, [c.predicted for c in line])
                out[method, axis] = (told, float(np.mean(by_seed)), float(np.ptp(by_seed)) / 2)
    return out


INTRODUCTION = """\
## The best rate of a training

Whether the first step says how a learning rate has to be carried over: the best rate of the layers in trainings of 200
steps (embeddings and head have a rate of their own, which is held), four schemes with norms before, two seeds at every
rate; [all losses](results/transfer.md). The best rate is that of a parabola in the log of the rate through a seed's
best rung (a ladder of 1, 3, 10) and its neighbours; geometric mean over seeds. The
[predictions](first-steps/rate-predictions.json), the two forms and the claims were committed before the runs: *first
step* is the rate of `signalprop frontier`, *the same rate* is one for all networks; each with one constant from Xavier.
At its base, 6 layers of width 64, CompleteP is Xavier, to the last digit: that network is not counted as another one.
"""


def section() -> str:
    """The part of docs/first-steps.md about it; empty before anything has been trained."""
    cells = measured()
    if not cells:
        return ""
    slopes = exponents(cells)
    near = sum(abs(real - told) <= CLOSE for told, real, _ in slopes.values())
    still = sum(abs(real) <= CLOSE for _, real, _ in slopes.values())
    rows, shares = [], {}
    for form in FORMS:
        off = [ratio for key, ratio in ratios(form, cells).items() if key[0] != FITTED and key != SAME]
        within = sum(1 / FACTOR < ratio < FACTOR for ratio in off)
        shares[form] = within / len(off) if off else 0.0
        right = near if form == "first step" else still
        rows.append([form, f"{within} of {len(off)}", f"{right} of {len(slopes)}"])
    holds = (shares["first step"] >= SHARE, bool(slopes) and near >= SHARE * len(slopes))
    whole = len(cells) == len(read_json(PREDICTIONS)["cells"])
    words = [("holds" if held else "fails") if whole else "is not decided" for held in holds]
    claim = (
        f"**The claims**: the best rate is within a factor {FACTOR:g} of the first step's in {SHARE:.0%} of the "
        f"networks of other schemes: it **{words[0]}**; exponents of depth and width within {CLOSE} in {SHARE:.0%}: it "
        f"**{words[1]}**."
    )
    if not whole:
        claim += f" Runs are missing: {len(cells)} of {len(read_json(PREDICTIONS)['cells'])} networks have three rates."
    left_out = sum(c.edge for c in cells)
    if left_out:
        claim += f" {left_out} of {len(cells)} networks have their best rate at the end of the ladder and are left out."
    header = ["form", f"other schemes' networks within {FACTOR:g}", f"exponents within {CLOSE}"]
    shown = "![best rates over depth and width, and the predicted ones](first-steps/transfer.svg)"
    return "\n\n".join([INTRODUCTION.strip(), claim, table(header, rows), shown, _exponents(slopes), _by_cell(cells)])


def _exponents(slopes: dict[tuple[str, str], tuple[float, float, float]]) -> str:
    rows = []
    for method in dict.fromkeys(method for method, _ in slopes):
        row = [method]
        for axis in SHAPE:
            told = slopes.get((method, axis))
            row += ["", ""] if told is None else [f"{told[0]:.2f}", f"{told[1]:.2f} ± {told[2]:.2f}"]
        rows.append(row)
    lead = "Exponents of the best rate over depth and width, from the networks below, ± half the seeds' distance:"
    return lead + "\n\n" + table(["scheme", "depth, predicted", "measured", "width, predicted", "measured"], rows)


def _by_cell(cells: list[Measured]) -> str:
    near = ratios("first step", cells)
    rows = []
    for c in cells:
        ratio = near.get((c.method, c.layers, c.width))
        largest = "none" if c.largest is None else f"{'at least ' if c.open_above else ''}{c.largest:g}"
        seeds = ", ".join(f"{rate:.1e}" for rate in c.best)
        best = f"{seeds} (outermost)" if c.edge else seeds
        off = "" if ratio is None else f"{ratio:.2f}" if 1 / FACTOR < ratio < FACTOR else f"**{ratio:.2f}**"
        rows.append([c.method, str(c.layers), str(c.width), f"{c.predicted:.1e}", best, off, largest])
    lead = (
        "The first step's rate (a change of .1), the best rate of each seed, its ratio to the first step's times the\n"
        "constant (bold: not within 2), and the largest rate that was tried and ends .1 nats below chance, which no\n"
        "form claims to predict:"
    )
    header = ["scheme", "layers", "width", "first step", "best rate", "best over predicted", "largest that learns"]
    return lead + "\n\n" + table(header, rows)


def picture() -> None:
    """first-steps/transfer.svg: best rates over depth and width, and (dashed) the first step's from the smallest."""
    cells = [c for c in measured() if not c.edge]
    if not cells:
        return
    plt.rcParams["svg.hashsalt"] = "transfer"
    figure, both = plt.subplots(1, 2, figsize=(9, 4), layout="constrained", sharey=True)
    for k, method in enumerate(dict.fromkeys(c.method for c in cells)):
        for axes, axis, other, held in (
            (both[0], "layers", "width", SMALLEST[1]),
            (both[1], "width", "layers", SMALLEST[0]),
        ):
            line = [c for c in cells if c.method == method and getattr(c, other) == held]
            x, rates = [getattr(c, axis) for c in line], np.array([c.predicted for c in line])
            for seed in range(len(line[0].best)):
                axes.plot(x, [c.best[seed] for c in line], "osx^"[k % 4], color=f"C{k}", fillstyle="none", markersize=5)
            axes.plot(x, [c.rate for c in line], color=f"C{k}", label=method if axis == "layers" else None)
            axes.plot(x, rates / rates[0] * line[0].rate, "--", color=f"C{k}", linewidth=0.9)
    for axes, axis, ticks in ((both[0], "layers", (6, 24)), (both[1], "width", (64, 256))):
        axes.set(xscale="log", yscale="log", xlabel=axis)
        axes.set_xticks(ticks, map(str, ticks))
        axes.minorticks_off()
        axes.set_yticks([1e-3, 3e-3, 1e-2], ["0.001", "0.003", "0.01"])
        axes.set_ylim(1e-3, 2e-2)
    both[0].set_ylabel("best learning rate (dashed: first step's)")
    figure.legend(loc="outside upper center", ncols=4)
    figure.savefig(FOLDER / "transfer.svg", metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    predict_all()

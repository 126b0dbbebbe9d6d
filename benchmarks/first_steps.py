"""docs/first-steps.md: how far the first step moves the function of a fresh network, predicted and measured.

python -m benchmarks.first_steps --predict    # docs/first-steps/predictions.json, before anything is measured
python -m benchmarks.first_steps              # measure the cells that have no row yet, then write the page
python -m benchmarks.first_steps --page       # only write the page
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch

import signalprop as sp
from benchmarks.timing import table
from signalprop.data.batches import Batch, load_text, text_batch, word_ids
from signalprop.files.storage import read_json, write_json, write_text
from signalprop.models.transformer import batch_tensors
from signalprop.theory.first_step import CONSTANTS, step_of

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "first-steps"
PREDICTIONS, ROWS = FOLDER / "predictions.json", FOLDER / "rows.json"

SEQUENCES, LENGTH, VOCABULARY = 12, 32, 256
PAGE = FOLDER.parent / "first-steps.md"
EDGE = "## The early edge"  # a finished record, which stays as it is
KEYS = ("scheme", "layers", "width", "optimizer")
OPTIMIZERS = ("adam", "sgd", "muon")
SEEDS = (10, 11)
SCHEMES = {
    "xavier": "pre", "deepscalelm": "pre", "gpt2": "pre", "lns": "pre", "stable-resnet": "pre", "rezero": "pre",
    "pytorch": "pre", "takase": "pre", "sandwich": "sandwich", "deepnorm": "post", "admin": "post",
    "ds-init": "post",
}  # fmt: skip
# (layers, width) of every scheme, then those of some of them
SHAPES = ((6, 64), (24, 64))
MORE = {"xavier": ((6, 256),), "deepscalelm": ((6, 256),), "deepnorm": ((6, 256), (96, 64)),
        "gpt2": ((6, 256), (96, 64))}  # fmt: skip
SEEN = {
    (name, layers, 64) for name in ("xavier", "gpt2", "deepscalelm", "deepnorm", "rezero", "lns") for layers in (6, 24)
}
RATE = 1e-9  # in double precision: the change is linear in it


def network(layers: int, width: int, norm: str) -> sp.Architecture:
    """The decoder of a cell."""
    return sp.Architecture(
        kind="decoder", n_layers=layers, d_model=width, n_heads=width // 32, d_ff=4 * width, vocab_size=VOCABULARY,
        seq_len=LENGTH, dropout=0.0, norm_placement=norm,
    )  # fmt: skip


def optimizers(model: torch.nn.Module, name: str) -> list[torch.optim.Optimizer]:
    """What moves the sublayers' parameters: matrices by the optimizer, and with Muon the vectors by Adam."""
    inside = {id(x): x for part in model.modules() if hasattr(part, "branch") for x in part.parameters()}
    parameters = list(inside.values())
    if name == "sgd":
        return [torch.optim.SGD(parameters, lr=RATE)]
    matrices = [x for x in parameters if x.ndim == 2 and name == "muon"]
    chosen = {id(x) for x in matrices}
    rest = [x for x in parameters if id(x) not in chosen]
    out: list[torch.optim.Optimizer] = [torch.optim.Adam(rest, lr=RATE, eps=1e-30)] if rest else []
    return out + ([torch.optim.Muon(matrices, lr=RATE, weight_decay=0.0, eps=1e-30)] if matrices else [])


def measured(table: sp.Parametrization, batch: Batch, optimizer: str, seed: int) -> float:
    """Relative change of the last hidden states by one step, per unit of learning rate."""
    model = sp.build(table, seed=seed, dtype=torch.float64)
    values: dict[str, Any] = {k: v for k, v in batch_tensors(batch).items() if v is not None}
    model.eval()
    out = model(**values)
    before = out.hidden.detach().clone()
    out.loss.backward()
    for rule in optimizers(model, optimizer):
        rule.step()
    with torch.no_grad():
        after = model(**values).hidden
    return float((after - before).norm() / before.norm() / RATE)


@cache
def text() -> Any:
    """The embedded text as words of the vocabulary."""
    return word_ids(load_text(), VOCABULARY)


def batch_of(a: sp.Architecture, seed: int, sequences: int = SEQUENCES) -> Batch:
    """Windows of the embedded text."""
    return text_batch(a, text(), sequences, seed)


def cells() -> Iterator[tuple[str, int, int]]:
    """(scheme, layers, width), the quick ones first."""
    found = [(name, *shape) for name in SCHEMES for shape in (*SHAPES, *MORE.get(name, ()))]
    yield from sorted(found, key=lambda cell: cell[1] * cell[2])


def table_of(name: str, layers: int, width: int) -> tuple[sp.Parametrization, sp.InputStatistics]:
    """The table of a cell and the statistics of its text."""
    a = network(layers, width, SCHEMES[name])
    inputs = batch_of(a, 99, 64).statistics(a)
    return sp.scheme(name)(a, inputs), inputs


def predict_all() -> None:
    """Write the predictions, each optimizer's times its constant; `seen`: in the choice of the form."""
    rows: list[dict[str, Any]] = []
    for name, layers, width in cells():
        table, inputs = table_of(name, layers, width)
        profile = sp.predict(table, inputs)
        for optimizer in OPTIMIZERS:
            step = step_of(table, inputs, profile, optimizer, SEQUENCES * LENGTH)
            rows.append({"scheme": name, "layers": layers, "width": width, "optimizer": optimizer,
                         "change": CONSTANTS[optimizer] * step.change,
                         "seen": (name, layers, width) in SEEN})  # fmt: skip
        write_json(
            PREDICTIONS, {"schema": "signalprop/first-step-predictions/1", "constants": CONSTANTS, "cells": rows}
        )


def measure_all() -> None:
    """Measure what has no row yet; each row is written when it ends."""
    rows = read_json(ROWS)["rows"] if ROWS.is_file() else []
    done = {(r["scheme"], r["layers"], r["width"], r["optimizer"], r["seed"]) for r in rows}
    for optimizer in OPTIMIZERS:
        for name, layers, width in cells():
            table, _ = table_of(name, layers, width)
            for seed in SEEDS:
                if (name, layers, width, optimizer, seed) in done:
                    continue
                change = measured(table, batch_of(table.architecture, seed), optimizer, seed)
                rows.append({"scheme": name, "layers": layers, "width": width, "optimizer": optimizer, "seed": seed,
                             "change": change})  # fmt: skip
                write_json(ROWS, {"schema": "signalprop/first-step-rows/1", "rows": rows})


INTRODUCTION = """\
# First steps

Written by `python -m benchmarks.first_steps` from `docs/first-steps/`: do not edit. How far one step moves the
last stream of a fresh network, relative to the stream, per unit of learning rate: predicted from [closed
forms](theory/depth.md#the-first-step-of-training), with one constant for each optimizer ({constants}) taken from
plain Xavier with norms before, and measured in decoders that read {sequences} sequences of {length} words of the
embedded text.
The predictions were committed before the seeds below were run. Cells of six schemes at 6 and 24 layers of width
64 were looked at, with two other seeds, when the formula was chosen; *unseen* leaves them out.

**The claim**: within a factor 1.5 of one constant in 90 % of cells. The verdict that counts is that of *unseen*, which
still holds one cell of the fitted scheme. Two seeds; 96 layers in two schemes only.
"""


def pairs() -> list[dict[str, Any]]:
    """Every predicted cell that has rows, with the geometric mean over its seeds."""
    rows = read_json(ROWS)["rows"] if ROWS.is_file() else []
    out = []
    for cell in read_json(PREDICTIONS)["cells"]:
        logs = [np.log(r["change"]) for r in rows if all(r[k] == cell[k] for k in KEYS)]
        if logs:
            out.append({**cell, "measured": float(np.exp(np.mean(logs))), "seeds": len(logs)})
    return out


def picture(found: list[dict[str, Any]]) -> None:
    """Predicted against measured."""
    plt.rcParams["svg.hashsalt"] = "first steps"
    figure, axes = plt.subplots(figsize=(5.5, 5))
    ends = np.array([0.01, 1e5])
    axes.fill_between(ends, ends / 1.5, ends * 1.5, alpha=0.2, color="gray", label="factor 1.5")
    for name, marker in zip(OPTIMIZERS, "osx", strict=True):
        of = [(c["change"], c["measured"]) for c in found if c["optimizer"] == name]
        axes.plot(*np.array(of).T, marker, label=name, markersize=4) if of else None
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="predicted", ylabel="measured")
    axes.legend()
    figure.savefig(FOLDER / "predicted.svg", metadata={"Date": None}, bbox_inches="tight")


def write_page() -> None:
    """The page and its picture, from the stored predictions and rows."""
    from benchmarks import rate_transfer, recovery, role_shares  # which take their networks from here

    found = pairs()
    constants = ", ".join(f"{name} {value}" for name, value in read_json(PREDICTIONS)["constants"].items())
    parts = [INTRODUCTION.format(constants=constants, sequences=SEQUENCES, length=LENGTH)]
    if not found:
        parts.append("Nothing has been measured yet.")
    else:
        picture(found)
        parts += [
            _summary(found),
            "![predicted against measured](first-steps/predicted.svg)",
            _cells(found),
            _carried(found),
        ]
    parts += [role_shares.section(), rate_transfer.section(), recovery.section()]
    parts += [EDGE + PAGE.read_text(encoding="utf-8").partition(EDGE)[2]]
    rate_transfer.picture()
    recovery.picture()
    write_text(PAGE, "\n\n".join(part.strip() for part in parts if part) + "\n")


def _summary(found: list[dict[str, Any]]) -> str:
    rows = []
    for name in OPTIMIZERS:
        for unseen in (False, True):
            of = [c for c in found if c["optimizer"] == name and not (unseen and c["seen"])]
            off = np.abs(np.log([c["measured"] / c["change"] for c in of]))
            if not len(off):
                continue
            share = np.mean(off < np.log(1.5))
            verdict = "holds" if share >= 0.9 else "fails"
            near = [f"{share:.0%}", f"{np.mean(off < np.log(2)):.0%}"]
            rows.append([name, "unseen" if unseen else "all", str(len(off)), *near,
                         f"{np.exp(np.median(off)):.2f}", f"{np.exp(off.max()):.1f}", verdict])  # fmt: skip
    header = ["optimizer", "cells", "number", "within 1.5", "within 2", "median factor", "largest", "the claim"]
    return table(header, rows)


def _cells(found: list[dict[str, Any]]) -> str:
    shapes = sorted({(c["scheme"], c["layers"], c["width"]) for c in found})
    ratios = {tuple(c[k] for k in KEYS): c["measured"] / c["change"] for c in found}
    rows = []
    for name, layers, width in shapes:
        values = [ratios.get((name, layers, width, optimizer)) for optimizer in OPTIMIZERS]
        shown = ["" if v is None else f"{v:.2f}" if 1 / 1.5 < v < 1.5 else f"**{v:.2f}**" for v in values]
        rows.append([f"`{name}`", SCHEMES[name], str(layers), str(width), *shown])
    lead = "Measured over predicted, geometric mean of two seeds; bold where it is not within 1.5:"
    return lead + "\n\n" + table(["scheme", "norm", "layers", "width", *OPTIMIZERS], rows)


def _carried(found: list[dict[str, Any]]) -> str:
    """How the rate of one and the same change goes with depth and width, by scheme, for Adam."""
    rows = []
    for name in SCHEMES:
        cells = {(c["layers"], c["width"]): c for c in found if (c["scheme"], c["optimizer"]) == (name, "adam")}
        row = [f"`{name}`", SCHEMES[name]]
        for (short, narrow), (deep, wide) in (((6, 64), (24, 64)), ((6, 64), (6, 256))):
            pair = [cells.get(shape) for shape in ((short, narrow), (deep, wide))]
            for what in ("change", "measured"):
                both = [c[what] for c in pair if c is not None]
                row.append(f"{-np.log(both[1] / both[0]) / np.log(4):.2f}" if len(both) == 2 else "")
        rows.append(row)
    lead = (
        "## Carrying a learning rate over\n\n"
        "Exponents of the rate whose first step of Adam makes the same change, over depth (6 to 24 layers) and width\n"
        "(64 to 256), predicted and measured; `signalprop frontier` prints them for any network:"
    )
    return lead + "\n\n" + table(["scheme", "norm", "depth", "measured", "width", "measured"], rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    if given.predict:
        predict_all()
    elif not given.page:
        measure_all()
    write_page()

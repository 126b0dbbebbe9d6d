"""A section of docs/first-steps.md: whose weights move the function in the first step of Adam, predicted and measured.

python -m benchmarks.role_shares --predict    # docs/first-steps/role-predictions.json, before anything is measured
python -m benchmarks.role_shares              # measure, then write the page
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from torch import nn

import signalprop as sp
from benchmarks.first_steps import FOLDER, LENGTH, RATE, SCHEMES, SEQUENCES, batch_of, table_of, write_page
from benchmarks.timing import table
from signalprop.data.batches import Batch
from signalprop.files.storage import read_json, write_json
from signalprop.models.transformer import batch_tensors
from signalprop.theory.first_step import step_of

PREDICTIONS, ROWS = FOLDER / "role-predictions.json", FOLDER / "role-rows.json"
NAMES = ("xavier", "deepscalelm", "gpt2", "lns", "stable-resnet", "takase", "deepnorm", "admin")
DEPTHS, WIDTH, SEEDS = (6, 24), 64, (12, 13)

LEAD = """\
## Whose weights move it

The change when one role's weights alone take Adam's first step, over the sum of these over the roles: predicted,
measured (mean of {seeds} seeds; width {width}; the [predictions](first-steps/role-predictions.json) were
committed before the runs). The {number} shares are off by a factor {median:.2f} (median), {worst:.2f} at most;
{near:.0%} are within 1.25. `signalprop frontier` prints them, and the factors on the roles' learning rates that
would make them even: queries and keys move a fresh network's function least by far."""


def shares(alone: dict[str, float]) -> dict[str, float]:
    """What each role moves alone, over the sum."""
    total = sum(alone.values())
    return {role: moved / total for role, moved in alone.items()}


def predict_all() -> None:
    """Write the predictions."""
    cells = []
    for name in NAMES:
        for layers in DEPTHS:
            made, inputs = table_of(name, layers, WIDTH)
            step = step_of(made, inputs, sp.predict(made, inputs), "adam", SEQUENCES * LENGTH)
            alone = {role: moved for role, moved in step.roles.items() if moved > 0}
            cells.append({"scheme": name, "layers": layers, "shares": shares(alone)})
    write_json(PREDICTIONS, {"schema": "signalprop/role-share-predictions/1", "width": WIDTH, "cells": cells})


def measured(made: sp.Parametrization, batch: Batch, roles: list[str], seed: int) -> dict[str, float]:
    """The relative change of the last hidden states when one role's weights alone take Adam's step."""
    model = sp.build(made, seed=seed, dtype=torch.float64).eval()
    values: dict[str, Any] = {k: v for k, v in batch_tensors(batch).items() if v is not None}
    out = model(**values)
    before = out.hidden.detach()
    out.loss.backward()
    moved = {}
    for role in roles:
        weights = [part.weight for path, part in model.named_modules() if path.endswith(f".{role}")]
        assert weights and all(isinstance(w, nn.Parameter) for w in weights)
        kept = [w.detach().clone() for w in weights]
        torch.optim.Adam(weights, lr=RATE, eps=1e-30).step()
        with torch.no_grad():
            moved[role] = float((model(**values).hidden - before).norm())
            for weight, value in zip(weights, kept, strict=True):
                weight.copy_(value)
    return moved


def measure_all() -> None:
    """Measure every cell; all rows are written at the end."""
    rows = []
    for cell in read_json(PREDICTIONS)["cells"]:
        made, _ = table_of(cell["scheme"], cell["layers"], WIDTH)
        for seed in SEEDS:
            found = shares(measured(made, batch_of(made.architecture, seed), list(cell["shares"]), seed))
            rows.append({"scheme": cell["scheme"], "layers": cell["layers"], "seed": seed, "shares": found})
    write_json(ROWS, {"schema": "signalprop/role-share-rows/1", "rows": rows})


def section() -> str:
    """The section; empty where nothing has been measured."""
    if not ROWS.is_file():
        return ""
    rows, ratios, lines = read_json(ROWS)["rows"], [], []
    for cell in read_json(PREDICTIONS)["cells"]:
        of = [r["shares"] for r in rows if (r["scheme"], r["layers"]) == (cell["scheme"], cell["layers"])]
        row = [f"`{cell['scheme']}`", SCHEMES[cell["scheme"]], str(cell["layers"])]
        for role, share in cell["shares"].items():
            seen = float(np.mean([r[role] for r in of]))
            ratios.append(abs(np.log(seen / share)))
            row.append(f"{share:.1%}, {seen:.1%}")
        lines.append(row)
    off = np.exp(ratios)
    lead = LEAD.format(
        seeds=len(SEEDS), width=WIDTH, number=len(off), median=np.median(off), worst=off.max(), near=np.mean(off < 1.25)
    )
    roles = list(read_json(PREDICTIONS)["cells"][0]["shares"])
    return lead + "\n\n" + table(["scheme", "norm", "layers", *roles], lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--predict", action="store_true")
    if parser.parse_args().predict:
        predict_all()
    else:
        measure_all()
        write_page()

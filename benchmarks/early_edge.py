"""The early edge: the learning rate of the sublayers at which the first steps halve 1 - token correlation.

python -m benchmarks.early_edge --predict    # docs/first-steps/edge-predictions.json, before anything is measured
python -m benchmarks.early_edge              # measure the cells that have no row yet
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import signalprop as sp
from benchmarks.first_steps import FOLDER, LENGTH, SCHEMES, SEQUENCES, batch_of, network
from signalprop.files.storage import read_json, write_json
from signalprop.models.transformer import batch_tensors
from signalprop.network.kinds import ROLE
from signalprop.network.layout import role_mask
from signalprop.theory.first_step import FirstStep, reached, step_of

PREDICTIONS, ROWS = FOLDER / "edge-predictions.json", FOLDER / "edge-rows.json"
STEPS = 8
TRAVEL = (STEPS + 1) / 2  # learning rates that a warm-up of as many steps adds up to
SEEDS = (20, 21)
NETWORKS = [*SCHEMES.items(), ("deepscalelm", "post"), ("xavier", "post")]
SHAPES = ((6, 64), (12, 64), (24, 64), (48, 64))
WIDER = (("xavier", "pre"), ("deepscalelm", "post"), ("deepnorm", "post"), ("gpt2", "pre"))  # 6 layers of width 256
# with seed 0 at 6 and 12 layers these were looked at when the forms were made
SEEN = {("xavier", "pre"), ("gpt2", "pre"), ("deepnorm", "post"), ("deepscalelm", "post"), ("sandwich", "sandwich"),
        ("rezero", "pre"), ("xavier", "post"), ("lns", "pre")}  # fmt: skip
Cell = tuple[str, str, int, int]
KEYS = ("scheme", "norm", "layers", "width")
FINE = 2 ** (1 / 8)  # factor up to which an edge is measured


def cells() -> Iterator[Cell]:
    """(scheme, norm, layers, width), the quick ones first."""
    found = [(*kind, *shape) for kind in NETWORKS for shape in SHAPES] + [(*kind, 6, 256) for kind in WIDER]
    yield from sorted(found, key=lambda cell: cell[2] * cell[3])


def table_of(name: str, norm: str, layers: int, width: int) -> tuple[sp.Parametrization, sp.InputStatistics]:
    """The table of a cell and the statistics of its text."""
    a = network(layers, width, norm)
    inputs = batch_of(a, 99, 64).statistics(a)
    return sp.scheme(name)(a, inputs), inputs


def unlike(hidden: torch.Tensor) -> float:
    """1 - the correlation of two tokens of a sequence, mean over pairs: (sequences, tokens, features)."""
    x = hidden.double()
    n = x.shape[1]
    own = (x**2).sum((1, 2))
    both = (x.sum(1) ** 2).sum(1)
    return float(1 - ((both - own) / (n - 1)).sum() / own.sum())


def after_steps(table: sp.Parametrization, rate: float, seed: int) -> tuple[float, float]:
    """1 - correlation before and after the first steps of the sublayers, embeddings and head held."""
    model = sp.build(table, seed=seed)
    model.eval()
    batches = [batch_of(table.architecture, 1000 * seed + k) for k in range(STEPS + 1)]
    tensors = [{k: v for k, v in batch_tensors(b).items() if v is not None} for b in batches]
    inside = {id(x): x for part in model.modules() if hasattr(part, "branch") for x in part.parameters()}
    rule = torch.optim.Adam(list(inside.values()), lr=rate, betas=(0.9, 0.98))
    with torch.no_grad():
        before = unlike(model(**tensors[-1]).hidden)
    for k, given in enumerate(tensors[:-1]):
        rule.param_groups[0]["lr"] = rate * (k + 1) / STEPS
        rule.zero_grad()
        model(**given).loss.backward()
        rule.step()
    with torch.no_grad():
        after = unlike(model(**tensors[-1]).hidden)
    return before, after


def crossing(halved: Callable[[float], bool], start: float, fine: float = FINE) -> float | None:
    """The smallest rate, from `start` in steps of 2, at which it is halved; then between them to `fine`."""
    rate = start
    if halved(rate):
        while halved(rate / 2):
            rate /= 2
            if rate < start / 1e6:
                return None
        low, high = rate / 2, rate
    else:
        while not halved(rate * 2):
            rate *= 2
            if rate > start * 1e6:
                return None
        low, high = rate, rate * 2
    while high / low > fine * 1.001:
        middle = float(np.sqrt(low * high))
        low, high = (low, middle) if halved(middle) else (middle, high)
    return float(np.sqrt(low * high))


def measured(table: sp.Parametrization, start: float, seed: int) -> float | None:
    """The early edge of one network."""

    def halved(rate: float) -> bool:
        before, after = after_steps(table, rate, seed)
        return not after > before / 2  # or not a number

    return crossing(halved, start)


# --- forms -----------------------------------------------------------------------------------------------


def _step(table: sp.Parametrization, inputs: sp.InputStatistics) -> tuple[FirstStep, sp.Profile]:
    profile = sp.predict(table, inputs, fidelity="moments")
    return step_of(table, inputs, profile, "adam", SEQUENCES * LENGTH), profile


def linear(table: sp.Parametrization, inputs: sp.InputStatistics, factor: float) -> float:
    """Form 1: the change of the last stream, if the same for all tokens, is as large as the stream."""
    return 1 / (factor * TRAVEL * _step(table, inputs)[0].change)


def moved(table: sp.Parametrization, travel: float, profile: sp.Profile | None = None) -> sp.Parametrization:
    """The table with every weight, and every multiplier that is trained, further by `travel`.

    Args:
        profile: makes the updates aligned with what the weights read, as far as tokens share it; None: with nothing.
    """
    a = table.architecture
    columns = {}
    for role in table.weights:
        where, size = role_mask(a, role), np.full(table.n_sublayers, travel)
        if profile is not None:
            point = "branch" if ROLE[role].writes else "stream_in"
            shared = profile.forward[point].token_correlation.clip(0, 1)
            size = travel * np.sqrt(1 + ROLE[role].fan(a)[0] * 2 / np.pi * shared)
        columns[f"weight__{role}"] = np.where(where, np.hypot(table.weights[role], size), table.weights[role])
    if table.branch_trainable != "fixed":
        columns["branch"] = np.hypot(table.branch, travel)
    return table.with_columns(**columns)


def with_common(table: sp.Parametrization, gain: Any, added: Any, coherent: bool = True) -> sp.Parametrization:
    """The table whose branches add something to all tokens alike: biases of their outputs.

    Args:
        gain: of a branch's variance up to the last stream. added: root mean square of what each branch adds, both
            (sublayers,). coherent: it adds up over sublayers as amplitudes, not as squares.
    """
    total = np.cumsum(added * np.sqrt(gain))
    of = np.diff(total**2, prepend=0.0) / np.where(gain > 0, gain, np.inf) if coherent else added**2
    a = table.architecture
    columns = {}
    for role in table.weights:
        where = role_mask(a, role)
        if where.any() and ROLE[role].writes:
            columns[f"bias__{role}"] = np.where(where, np.sqrt(table.biases[role] ** 2 + of), table.biases[role])
    return table.with_columns(**columns)


def carried(
    table: sp.Parametrization, inputs: sp.InputStatistics, factor: float, coherent: bool = True, parts: int = 4
) -> float:
    """Forms 2 to 4: the moments of the network with the updates' common part in it.

    Args:
        parts: in which the steps are taken: updates of each are those of the network as it is by then, its weights
            further along what they read. 1: those of the fresh network.
    """
    fresh = sp.predict(table, inputs, fidelity="moments")
    before = 1 - fresh.forward["stream_out"].token_correlation[-1]

    def halved(rate: float) -> bool:
        there, profile, travel = table, fresh, factor * TRAVEL * rate
        added = np.zeros(table.n_sublayers)
        for k in range(parts):
            step = step_of(there, inputs, profile, "adam", SEQUENCES * LENGTH)
            last = profile.forward["stream_out"].variance[-1] + profile.forward["stream_out"].mean[-1] ** 2
            gain = reached(there, profile)
            added = added + travel / parts * step.aligned * np.sqrt(last / np.where(gain > 0, gain, np.inf))
            at = table if parts == 1 else moved(table, travel * (k + 1) / parts, fresh)
            there = with_common(at, gain, added, coherent)
            profile = sp.predict(there, inputs, fidelity="moments")
            if 1 - profile.forward["stream_out"].token_correlation[-1] < before / 2:
                return True
        return False

    found = crossing(halved, linear(table, inputs, factor), 1.05)
    return float("nan") if found is None else found


FORMS: dict[str, Callable[[sp.Parametrization, sp.InputStatistics, float], float]] = {
    "linear": linear,
    "squares": lambda p, i, f: carried(p, i, f, coherent=False, parts=1),
    "amplitudes": lambda p, i, f: carried(p, i, f, parts=1),
    "amplitudes, step by step": carried,
}


# seed 0 of xavier before norms, 6 and 12 layers of width 64: share of TRAVEL that makes each form right there
FACTORS = {"linear": 0.74, "squares": 3.1, "amplitudes": 0.735, "amplitudes, step by step": 0.735}
MAIN = "amplitudes, step by step"  # the form that the verdict is of


def predict_all() -> None:
    """Write the predictions of every form; null: none."""
    rows = []
    for cell in cells():
        found = {name: form(*table_of(*cell), FACTORS[name]) for name, form in FORMS.items()}
        edges = {name: rate if np.isfinite(rate) else None for name, rate in found.items()}
        seen = cell[:2] in SEEN and cell[2:] in ((6, 64), (12, 64))
        rows.append({**dict(zip(KEYS, cell, strict=True)), "edges": edges, "seen": seen})
    write_json(PREDICTIONS, {"schema": "signalprop/early-edge-predictions/1", "factors": FACTORS, "cells": rows})


def measure_all() -> None:
    """Measure what has no row yet; each row is written when it ends."""
    rows = read_json(ROWS)["rows"] if ROWS.is_file() else []
    done = {(*(r[k] for k in KEYS), r["seed"]) for r in rows}
    for seed in SEEDS:
        for cell in cells():
            if (*cell, seed) in done:
                continue
            table, inputs = table_of(*cell)
            edge = measured(table, linear(table, inputs, 1.0), seed)
            rows.append({**dict(zip(KEYS, cell, strict=True)), "seed": seed, "edge": edge})
            write_json(ROWS, {"schema": "signalprop/early-edge-rows/1", "rows": rows})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--predict", action="store_true")
    if parser.parse_args().predict:
        predict_all()
    else:
        measure_all()

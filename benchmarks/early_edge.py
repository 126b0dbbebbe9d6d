"""The early edge: the learning rate of the sublayers at which the first steps halve 1 - token correlation.

python -m benchmarks.early_edge --predict    # docs/first-steps/edge-predictions.json, before anything is measured
python -m benchmarks.early_edge              # measure the cells that have no row yet
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch

import signalprop as sp
from benchmarks.first_steps import FOLDER, LENGTH, SCHEMES, SEQUENCES, batch_of, network
from benchmarks.timing import table
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


SECTION = """\
## The early edge

The sublayers' learning rate at which {steps} steps of Adam, all of them warm-up, halve 1 - the correlation of two
tokens in the last stream; embeddings and head are held, each step reads other text. It is the smallest such rate, found
by doubling and then halving to {fine:.0%}. Seeds: {seeds}; geometric mean over them. The
[predictions](first-steps/edge-predictions.json) were committed before these runs.

Forms, each with one constant from Xavier before norms (6 and 12 layers, another seed): *linear*: the [first step's
change](theory/depth.md#the-first-step-of-training) is as large as the stream; *squares*, *amplitudes*: the moments of
the network whose branches add what the aligned updates add, to all tokens alike, summed over sublayers as squares or
as amplitudes; *step by step*: the same in four parts, each from the network as it is by then. Two more were tried on
the cells that were seen and dropped, since they changed nothing: updates of the network half way, with its weights
further in no direction, or along what they read. Seen: {seen} cells, with another seed, when the forms were made;
*unseen* leaves out these and all of the fitted scheme.

**The claim**: within a factor 1.5 in 80 % of cells, exponents of depth within .1, by *{main}*.
{verdict}
Far off are ReZero, whose multipliers begin at 0, and plain PyTorch and DeepNorm by a factor of about 2."""


def found() -> list[dict[str, Any]]:
    """Every predicted cell that has rows, with the geometric mean over its seeds."""
    rows = read_json(ROWS)["rows"] if ROWS.is_file() else []
    out = []
    for cell in read_json(PREDICTIONS)["cells"]:
        logs = [np.log(r["edge"]) for r in rows if r["edge"] and all(r[k] == cell[k] for k in KEYS)]
        if logs:
            out.append({**cell, "measured": float(np.exp(np.mean(logs)))})
    return out


def share(of: list[dict[str, Any]], form: str, factor: float) -> float:
    """Share of the cells that a form predicts within a factor; what it cannot predict is outside."""
    ratios = [c["edges"][form] / c["measured"] if c["edges"][form] else np.inf for c in of]
    return float(np.mean(np.abs(np.log(ratios)) < np.log(factor)))


def exponents(known: list[dict[str, Any]], form: str | None) -> dict[tuple[str, str], float]:
    """Slope of log rate over log depth at width 64, of a form (None: measured), where all depths are there."""
    out = {}
    for kind in NETWORKS:
        of = [c for c in known if (c["scheme"], c["norm"]) == kind and c["width"] == 64]
        rates = [c["measured"] if form is None else c["edges"][form] for c in of]
        if len(of) == len(SHAPES) and all(rates):
            out[kind] = float(np.polyfit(np.log([c["layers"] for c in of]), np.log(rates), 1)[0])
    return out


def section() -> str:
    """The part of docs/first-steps.md about it; empty before anything has been measured."""
    known = found()
    unseen = [c for c in known if not c["seen"] and (c["scheme"], c["norm"]) != ("xavier", "pre")]
    if not unseen:
        return ""
    truth, ours = exponents(known, None), exponents(known, MAIN)
    near = sum(abs(truth[kind] - slope) < 0.1 for kind, slope in ours.items())
    within = share(unseen, MAIN, 1.5)
    holds = within >= 0.8 and near == len(ours)
    verdict = (
        f"It **{'holds' if holds else 'fails'}**: {within:.0%} of {len(unseen)} unseen cells are within 1.5, and "
        f"{near} of {len(ours)} exponents within .1."
    )
    rows = [
        [form, *(f"{share(of, form, factor):.0%}" for of in (known, unseen) for factor in (1.5, 2)),
         str(sum(abs(truth[k] - x) < 0.1 for k, x in exponents(known, form).items()))]
        for form in FORMS
    ]  # fmt: skip
    header = ["form", "all, within 1.5", "within 2", "unseen, within 1.5", "within 2", "exponents within .1"]
    lead = SECTION.format(
        steps=STEPS, fine=FINE - 1, seeds=_seeds(), main=MAIN,
        seen=sum(c["seen"] for c in known), verdict=verdict,
    )  # fmt: skip
    shown = "![measured edge against the predicted one](first-steps/edge.svg)"
    return "\n\n".join([lead, table(header, rows), shown, _by_cell(known, truth, ours)])


def picture() -> None:
    """first-steps/edge.svg: measured against predicted, a line through the depths of every network of width 64."""
    known = found()
    plt.rcParams["svg.hashsalt"] = "early edge"
    figure, axes = plt.subplots(figsize=(7, 5), layout="constrained")
    ends = np.array([1e-6, 0.3])
    axes.fill_between(ends, ends / 1.5, ends * 1.5, alpha=0.2, color="gray", label="factor 1.5")
    for k, kind in enumerate(NETWORKS):
        of = [c for c in known if (c["scheme"], c["norm"]) == kind and c["width"] == 64 and c["edges"][MAIN]]
        line = [[c["edges"][MAIN] for c in of], [c["measured"] for c in of]]
        axes.plot(*line, "-" + "osx^"[k % 4], label=", ".join(kind), markersize=4, linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="predicted rate", ylabel="measured rate")
    figure.legend(loc="outside right center", fontsize="small")
    figure.savefig(FOLDER / "edge.svg", metadata={"Date": None})
    plt.close(figure)


def _seeds() -> str:
    rows = read_json(ROWS)["rows"]
    counts = {seed: sum(r["seed"] == seed for r in rows) for seed in SEEDS}
    return ", ".join(f"{seed} ({n} of {len([*cells()])} cells)" for seed, n in counts.items())


def _by_cell(known: list[dict[str, Any]], truth: Any, ours: Any) -> str:
    rows = []
    for kind in NETWORKS:
        of = {(c["layers"], c["width"]): c for c in known if (c["scheme"], c["norm"]) == kind}
        row = [f"`{kind[0]}`", kind[1]]
        for shape in (*SHAPES, (6, 256)):
            cell = of.get(shape)
            edge = cell and cell["edges"][MAIN]
            ratio = edge / cell["measured"] if cell and edge else None
            near = ratio is not None and 1 / 1.5 < ratio < 1.5
            bold = "" if near else "**"
            row.append("" if cell is None or ratio is None else f"{cell['measured']:.1e}, {bold}{ratio:.2f}{bold}")
        row += [f"{truth[kind]:.2f}" if kind in truth else "", f"{ours[kind]:.2f}" if kind in ours else ""]
        rows.append(row)
    lead = "Measured edge, and predicted over measured (bold where it is not within 1.5); exponents of depth:"
    header = ["scheme", "norm", *(f"{n} layers" for n, _ in SHAPES), "6, width 256", "exponent", "predicted"]
    return lead + "\n\n" + table(header, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--predict", action="store_true")
    if parser.parse_args().predict:
        predict_all()
    else:
        measure_all()

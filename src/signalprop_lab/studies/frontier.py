"""How large a step of training may be, by scheme, depth and width: the first step's change and the rate it allows.

The change is in closed form (`first_step.py`) times one constant for each optimizer, taken from plain Xavier networks;
`records/first-steps.md` holds it against real steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np

from signalprop.data.batches import default_statistics
from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.network.inputs import InputStatistics
from signalprop.network.parametrization import Parametrization
from signalprop.prediction import predict
from signalprop.results.text import number, text_table
from signalprop_lab.studies.first_step import CONSTANTS, TESTED, StepOptimizer, step_of

SCHEMA = "signalprop/frontier/1"
FAMILIES = (
    "models of real families move less: Adam's step was .58 to .80 of the prediction in 7 of 7 families, SGD's .09 of "
    "it on preset gpt2, so the rate is too small there"
)


@dataclass(frozen=True)
class Cell:
    """One network.

    Attributes:
        change: of the last stream by the first step, relative to the stream, per unit of learning rate.
        rate: the learning rate at which that is the change asked for.
        shares: the change if one role's weights alone took the step, over the sum of these over the roles;
            of Adam alone, which is the optimizer that they were measured for.
    """

    scheme: str
    norm: str
    layers: int
    width: int
    change: float
    rate: float
    shares: Mapping[str, float]

    @property
    def even_rates(self) -> dict[str, float]:
        """Factors on the roles' learning rates, of geometric mean 1, with which all would have the same share."""
        if not self.shares:
            return {}
        logs = {role: math.log(share) for role, share in self.shares.items()}
        middle = sum(logs.values()) / len(logs)
        return {role: math.exp(middle - log) for role, log in logs.items()}


@dataclass(frozen=True)
class Exponents:
    """The rate of one scheme goes like layers^depth width^width; None where there is one depth, one width."""

    scheme: str
    norm: str
    depth: float | None
    width: float | None


@dataclass(frozen=True)
class Frontier:
    """What `frontier` found. `change`: the relative change that `rate` of every cell makes; `tokens`: in a batch."""

    optimizer: str
    change: float
    tokens: int
    cells: tuple[Cell, ...]

    @property
    def exponents(self) -> tuple[Exponents, ...]:
        """How the rate of each scheme goes with depth and width, by least squares over its cells."""
        kinds = dict.fromkeys((c.scheme, c.norm) for c in self.cells)
        return tuple(_exponents([c for c in self.cells if (c.scheme, c.norm) == kind]) for kind in kinds)

    @property
    def notes(self) -> tuple[str, ...]:
        """How far the numbers can be off."""
        return (
            f"tested: {TESTED[self.optimizer]} (records/first-steps.md)",
            *((FAMILIES,) if self.optimizer in ("adam", "sgd") else ()),
            "one step of the sublayers from fresh weights, embeddings and head held, no momentum, linear in the rate; "
            "training with warm-up goes on learning far above this rate in many pre-norm networks",
        )

    def table(self) -> str:
        """A row for every network, then how the rate goes with depth and width and whose weights move, as text."""
        header = ["scheme", "norm", "layers", "width", "change per unit rate", f"rate for {self.change:g}"]
        rows = [[c.scheme, c.norm, str(c.layers), str(c.width), number(c.change), number(c.rate)] for c in self.cells]
        lines = [text_table(header, rows)]
        for e in self.exponents:
            powers = [(name, power) for name, power in (("layers", e.depth), ("width", e.width)) if power is not None]
            if powers:
                goes = " x ".join(f"{name}^{power:.2f}" for name, power in powers)
                lines.append(f"{e.scheme}, {e.norm}: rate ~ {goes}")
        return "\n".join([*lines, *self._role_table()])

    def _role_table(self) -> list[str]:
        """Whose weights move the last network of each scheme, and the rates that would make roles even."""
        last = {(c.scheme, c.norm): c for c in self.cells if c.shares}.values()
        roles = list(dict.fromkeys(role for c in last for role in c.shares))
        rows = []
        for c in last:
            name = [c.scheme, c.norm, str(c.layers)]
            rows.append([*name, "moves", *(f"{c.shares[role]:.1%}" if role in c.shares else "" for role in roles)])
            even = c.even_rates
            rows.append([*name, "even at rate x", *(f"{even[role]:.3g}" if role in even else "" for role in roles)])
        return ["", text_table(["scheme", "norm", "layers", "", *roles], rows)] if rows else []

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return {
            "schema": SCHEMA, "optimizer": self.optimizer, "change": self.change, "tokens": self.tokens,
            "cells": [asdict(c) for c in self.cells], "exponents": [asdict(e) for e in self.exponents],
            "notes": list(self.notes),
        }  # fmt: skip


@typed
def frontier(
    tables: Sequence[Parametrization],
    optimizer: StepOptimizer = "adam",
    change: float = 0.1,
    sequences: int = 8,
    inputs: InputStatistics | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Frontier:
    """The change by the first step of every network, and the learning rate at which it is `change`.

    Args:
        tables: of encoders or decoders with a head, not sweeps. optimizer: as `step_of`. change: of the last stream,
            root mean square, relative to the stream. sequences: in a batch. inputs: statistics of what is read
            (default: Zipf's law). progress: called with the networks that are done, and all of them.

    Raises:
        InputError: a change that is not positive, a batch of none, an encoder-decoder, a network without a head, or as
            `step_of`.
    """
    if not 0 < change < math.inf:
        raise InputError(f"change is {change}; expected a positive number, e.g. 0.1")
    if sequences < 1:
        raise InputError(f"a batch of {sequences} sequences; expected at least 1")
    if optimizer not in CONSTANTS:
        raise InputError(f"unknown optimizer {optimizer!r:.40}; choose {', '.join(get_args(StepOptimizer))}")
    for p in tables:
        if p.architecture.kind == "encoder-decoder" or p.architecture.head == "none":
            kind = "an encoder-decoder" if p.architecture.head != "none" else "a network without a head"
            raise InputError(f"{kind} has no predicted first step; give an encoder or a decoder with a head")
    cells = []
    for done, p in enumerate(tables, start=1):
        cells.append(_cell(p, inputs or default_statistics(p.architecture), optimizer, change, sequences))
        if progress is not None:
            progress(done, len(tables))
    return Frontier(optimizer, change, sequences * max(p.architecture.seq_len for p in tables), tuple(cells))


def _cell(p: Parametrization, inputs: InputStatistics, optimizer: StepOptimizer, change: float, sequences: int) -> Cell:
    a = p.architecture
    step = step_of(p, inputs, predict(p, inputs), optimizer, sequences * a.seq_len)
    size = CONSTANTS[optimizer] * step.change
    if not 0 < size < math.inf:
        raise InputError(f"the first step of {p.scheme} with {a.n_layers} layers changes nothing that is predicted")
    placement = a.norm_placement if isinstance(a.norm_placement, str) else "mixed"
    alone = {role: moved for role, moved in step.roles.items() if moved > 0 and optimizer == "adam"}
    shares = {role: moved / sum(alone.values()) for role, moved in alone.items()}
    return Cell(p.scheme, placement, a.n_layers, a.d_model, size, change / size, shares)


def _exponents(cells: Sequence[Cell]) -> Exponents:
    """Least squares of log rate on log depth and log width, as far as they vary."""
    columns = [np.log([c.layers for c in cells]), np.log([c.width for c in cells])]
    varying = [k for k, column in enumerate(columns) if np.ptp(column) > 0]
    design = np.stack([np.ones(len(cells)), *(columns[k] for k in varying)], axis=1)
    found = np.linalg.lstsq(design, np.log([c.rate for c in cells]))[0]
    powers = {k: float(found[1 + at]) for at, k in enumerate(varying)}
    return Exponents(cells[0].scheme, cells[0].norm, powers.get(0), powers.get(1))

"""The coordinate check: how much a few steps of training change every probe, against the width.

Where hyperparameters of a narrow network are right for a wide one, what a step does to the signal does not depend on
the width (Yang et al. 2022, arXiv:2203.03466, appendix D.1). So the slope of log change over log width should be 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from signalprop.attachment.anatomy import Anatomy, attach
from signalprop.attachment.mapping import describe
from signalprop.data.batches import Batch, default_batch, shortened
from signalprop.diagnosis.layers import groups
from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.hooks import Hooks, loss_and_logits
from signalprop.measurement.losses import loss_of
from signalprop.measurement.measuring import arguments_of
from signalprop.measurement.passes import output_of
from signalprop.models import build
from signalprop.models.transformer import Transformer
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.repair.groups import parameter_groups
from signalprop.results.text import number

Optimizer = Literal["adamw", "muon", "sgd"]
RATES = {"adamw": 1e-3, "muon": 0.02, "sgd": 0.1}
_LONGEST = 64  # tokens of a default batch
_SLOPE = 0.25  # and two standard errors: what a slope further from 0 than that is outside
_REST = 1e-3  # AdamW's learning rate beside Muon
Steppers = list[torch.optim.Optimizer]


@dataclass(frozen=True)
class Coordinate:
    """One probe.

    Attributes:
        name: `layer 0 attention` (what its branch adds), `stream after layer 0` or `logits`.
        change: root mean square of its change, mean over seeds, by width.
        slope, error: of log change over log width, with its standard error.
    """

    name: str
    change: tuple[float, ...]
    slope: float
    error: float


@dataclass(frozen=True)
class Coordinates:
    """What `coordinates` found; printed, a row for every probe and the verdict."""

    scheme: str
    optimizer: str
    lr: float
    steps: int
    seeds: int
    widths: tuple[int, ...]
    probes: tuple[Coordinate, ...]

    @property
    def outside(self) -> tuple[Coordinate, ...]:
        """The probes whose change depends on the width: slopes of more than 0.25 and two standard errors."""
        return tuple(c for c in self.probes if abs(c.slope) > _SLOPE + 2 * c.error)

    @property
    def ok(self) -> bool:
        """Whether none does."""
        return not self.outside

    def summary(self) -> str:
        """The verdict in one line."""
        given = f"{self.scheme}, {self.optimizer}, {self.steps} steps"
        if self.ok:
            return f"{given}: no slope is more than {_SLOPE:g} and two standard errors from 0"
        worst = max(self.outside, key=lambda c: abs(c.slope))
        return (
            f"{given}: {len(self.outside)} of {len(self.probes)} slopes are more than {_SLOPE:g} and two "
            f"standard errors from 0, most that of {worst.name}: {worst.slope:.2f} ± {worst.error:.2f}"
        )

    def __str__(self) -> str:
        out = set(self.outside)
        lines = [f"{'probe':<28}" + "".join(f"{f'd {w}':>11}" for w in self.widths) + f"{'slope':>9}{'error':>8}"]
        for c in self.probes:
            changes = "".join(f"{number(v):>11}" for v in c.change)
            lines.append(f"{c.name:<28}{changes}{c.slope:>9.2f}{c.error:>8.2f}" + ("  outside" if c in out else ""))
        return "\n".join([*lines, self.summary()])


@typed
def coordinates(
    tables: Sequence[Parametrization],
    *,
    optimizer: Optimizer = "adamw",
    lr: float | None = None,
    steps: int = 4,
    seeds: int = 2,
    batch: Batch | None = None,
) -> Coordinates:
    """Build networks of several widths, train each for a few steps on one batch, and fit the changes' slopes.

    Training is without dropout, with the groups of `parameter_groups`. What is compared is a probe's value on the
    batch before the first step and after the last.

    Args:
        tables: one per width, of one scheme and depth. optimizer: adamw; muon (AdamW for vectors and ends, at a
            learning rate of 1e-3); sgd. lr: default 1e-3, 0.02 and 0.1.
        steps: of training. seeds: networks per width.
        batch: what is trained on; default: 4 sequences of the embedded text, of 64 tokens at most.

    Raises:
        InputError: an unknown optimizer, fewer than two widths or three networks, tables of several depths, numbers out
            of range, no loss, or a training that is not finite.
    """
    if optimizer not in RATES:
        raise InputError(f"optimizer is {optimizer!r:.40}; expected one of {', '.join(RATES)}")
    widths = tuple(p.architecture.d_model for p in tables)
    if len(set(widths)) < 2 or len(set(widths)) != len(widths) or len(widths) * seeds < 3:
        raise InputError(f"widths are {list(widths)} with {seeds} seeds; expected two or more, and three networks")
    rate = RATES[optimizer] if lr is None else lr
    if steps < 1 or seeds < 1 or not 0 < rate < math.inf:
        raise InputError(f"steps are {steps}, lr {rate:g}; expected positive ones")
    if len({p.n_sublayers for p in tables}) > 1 or tables[0].architecture.head == "none":
        raise InputError("the check needs tables of one depth, and a head, whose loss is trained")
    if batch is None:
        batch = default_batch(shortened(tables[0].architecture, _LONGEST))
    found = [[_changes(p, batch, optimizer, rate, steps, seed) for seed in range(seeds)] for p in tables]
    probes = []
    for name in found[0][0]:
        changes = np.array([[row[name] for row in rows] for rows in found])
        if not np.isfinite(changes).all():
            raise InputError(f"{name} is not finite after {steps} steps at learning rate {rate:g}; give a smaller lr=")
        if (changes > 0).all():
            slope, error = _slope(np.log(np.repeat(widths, seeds)), np.log(changes).ravel())
            probes.append(Coordinate(name, tuple(changes.mean(1).tolist()), slope, error))
    return Coordinates(tables[0].scheme, optimizer, rate, steps, seeds, widths, tuple(probes))


def _changes(
    p: Parametrization, batch: Batch, optimizer: Optimizer, lr: float, steps: int, seed: int
) -> dict[str, float]:
    """Root mean square of the change of every probe of one network."""
    model = build(p, seed=seed).eval()
    attached = attach(model)
    arguments = arguments_of(attached, batch)
    before = _probes(attached, arguments)
    steppers = _steppers(model, optimizer, lr)
    for _ in range(steps):
        model.zero_grad()
        loss_of(output_of(model, arguments), batch, None).backward()  # type: ignore[no-untyped-call]
        for stepper in steppers:
            stepper.step()
    after = _probes(attached, arguments)
    return {name: float((after[name] - x).double().square().mean().sqrt()) for name, x in before.items()}


def _steppers(model: Transformer, optimizer: Optimizer, lr: float) -> Steppers:
    if optimizer == "muon":
        found = parameter_groups(model, lr=lr, optimizer="muon", rest_lr=_REST)
        inner, rest = ([g for g in found if g["use_muon"] is wanted] for wanted in (True, False))
        return [torch.optim.Muon(inner, weight_decay=0.0), torch.optim.AdamW(rest)]
    found = parameter_groups(model, lr=lr, optimizer=optimizer)
    return [torch.optim.SGD(found) if optimizer == "sgd" else torch.optim.AdamW(found)]


def _probes(attached: Anatomy, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Every branch, the stream after every layer, and the logits, of one pass."""
    seen: dict[int, Tensor] = {}

    def see(index: int, x: Tensor | None) -> None:
        if x is not None:
            seen[index] = x.detach().clone()

    hooks = Hooks()
    hooks.sites(attached.plan.sites, see)
    with hooks, torch.no_grad():
        output = output_of(attached.model, arguments)
    plan, rows = attached.plan, attached.layout
    out = {describe(rows, i): seen[site] for i, site in enumerate(plan.branch) if site in seen}
    for k, group in enumerate(groups(rows)):
        out[f"stream after layer {k}"] = seen[plan.stream_out[group[-1]]]
    return out | {"logits": loss_and_logits(output)[1].detach()}


def _slope(x: FloatArray, y: FloatArray) -> tuple[float, float]:
    """Slope of a straight line and its standard error, by least squares."""
    dx = x - x.mean()
    slope = float(dx @ y / (dx @ dx))
    rest = y - y.mean() - slope * dx
    return slope, float(math.sqrt(rest @ rest / max(1, len(x) - 2) / (dx @ dx)))

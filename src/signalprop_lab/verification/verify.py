"""Every component formula against simulation: the engine of `signalprop verify`.

Each component is simulated with random weights on inputs x_kj = μ + σ(√r ε_j + √(1-r) δ_kj), as are gradients, in the
ranges of Table 21 of Transformers Get Stable (arXiv v1; it leaves the score variance open: 0.01 to 1 here, which
contains Xavier's 1). The result is the distribution of the errors over configurations, beside the papers' Table 20.

Simulated means are adjusted by control variates: quantities such as |W_Vᵀε|² whose expectation is known exactly, so
that fewer samples are needed. This changes the noise of an average, not what it converges to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from signalprop.errors import require, unknown
from signalprop.network.moments import FloatArray, Moments
from signalprop_lab.verification.attention import ATTENTION
from signalprop_lab.verification.components import ALL, ELEMENTARY, LAYOUT, Case, Component
from signalprop_lab.verification.ends import ENDS
from signalprop_lab.verification.sublayers import SUBLAYERS

COMPONENTS: dict[str, Component] = {**ELEMENTARY, **ATTENTION, **SUBLAYERS, **ENDS}
ROUNDING = 0.05  # Table 20 prints one digit after the point
# 50th, 90th and 99th percentile of |N(0, 1)|: what a formula without error shows, in standard errors of the simulation.
NOISE = (0.674, 1.645, 2.576)

_SMALLEST = 0.05  # standard error in % below which a configuration counts no more than others in a bias

# Table 20 of v1: 50th, 90th and 99th percentile of the error in %, in the order of ALL.
PAPER_TABLE_20: dict[str, tuple[tuple[float, float, float] | None, ...]] = {
    "linear": ((0.0, 0.4, 1.3), (0.4, 1.4, 2.8), (0.4, 1.4, 2.8), (0.2, 1.0, 2.2), (0.2, 1.0, 2.2)),
    "relu": ((0.3, 1.3, 2.3), (0.5, 1.9, 3.4), (0.3, 1.6, 3.1), (0.6, 1.5, 2.6), (0.2, 1.1, 2.3)),
    "gelu": ((0.1, 1.0, 2.4), (0.2, 0.6, 1.3), (0.1, 0.5, 1.2), (0.2, 0.6, 1.1), (0.1, 0.4, 0.9)),
    "layer norm": ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.1, 0.5, 1.0), (0.4, 1.5, 3.2), (0.2, 0.9, 2.2)),
    "dropout": ((0.0, 0.1, 0.5), (0.1, 0.5, 1.5), (0.0, 0.4, 1.3), (0.1, 0.7, 1.5), (0.1, 0.5, 1.2)),
    "softmax": ((0.0, 0.0, 0.0), (0.2, 0.9, 4.0), None, (0.1, 0.6, 4.5), None),
    "attention": ((0.2, 1.0, 2.5), (1.4, 4.1, 7.8), (1.3, 3.9, 7.4), (2.2, 13.3, 44.5), (1.6, 4.5, 8.2)),
}


@dataclass(frozen=True)
class Row:
    """One cell of Table 20: the error of one quantity of one component over all configurations, in %.

    Attributes:
        component, quantity: as in Table 20; `paper` is None where the table has no such cell.
        percentiles: 50th, 90th and 99th percentile of |formula - simulation| / |simulation|. Covariances are relative
            to max(|covariance|, variance/10), means to max(|mean|, std/10), or to the std where the formula says 0.
        standard_error: median over configurations of the simulation's standard error, in the same unit: a formula
            without error would show percentiles of about 0.7, 1.6 and 2.6 times it.
        bias, bias_error: error with its sign, averaged over configurations by precision, and its standard error.
        exact: what the bias of a right formula may be.
        configurations: how many there were.
        worst: the configuration of the largest error.
    """

    component: str
    quantity: str
    percentiles: tuple[float, float, float]
    standard_error: float
    bias: float
    bias_error: float
    exact: float
    configurations: int
    paper: tuple[float, float, float] | None
    worst: Case

    @property
    def standing(self) -> Literal["", "wrong", "worse", "noise"]:
        """`wrong` where the formula is off on average by more than it may be, noise apart (three standard errors).

        Else nothing where no percentile is above the papers'; `worse`, or `noise` where the simulation explains it. It
        does up to twice what it would show of a formula without error.
        """
        if abs(self.bias) > self.exact + 3 * self.bias_error:
            return "wrong"
        if self.paper is None:
            return ""
        triples = zip(self.percentiles, self.paper, NOISE, strict=True)
        above = [own > 2 * noise * self.standard_error for own, theirs, noise in triples if own > max(theirs, ROUNDING)]
        return "worse" if any(above) else "noise" if above else ""


@dataclass(frozen=True)
class VerificationReport:
    """All rows, with what produced them."""

    rows: tuple[Row, ...]
    effort: str
    seed: int

    def as_json(self) -> dict[str, Any]:
        """A plain dictionary (schema signalprop/verification/1)."""
        return {"schema": "signalprop/verification/1", **asdict(self)}


class Effort(NamedTuple):
    """How much to simulate: configurations and samples of each, for components and for those with attention.

    `scores` bounds the attention scores that one configuration computes, and with them its samples (at least 8 are
    drawn, so the longest sequences exceed it); `longest` bounds the sequence length.
    """

    configurations: int
    samples: int
    attention_configurations: int
    attention_samples: int
    scores: float
    longest: int


EFFORTS = {
    "quick": Effort(8, 48, 6, 64, 2e7, 1000),
    "default": Effort(20, 80, 16, 96, 5e7, 10_000),
    "thorough": Effort(60, 192, 110, 256, 2e8, 10_000),
}


def verify(
    names: Iterable[str] | None = None,
    *,
    effort: str = "default",
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> VerificationReport:
    """Simulate components over the papers' ranges and compare with the formulas.

    Args:
        names: which of COMPONENTS; all of them unless given.
        effort: "quick" (some 4 minutes on two cores), "default" (a quarter of an hour) or "thorough" (hours).
        seed: the same seed gives the same configurations and samples on the same machine.
        progress: called with one line per component.
    """
    require("torch", "models")
    chosen = list(COMPONENTS if names is None else names)
    for name in chosen:
        if name not in COMPONENTS:
            raise unknown("component", name, COMPONENTS)
    if effort not in EFFORTS:
        raise unknown("effort", effort, EFFORTS)
    rows: list[Row] = []
    for name in chosen:
        found = judged(name, simulated(name, EFFORTS[effort], seed))
        rows.extend(found)
        if progress:
            progress(f"{name}: " + ", ".join(f"{row.quantity} {row.percentiles[0]:.1f} %" for row in found))
    return VerificationReport(tuple(rows), effort, seed)


# --- the engine ----------------------------------------------------------------------------------------------------


class Simulated(NamedTuple):
    """One configuration of a component, its simulated quantities and their standard errors."""

    case: Case
    mean: FloatArray
    jackknife: FloatArray


def simulated(name: str, effort: Effort, seed: int) -> list[Simulated]:
    """A component's configurations and what sampling says of them; no formula is asked."""
    component = COMPONENTS[name]
    index = list(COMPONENTS).index(name)
    rng = np.random.default_rng([seed, index])
    is_attention = name in ATTENTION
    count = effort.attention_configurations if is_attention else effort.configurations
    cases: list[Case] = []
    while len(cases) < count:
        case = component.draw(rng)
        if case.get("length", 0) <= effort.longest:
            cases.append(case)

    def run(number: int) -> Simulated:
        case, samples = cases[number], effort.samples
        if is_attention:
            affordable = effort.scores / (case["length"] * case.get("queries", case["length"]))
            samples = int(np.clip(affordable, 8, effort.attention_samples))
        own_seed = int(np.random.SeedSequence([seed, index, number]).generate_state(1)[0])
        return Simulated(case, *_simulate(component, case, own_seed, samples))

    return _in_parallel(run, count)


def judged(name: str, found: list[Simulated]) -> list[Row]:
    """What the formulas say of the same configurations, quantity by quantity."""
    component = COMPONENTS[name]
    predicted = [_flatten(component.predict(one.case)) for one in found]
    scales = [_scale(one.mean, formula) for one, formula in zip(found, predicted, strict=True)]
    signed = np.array([100.0 * (f - one.mean) / s for f, one, s in zip(predicted, found, scales, strict=True)])
    standard_errors = np.array([100.0 * one.jackknife / s for one, s in zip(found, scales, strict=True)])
    errors, precision = np.abs(signed), np.maximum(standard_errors, _SMALLEST) ** -2.0
    bias, bias_error = (precision * signed).sum(0) / precision.sum(0), precision.sum(0) ** -0.5
    table = np.percentile(errors, [50, 90, 99], axis=0)
    typical = np.median(standard_errors, axis=0)
    worst = np.argmax(errors, axis=0)
    paper = dict(zip(ALL, PAPER_TABLE_20.get(name, (None,) * 5), strict=True))
    return [
        Row(
            name,
            quantity,
            (float(table[0, i]), float(table[1, i]), float(table[2, i])),
            float(typical[i]),
            float(bias[i]),
            float(bias_error[i]),
            component.exact,
            len(found),
            paper.get(quantity),
            found[int(worst[i])].case,
        )
        for i, quantity in enumerate(LAYOUT[: table.shape[1]])
        if quantity in component.quantities
    ]


def _in_parallel(run: Callable[[int], Simulated], count: int) -> list[Simulated]:
    """Configurations side by side, one thread each: they are too small for PyTorch to share one between cores."""
    import torch

    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(run, range(count)))
    finally:
        torch.set_num_threads(threads)


def _simulate(component: Component, case: Case, seed: int, samples: int) -> tuple[FloatArray, FloatArray]:
    """Simulated quantities and their standard errors (jackknife over samples)."""
    from torch import Generator

    generator = Generator().manual_seed(seed)
    drawn = [component.sample(case, generator) for _ in range(samples)]
    raw = np.array([s.raw for s in drawn])
    controls = np.array([s.controls for s in drawn])
    fitted = controls.shape[1] if samples >= 3 * controls.shape[1] else 0
    if fitted:
        design = np.column_stack([np.ones(samples), controls])
        slope = np.linalg.lstsq(design, raw, rcond=None)[0][1:]
        raw = raw - controls @ slope
    total = raw.sum(axis=0)
    full = _quantities(total / samples)
    without = np.array([_quantities((total - row) / (samples - 1)) for row in raw])
    spread = np.sqrt((samples - 1) / samples * ((without - without.mean(axis=0)) ** 2).sum(axis=0))
    return full, spread * math.sqrt((samples - 1) / max(samples - 1 - fitted, 1))


def _quantities(raw: FloatArray) -> FloatArray:
    """Mean, mean square and mean product become mean, variance and covariance; gradients have mean 0."""
    out = raw.copy()
    out[1:3] -= raw[0] ** 2
    return out


def _flatten(moments: list[Moments]) -> FloatArray:
    forward, *gradients = moments
    found = [forward.mean, forward.variance, forward.covariance]
    for gradient in gradients:
        found += [gradient.variance, gradient.covariance]
    return np.array(found, dtype=np.float64)


def _scale(simulated: FloatArray, predicted: FloatArray) -> FloatArray:
    """What errors are relative to, as Row.percentiles says."""
    scale = np.abs(simulated)
    std = math.sqrt(simulated[1])
    scale[0] = std if predicted[0] == 0 else max(scale[0], 0.1 * std)
    for covariance in range(2, len(scale), 2):
        scale[covariance] = max(scale[covariance], 0.1 * simulated[covariance - 1])
    return scale

"""What a reproduction gives back: numbers compared with the paper's, panels to draw, and the verdict of both."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from signalprop.errors import InputError
from signalprop.files.storage import finite
from signalprop.network.moments import FloatArray
from signalprop.results.text import spread

SCHEMA = "signalprop/reproduction/1"
Scale = Literal["small", "paper"]
SCALES: tuple[Scale, ...] = ("small", "paper")
State = Literal["holds", "open", "fails"]
Verdict = Literal["confirmed", "partly", "contradicted", "not run"]
Progress = Callable[[int, int], None]
_DIGITS = 5  # of the numbers in a stored curve; a picture shows three
_POINTS = 97  # of a stored curve: every second layer of 192
_NOISE = 2.0  # standard errors that a number may lie beyond a bound before it counts as beyond


@dataclass(frozen=True)
class Settings:
    """What a reproduction is run with.

    Attributes:
        scale: `small` takes seconds to a minute on two cores, `paper` the shapes of the paper where they are larger.
        seed: of weights and data. checkpoint: a trained model, for the rows that need one.
        device: where networks are simulated. progress: called with (steps done, all of them).
    """

    scale: Scale = "small"
    seed: int = 0
    checkpoint: str | None = None
    device: str = "cpu"
    progress: Progress = field(default=lambda done, total: None, repr=False, compare=False)

    def pick(self, small: Any, paper: Any) -> Any:
        """One of two values, by the scale."""
        return small if self.scale == "small" else paper


@dataclass(frozen=True)
class Check:
    """One number of ours against what the paper says of it.

    Attributes:
        what: the quantity, in words. paper: what the paper prints or shows, in its words or numbers.
        ours: our number; standard_error: of it, 0 where it is exact.
        low, high: the claim counts as holding from the one to the other, both included.
    """

    what: str
    paper: str
    ours: float
    low: float = -math.inf
    high: float = math.inf
    standard_error: float = 0.0

    @property
    def state(self) -> State:
        """`fails` where our number lies beyond a bound by more than two standard errors; `open` where it lies beyond by

        less, or is known no better than the bounds are apart; else `holds`. What is not a number fails.
        """
        beyond = max(self.low - self.ours, self.ours - self.high, 0.0)
        if math.isnan(self.ours) or beyond > _NOISE * self.standard_error:
            return "fails"
        return "open" if beyond > 0 or _NOISE * self.standard_error > self.high - self.low else "holds"

    @property
    def criterion(self) -> str:
        """The bounds in words."""
        if self.low == self.high:
            return f"{self.low:.4g}"
        if self.low == -math.inf:
            return f"at most {self.high:.4g}"
        return f"at least {self.low:.4g}" if self.high == math.inf else f"{self.low:.4g} to {self.high:.4g}"

    @property
    def shown(self) -> str:
        """Our number with its standard error."""
        return f"{self.ours:.4g}" + (f" ± {self.standard_error:.2g}" if self.standard_error else "")

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary; an open bound is null."""
        keys = ("what", "paper", "ours", "standard_error", "low", "high")
        return {key: getattr(self, key) for key in keys} | {"criterion": self.criterion, "state": self.state}


def verdict_of(checks: tuple[Check, ...]) -> Verdict:
    """`confirmed`: every check holds. `contradicted`: none holds, and one fails. `partly`: anything else.

    `not run` without a check.
    """
    states = [check.state for check in checks]
    if not states:
        return "not run"
    if all(state == "holds" for state in states):
        return "confirmed"
    return "contradicted" if "fails" in states and "holds" not in states else "partly"


@dataclass(frozen=True)
class Curve:
    """A line or a row of points.

    Attributes:
        label: of what, then `, predicted` or `, measured`: curves of one thing share a colour.
        kind: `theory` is drawn as a line, `measured` as points with error bars, `paper` as a dashed line;
            `before` (dashed) and `after` are of a training.
        error: standard errors of y.
    """

    label: str
    x: FloatArray
    y: FloatArray
    kind: Literal["theory", "measured", "paper", "before", "after"] = "theory"
    error: FloatArray | None = None

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary of some hundred points at most, in five digits."""
        columns = {"x": self.x, "y": self.y, "error": self.error}
        keep = spread(range(len(self.x)), _POINTS)
        rounded = {
            name: [float(f"{value:.{_DIGITS}g}") for value in np.asarray(column, np.float64)[keep]]
            for name, column in columns.items()
            if column is not None
        }
        return {"label": self.label, "kind": self.kind, **rounded}


@dataclass(frozen=True)
class Panel:
    """One coordinate system."""

    title: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    log_x: bool = False
    log_y: bool = False
    y_limits: tuple[float, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary."""
        return {
            "title": self.title,
            "x": self.x_label,
            "y": self.y_label,
            "log_x": self.log_x,
            "log_y": self.log_y,
            "limits": self.y_limits,
            "curves": [curve.to_json() for curve in self.curves],
        }


@dataclass(frozen=True)
class Findings:
    """What the function of a row returns.

    Attributes:
        checks: what decides the verdict.
        reduced: what is smaller, or other, than in the paper.
        panels: of the picture. maps: matrices of numbers from 0 to 1, by what they are of, which it has above them.
        figure: makes a matplotlib Figure where these do not do.
        notes: what explains the numbers, one sentence each. details: further numbers for the JSON.
    """

    checks: tuple[Check, ...]
    reduced: str
    panels: tuple[Panel, ...] = ()
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    figure: Callable[[], Any] | None = None
    maps: Mapping[str, FloatArray] = field(default_factory=dict)


@dataclass(frozen=True)
class Reproduction:
    """A row of the registry, run or not.

    Attributes:
        id, title, source, claim: of the row. scale: that it ran at.
        seconds: wall-clock time; processor_seconds: of all threads, which other work on the machine does not lengthen.
        reason: why it was not run, else what failed or stayed open, in words.
        findings: None where it was not run.
    """

    id: str
    title: str
    source: str
    claim: str
    scale: Scale
    findings: Findings | None = None
    seconds: float = 0.0
    processor_seconds: float = 0.0
    not_run: str = ""

    @property
    def checks(self) -> tuple[Check, ...]:
        """All checks; none where it was not run."""
        return () if self.findings is None else self.findings.checks

    @property
    def verdict(self) -> Verdict:
        """See `verdict_of`."""
        return verdict_of(self.checks)

    @property
    def reason(self) -> str:
        """What the verdict rests on: why it was not run, or the checks that do not hold."""
        if self.findings is None:
            return self.not_run
        said = [
            f"{check.what}: {check.shown}, expected {check.criterion}" + " (within noise)" * (check.state == "open")
            for check in self.checks
            if check.state != "holds"
        ]
        return "; ".join(said) if said else f"all {len(self.checks)} checks hold"

    @property
    def slug(self) -> str:
        """The id as a file name."""
        return slug(self.id)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dictionary (schema signalprop/reproduction/1)."""
        keys = ("id", "title", "source", "claim", "scale", "verdict", "reason")
        out: dict[str, Any] = {"schema": SCHEMA} | {key: getattr(self, key) for key in keys}
        out |= {"seconds": round(self.seconds, 1), "processor_seconds": round(self.processor_seconds, 1)}
        if self.findings is not None:
            f = self.findings
            out |= {
                "reduced": f.reduced,
                "checks": [check.to_json() for check in f.checks],
                "notes": list(f.notes),
                "details": dict(f.details),
                "panels": [panel.to_json() for panel in f.panels],
            }
        return dict(finite(out))


def slug(identifier: str) -> str:
    """An id as a file name: tgs-fig12/13 is tgs-fig12-13."""
    return identifier.replace("/", "-")


def fitted_line(x: FloatArray, y: FloatArray) -> tuple[float, float, float]:
    """(slope, intercept, R²) of the straight line through points."""
    if len(x) < 3:
        raise InputError(f"a line needs three points or more, there are {len(x)}")
    slope, intercept = np.polyfit(x, y, 1)
    spread = float(np.sum((y - y.mean()) ** 2))
    rest = float(np.sum((y - slope * x - intercept) ** 2))
    return float(slope), float(intercept), 1.0 - rest / spread if spread > 0 else 1.0

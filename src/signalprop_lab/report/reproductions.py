"""Figures and tables of the papers, reproduced: checks against the paper's numbers, the panels, the verdict."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from pydantic import ConfigDict, Field, model_validator

from signalprop.errors import InputError
from signalprop.files.validation import Value
from signalprop.report.parts import Part
from signalprop.report.sections import Card, Chart, Curve, Line, Section, Severity, Table, numbers, with_errors
from signalprop.results.text import number

SCHEMA, SCHEMA_OF_MANY = "signalprop/reproduction/1", "signalprop/reproductions/1"
_LINES: dict[str, tuple[str, Line]] = {
    "theory": ("theory", "solid"), "measured": ("measured", "points"), "paper": ("paper", "dashed"),
    "before": ("before training", "dashed"), "after": ("after training", "solid"),
}  # fmt: skip
_TICKS = 8  # values of a logarithmic horizontal axis that get one each
_HOW = re.compile(r"(^|, )(predicted|measured\b.*|step \d+)$")
_SEVERITIES: dict[str, Severity] = {"confirmed": "good", "contradicted": "warning"}


class _Stored(Value):
    """A part of a stored reproduction; what a report does not show is passed over."""

    model_config = ConfigDict(extra="ignore")


class _Check(_Stored):
    what: str
    paper: str
    criterion: str
    state: str
    ours: float | None
    standard_error: float | None = 0.0


class _Curve(_Stored):
    label: str
    kind: str = Field(pattern=f"^({'|'.join(_LINES)})$")
    x: list[float | None]
    y: list[float | None]
    error: list[float | None] | None = None

    @model_validator(mode="after")
    def _of_one_length(self) -> Self:
        if {len(self.x), len(self.y), len(self.error or self.x)} != {len(self.x)}:
            raise ValueError("x, y and error have different lengths")
        return self


class _Panel(_Stored):
    title: str
    x: str
    y: str
    curves: list[_Curve]
    log_x: bool = False
    log_y: bool | None = None
    limits: list[float] | None = Field(None, min_length=2, max_length=2)


class Reproduced(_Stored):
    """A stored reproduction (schema signalprop/reproduction/1), as far as a report shows it."""

    id: str
    title: str
    source: str
    claim: str
    scale: str
    verdict: str
    reason: str
    seconds: float = 0.0
    reduced: str = ""
    checks: list[_Check] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    panels: list[_Panel] = Field(default_factory=list)


def of_json(data: Mapping[str, Any]) -> dict[str, Reproduced]:
    """One reproduction or many, by their ids."""
    several = [data] if data.get("schema") == SCHEMA else data.get("reproductions")
    if not isinstance(several, list) or not all(isinstance(item, dict) for item in several):
        raise InputError("it holds no list of reproductions; write it again with: signalprop reproduce ID --json FILE")
    made = [Reproduced(**{str(key): value for key, value in item.items()}) for item in several]
    return {item.id: item for item in made}


def reproduction_section(item: Reproduced) -> Section:
    """Its panels and its checks."""
    curves = [curve for panel in item.panels for curve in panel.curves]
    things = [*dict.fromkeys(map(_thing, curves))]
    charts = [_chart(panel, things, several=len({curve.kind for curve in curves}) > 1) for panel in item.panels]
    rows = [
        [one.what, one.paper, number(one.ours) + (f" ± {one.standard_error:.2g}" if one.standard_error else ""),
         one.criterion, one.state] for one in item.checks
    ]  # fmt: skip
    checks = [Table("Checks", ["quantity", "paper", "ours", "holds from", "state"], rows, left=2)] if rows else []
    reduced = f"In place of what the paper has: {item.reduced}." if item.reduced else ""
    lead = " ".join(part for part in (f"{item.source}: {item.claim}.", reduced, *item.notes) if part)
    return Section(f"{item.id}: {item.title}", [*charts, *checks], lead)


def _thing(curve: _Curve) -> str:
    """What a curve is of; the same for what is predicted and measured of it."""
    return _HOW.sub("", curve.label) or "ours"


def _chart(panel: _Panel, things: Sequence[str], *, several: bool) -> Chart:
    curves = []
    for curve in panel.curves:
        kind, line = _LINES[curve.kind]
        x, thing = numbers(curve.x), _thing(curve)
        label = ", ".join([thing] * (len(things) > 1 or not several) + [kind] * several)
        colour = things.index(thing) if len(things) > 1 else list(_LINES).index(curve.kind)
        at = np.log10(np.where(x > 0, x, np.nan)) if panel.log_x else x
        names = [f"{value:.6g}" for value in x]
        drawn = Curve(label, at, numbers(curve.y), colour=colour, line=line, names=names)
        curves.append(with_errors(drawn, None if curve.error is None else numbers(curve.error)))
    known = [y for curve in panel.curves for y in curve.y if y is not None and math.isfinite(y)]
    positive = bool(known) and min(known) > 0
    wide = positive and max(known) > 10 * min(known)
    return Chart(
        panel.title or panel.y, curves, panel.x, panel.y, positive=positive,
        log=wide if panel.log_y is None else panel.log_y and positive, ticks=_ticks(panel) if panel.log_x else (),
        limits=(panel.limits[0], max(panel.limits[1], 1.05 * max(known, default=0.0))) if panel.limits else None,
    )  # fmt: skip


def _ticks(panel: _Panel) -> list[tuple[float, str]]:
    """Of a logarithmic horizontal axis: its values where they are few, else powers of ten."""
    values = sorted({x for curve in panel.curves for x in curve.x if x})
    if len(values) > _TICKS:
        values = [10.0**k for k in range(math.ceil(math.log10(values[0])), math.floor(math.log10(values[-1])) + 1)]
    return [(math.log10(value), f"{value:g}") for value in values]


def _cards(items: Mapping[str, Reproduced]) -> list[Card]:
    """A card per reproduction: its verdict and what it rests on."""
    return [
        Card(
            _SEVERITIES.get(item.verdict, "note"), f"{item.id} ({item.source})", f"{item.title}: {item.verdict}",
            [item.reason],
        )
        for item in items.values()
    ]  # fmt: skip


PART = Part(
    types=(Reproduced,),
    sections=lambda items, _: [reproduction_section(item) for item in items.values()],
    cards=_cards,
    names=list,
    readers=dict.fromkeys((SCHEMA, SCHEMA_OF_MANY), lambda _, data: dict(of_json(data))),
)

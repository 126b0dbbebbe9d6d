"""Checkpoints of one training in the report: growth over the checkpoints, and what left the band first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from signalprop.diagnosis.weight_series import SCHEMA, WeightSeries
from signalprop.report.html import blocks
from signalprop.report.html.blocks import Block
from signalprop.report.html.parts import Items, Part
from signalprop.report.weight_series import HEADER, cells, short_names
from signalprop.results.text import spread


def series_section(s: WeightSeries, name: str, key: str) -> Block:
    """A chart per role with a curve per layer's place in depth, and the table of what grew."""
    steps, roles = short_names(s), list(dict.fromkeys((row.stack, row.role) for row in s.rows))
    layers = sorted({row.layer for row in s.rows if row.layer is not None})
    shown = spread(layers, 6)
    groups: list[int | None] = [None, *shown]
    charts = []
    for k, role in enumerate(roles):
        curves = [
            blocks.series(groups.index(row.layer), 0, 0, blocks.numbers(row.growth))
            for row in s.rows if (row.stack, row.role) == role and row.layer in groups
        ]  # fmt: skip
        ticks = list(enumerate(steps))
        charts.append(
            blocks.chart(f"{key}-{k}", f"{role[1]}: size over the first", curves, x="checkpoint", y="", ticks=ticks)
        )
    rows = [cells(row, steps) for row in s.grown]
    table = blocks.table("Left the band, in this order", HEADER, rows, left=1)
    return blocks.section(
        key,
        f"Weights over training: {name}",
        [*charts, *([table] if rows else [])],
        lead="Root mean square of weights by role and layer at every checkpoint.",
        groups=["outside of layers", *(f"layer {k}" for k in shown)],
        sources=[("stored", "line")],
        places=[blocks.place(list(range(len(steps))), steps)],
    )


def _sections(items: Items, _: Path | None) -> list[Block]:
    return [series_section(s, name, f"weight-series-{k}") for k, (name, s) in enumerate(items.items())]


def _read(source: Path, data: dict[str, Any]) -> dict[str, Any]:
    return {source.stem: WeightSeries.from_json(data)}


PART = Part(
    types=(WeightSeries,), sections=_sections, names=list, readers={SCHEMA: _read}
)  # fmt: skip

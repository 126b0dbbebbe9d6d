"""Checkpoints of one training as text."""

from __future__ import annotations

from pathlib import PurePath

from signalprop.diagnosis.weight_series import GROWN, SeriesRow, WeightSeries
from signalprop.results.text import number, text_table

_ROWS = 12
HEADER = ["weights", "rms at first", "at last", "ratio", "beyond since", "largest change of a step"]


def short_names(s: WeightSeries) -> list[str]:
    """The last part of every checkpoint's path."""
    return [PurePath(model).name or model for model in s.models]


def series_text(s: WeightSeries) -> str:
    """What left the band, in the order in which it did, and the rows that moved most."""
    grown, names = s.grown, short_names(s)
    band = f"{1 / GROWN:g} to {GROWN:g} times their size at {names[0]}"
    head = f"{len(s.models)} checkpoints, {names[0]} to {names[-1]}: {len(s.rows)} weights by role and layer"
    said = f"{len(grown)} left {band}" + (f", the first {grown[0].name}" if grown else "")
    rows = grown or sorted(s.rows, key=lambda row: -max((x or 0.0 for x in row.change), default=0.0))
    more = f"\nleft out: {len(rows) - _ROWS} more rows (--json has all)" if len(rows) > _ROWS else ""
    table = text_table(HEADER, [cells(row, names) for row in rows[:_ROWS]])
    return "\n".join([head, said, "", table + more, *s.notes])


def cells(row: SeriesRow, names: list[str]) -> list[str]:
    """One row of the table under `HEADER`."""
    changes = [(x, name) for x, name in zip(row.change, names, strict=True) if x is not None]
    most = f"{number(max(changes)[0])} at {max(changes)[1]}" if changes else ""
    since = "" if row.since is None else names[row.since]
    return [row.name, number(row.rms[0]), number(row.rms[-1]), number(row.growth[-1]), since, most]

"""Checkpoints of one training, side by side from their files: which weights grew, and which layer first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from signalprop.diagnosis.result import Number, number, tuples
from signalprop.diagnosis.stored_weights import Progress, StoredWeights, TensorWeights, read_weights
from signalprop.errors import InputError
from signalprop.files.documents import fields_of
from signalprop.files.storage import finite
from signalprop.files.validation import Value

SCHEMA: Literal["signalprop/weight-series/1"] = "signalprop/weight-series/1"
GROWN = 1.25  # of the root mean square at the first checkpoint, or its inverse


class SeriesRow(Value):
    """The weights of one role in one layer, at every checkpoint.

    Attributes:
        rms: root mean square. change: norm of the difference from the checkpoint before over the norm there; the first
            is None.
    """

    role: str
    layer: int | None
    stack: str | None
    rms: tuple[Number, ...]
    change: tuple[Number, ...]

    @property
    def growth(self) -> tuple[Number, ...]:
        """Root mean square over that of the first checkpoint; of zeros that stay zeros 1, of others infinity."""
        first = self.rms[0]
        return tuple(None if x is None or first is None else _over(x, first) for x in self.rms)

    @property
    def since(self) -> int | None:
        """The first checkpoint that is beyond `GROWN` (or its inverse, or not finite); None where none is."""
        return next((k for k, x in enumerate(self.growth) if x is None or not 1 / GROWN <= x <= GROWN), None)

    @property
    def name(self) -> str:
        """Role and layer, in words."""
        where = "" if self.layer is None else f"layer {self.layer} "
        return f"{self.stack} {where}{self.role}" if self.stack not in (None, "decoder") else f"{where}{self.role}"


class WeightSeries(Value):
    """Checkpoints of one training in the order given.

    Attributes:
        models: as given. family: of the first. rows: of the tensors that all have. notes: what was left out.
    """

    model_config = ConfigDict(title="weight series")
    schema_: Literal["signalprop/weight-series/1"] = Field(alias="schema")
    models: tuple[str, ...] = Field(min_length=2)
    family: str | None
    rows: tuple[SeriesRow, ...]
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _of_all_checkpoints(self) -> Self:
        for row in self.rows:
            if not len(row.rms) == len(row.change) == len(self.models):
                raise ValueError(f"{row.role} has {len(row.rms)} numbers; there are {len(self.models)} models")
        return self

    @property
    def grown(self) -> list[SeriesRow]:
        """Rows that left the band, those first that left it first, of these those that went furthest."""
        left = [row for row in self.rows if row.since is not None]
        return sorted(left, key=lambda row: (row.since, -_distance(row)))

    def to_json(self) -> dict[str, Any]:
        """The JSON form; `from_json` reads it."""
        out: dict[str, Any] = finite(self.model_dump(mode="json", by_alias=True))
        return out

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """Read what `to_json` wrote."""
        found = fields_of(data, SCHEMA, "a series of checkpoints")
        return cls(**{key: tuples(value) for key, value in found.items()})


def _over(x: float, first: float) -> float:
    return x / first if first else math.inf if x else 1.0


def _distance(row: SeriesRow) -> float:
    last = row.growth[-1]
    return math.inf if not last else abs(math.log(last))


def read_series(sources: Sequence[str | Path], progress: Callable[[str, int, int], None] | None = None) -> WeightSeries:
    """Read checkpoints one after the other, each also against the one before.

    Args:
        sources: at least two, in the order of the training. progress: called with (source, megabytes read, all).
    """
    if len(sources) < 2:
        raise InputError("a series has at least two checkpoints; give their directories in the order of the training")

    def told(source: str | Path) -> Progress | None:
        return None if progress is None else lambda done, n: progress(str(source), done, n)

    befores = [None, *sources[:-1]]
    found = [
        read_weights(source, before, told(source)) for source, before in zip(sources, befores, strict=True)
    ]  # fmt: skip
    tables = [{row.name: row for row in one.tensors} for one in found]
    common = set.intersection(*(set(table) for table in tables))
    if not common:
        raise InputError(f"no tensor is in all of {', '.join(map(str, sources))}; give checkpoints of one training")
    groups: dict[tuple[str | None, str, int | None], list[str]] = {}
    for row in found[0].tensors:
        if row.name in common:
            groups.setdefault((row.stack, row.role, row.layer), []).append(row.name)
    missing = len(set.union(*(set(table) for table in tables))) - len(common)
    return WeightSeries(
        schema=SCHEMA,
        models=tuple(str(source) for source in sources),
        family=found[0].family,
        rows=tuple(_row(key, names, tables) for key, names in groups.items()),
        notes=(*_notes(found), *([f"left out: {missing} tensors that not all checkpoints have"] if missing else [])),
    )


def _notes(found: Sequence[StoredWeights]) -> list[str]:
    return list(dict.fromkeys(note for one in found for note in one.notes))


def _row(
    key: tuple[str | None, str, int | None], names: list[str], tables: Sequence[dict[str, TensorWeights]]
) -> SeriesRow:
    stack, role, layer = key
    at = [[table[name] for name in names] for table in tables]
    return SeriesRow(
        role=role,
        layer=layer,
        stack=stack,
        rms=tuple(_together([(row.n, row.rms) for row in rows]) for rows in at),
        change=(None, *(_moved(before, rows) for before, rows in pairwise(at))),
    )


def _together(parts: Sequence[tuple[float, Number]]) -> Number:
    """Root of the weighted mean square; None where one is not known."""
    weights = sum(weight for weight, _ in parts)
    if any(x is None for _, x in parts):
        return None
    return number(math.sqrt(sum(w * x * x for w, x in parts if x is not None) / weights)) if weights else 0.0


def _moved(before: Sequence[TensorWeights], after: Sequence[TensorWeights]) -> Number:
    if any(row.rms is None for row in before):
        return None
    return _together([(row.n * (row.rms or 0.0) ** 2, now.change) for row, now in zip(before, after, strict=True)])

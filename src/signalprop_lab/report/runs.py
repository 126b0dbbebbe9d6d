"""A directory of a training run, read leniently: a run may still be going on, or have died in the middle of a line."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from signalprop.errors import InputError
from signalprop.files.storage import read_json, read_text
from signalprop.results.profile import Profile

METRICS, SIGNAL, RECIPE, ENVIRONMENT, RESULT = (
    "metrics.jsonl", "signal.jsonl", "recipe.yaml", "environment.json", "result.json",
)  # fmt: skip
RESULT_SCHEMA = "signalprop/run/1"
_LAST_STEP = 2**53  # up to which numbers on an axis are whole


@dataclass(frozen=True)
class Run:
    """What a training run left behind.

    Attributes:
        metrics: by name, the steps and the values, which need not be finite.
        signal: profiles by step. recipe: text of the recipe. environment: as its file has it.
        result: status, steps, losses, seconds; None while the run goes on.
    """

    metrics: Mapping[str, tuple[tuple[int, ...], tuple[float, ...]]]
    signal: tuple[tuple[int, Profile], ...] = ()
    recipe: str = ""
    environment: Mapping[str, Any] | None = None
    result: Mapping[str, Any] | None = None


def is_run(path: Path) -> bool:
    """Whether a directory is that of a training run."""
    return any((path / name).is_file() for name in (METRICS, SIGNAL, RESULT, RECIPE))


def read_run(directory: str | Path) -> Run:
    """Read a run's directory."""
    root = Path(directory)
    if not is_run(root):
        raise InputError(
            f"{root} is not the directory of a training run: it has no {METRICS}; give a run that train wrote"
        )
    return Run(
        metrics=_metrics(root / METRICS),
        signal=tuple(_signal(root / SIGNAL)),
        recipe=read_text(root / RECIPE) if _has(root / RECIPE) else "",
        environment=_object(root / ENVIRONMENT),
        result=_result(root / RESULT),
    )


def _has(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


def as_double(value: Any) -> float | None:
    """A number of a file; None for anything else, NaN, infinities and whole numbers beyond all doubles among it."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return float(value) if known else None


def _metrics(path: Path) -> dict[str, tuple[tuple[int, ...], tuple[float, ...]]]:
    found: dict[str, dict[int, float]] = {}
    for number, row in _rows(path):
        step = _step(path, number, row)
        for name, value in row.items():
            if name != "step" and (value is None or isinstance(value, (int, float))) and not isinstance(value, bool):
                # a resumed run says some steps again; null is what JSON has for NaN
                known = as_double(value)
                found.setdefault(name, {})[step] = math.nan if known is None else known
    return {name: (tuple(sorted(at)), tuple(at[step] for step in sorted(at))) for name, at in found.items()}


def _signal(path: Path) -> Iterator[tuple[int, Profile]]:
    found: dict[int, Profile] = {}
    for number, row in _rows(path):
        step = _step(path, number, row)
        try:
            found[step] = Profile.from_json(row.get("profile"))
        except InputError as error:
            raise InputError(f"{path}, line {number}: {error}") from None
    yield from sorted(found.items())


def _step(path: Path, number: int, row: Mapping[str, Any]) -> int:
    step = row.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= _LAST_STEP:
        raise InputError(f"{path}, line {number} has step {step!r:.40}; expected a whole number from 0 on")
    return step


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Objects of a JSON-lines file with their line numbers; a last line that broke off is left out."""
    if not _has(path):
        return
    lines = read_text(path).split("\n")
    last = max(number for number, line in enumerate(lines, start=1) if line.strip())
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if number == last:
                return
            raise InputError(
                f"{path}, line {number} is not JSON: {line.strip()!r:.40}; delete that line, or read another run"
            ) from None
        if not isinstance(row, dict):
            raise InputError(f"{path}, line {number} holds a {type(row).__name__}; expected an object with a step")
        yield number, row


def _object(path: Path) -> dict[str, Any] | None:
    if not _has(path):
        return None
    data = read_json(path)
    if not isinstance(data, dict):
        raise InputError(f"{path} holds a {type(data).__name__}; expected an object")
    return data


def _result(path: Path) -> dict[str, Any] | None:
    data = _object(path)
    if data is not None and data.get("schema") != RESULT_SCHEMA:
        raise InputError(f"{path} has schema {data.get('schema')!r:.60}; this version reads {RESULT_SCHEMA!r}")
    return data

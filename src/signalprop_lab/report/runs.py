"""A directory of a training run, read leniently: a run may still be going on, or have died in the middle of a line."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from signalprop.errors import InputError
from signalprop.files.storage import read_json, read_text
from signalprop.results.profile import Profile
from signalprop_lab.training.json_lines import read_lines
from signalprop_lab.training.result import RUN_SCHEMA

METRICS, SIGNAL, RECIPE, ENVIRONMENT, RESULT = (
    "metrics.jsonl", "signal.jsonl", "recipe.yaml", "environment.json", "result.json",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What a training run left in its directory.

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
    for row in read_lines(path):
        for name, value in row.items():
            if name != "step" and (value is None or isinstance(value, (int, float))) and not isinstance(value, bool):
                # a resumed run says some steps again; null is what JSON has for NaN
                known = as_double(value)
                found.setdefault(name, {})[row["step"]] = math.nan if known is None else known
    return {name: (tuple(sorted(at)), tuple(at[step] for step in sorted(at))) for name, at in found.items()}


def _signal(path: Path) -> Iterator[tuple[int, Profile]]:
    found: dict[int, Profile] = {}
    for row in read_lines(path):
        if "error" in row:  # the signal was not finite
            continue
        try:
            found[row["step"]] = Profile.from_json(row.get("profile"))
        except InputError as error:
            raise InputError(f"{path}, step {row['step']}: {error}") from None
    yield from sorted(found.items())


def _object(path: Path) -> dict[str, Any] | None:
    if not _has(path):
        return None
    data = read_json(path)
    if not isinstance(data, dict):
        raise InputError(f"{path} holds a {type(data).__name__}; expected an object")
    return data


def _result(path: Path) -> dict[str, Any] | None:
    data = _object(path)
    if data is not None and data.get("schema") != RUN_SCHEMA:
        raise InputError(f"{path} has schema {data.get('schema')!r:.60}; this version reads {RUN_SCHEMA!r}")
    return data

"""Sweeps as grids: the cells, and the runs of a cell."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from signalprop.errors import InputError, unknown
from signalprop_lab.training.recipe import Recipe, parse
from signalprop_lab.training.recipe_files import beside, put, read_recipe, read_yaml, shipped
from signalprop_lab.training.sweep_definition import SCHEMA, SEPARATOR, Sweep

_LONGEST_NAME = 200  # of a cell's directory; file systems take 255 bytes


def _file_name(text: str) -> str:
    """The text as one part of a path, which leads neither out of the directory nor further down."""
    name = re.sub(r"[^A-Za-z0-9._+=-]", "-", text)
    return name if name.strip(".") else "-" * len(name)


@dataclass(frozen=True)
class Cell:
    """One combination of the axes' values.

    Attributes:
        name, labels: of the axes, in order. data: the recipe's mapping; the tuned number and the seed are not set.
    """

    name: str
    labels: tuple[str, ...]
    data: Mapping[str, Any]

    @cached_property
    def folder(self) -> str:
        """A directory's name."""
        return _file_name("__".join(self.labels))


@dataclass(frozen=True)
class Point:
    """One run: a cell, the tuned number (None: nothing is tuned), a seed."""

    cell: str
    rate: float | None
    seed: int


def _of_seed(data: dict[str, Any], seed: int) -> dict[str, Any]:
    """The recipe with its seed in place of `{seed}` in `model.pretrained`: it goes on from the run of that seed."""
    model = data.get("model")
    if isinstance(model, dict) and isinstance(model.get("pretrained"), str):
        model["pretrained"] = model["pretrained"].replace("{seed}", str(seed))
    return data


@dataclass(frozen=True)
class Grid:
    """A sweep with its cells, all of whose recipes are valid."""

    sweep: Sweep
    base: Mapping[str, Any]
    cells: Mapping[str, Cell]

    def recipe(self, point: Point) -> Recipe:
        """What is run."""
        try:
            data = copy.deepcopy(dict(self.cells[point.cell].data))
            if self.sweep.tune is not None:
                put(data, self.sweep.tune.key, point.rate)
            put(data, "seed", point.seed)
            return parse(_of_seed(data, point.seed))
        except InputError as error:
            raise InputError(f"sweep {self.sweep.name}, cell {point.cell}: {error}") from None

    def directory(self, point: Point) -> str:
        """Of a run, below the sweep's."""
        parts = ["runs", self.cells[point.cell].folder]
        if self.sweep.tune is not None:
            column = self.sweep.tune.column
            parts.append(_file_name(f"{'lr' if column == 'learning_rate' else column}={point.rate}"))
        return "/".join([*parts, f"seed={point.seed}"])

    def settings(self, point: Point) -> dict[str, Any]:
        """All of a recipe that decides what comes out, without what is left at its default."""
        data = self.recipe(point).model_dump(mode="json", by_alias=True, exclude_defaults=True)
        return {key: value for key, value in data.items() if key not in ("name", "description", "schema")}


def grid_of(sweep: Sweep, base: Mapping[str, Any]) -> Grid:
    """The cells of a sweep."""
    cells = {}
    for labels in sweep.labels():
        data = copy.deepcopy(dict(base))
        name = SEPARATOR.join(labels)
        try:
            for axis, label in zip(sweep.axes, labels, strict=True):
                for key, value in sweep.axes[axis][label].items():
                    put(data, key, copy.deepcopy(value))
        except InputError as error:
            raise InputError(f"sweep {sweep.name}, cell {name}: {error}") from None
        cells[name] = Cell(name, labels, data)
    grid = Grid(sweep, base, cells)
    _check_cells(grid)
    return grid


def _check_cells(grid: Grid) -> None:
    from signalprop.schemes import scheme

    sweep = grid.sweep
    folders: dict[str, str] = {}
    runs: dict[str, str] = {}
    for name, cell in grid.cells.items():
        rates = sweep.tune.values if sweep.tune else (None,)
        for rate, seed in [(rate, sweep.seeds[0]) for rate in rates] + [(rates[-1], seed) for seed in sweep.seeds[1:]]:
            recipe = grid.recipe(Point(name, rate, seed))
        if recipe.model.scheme is not None and not recipe.model.scheme.endswith(".json"):
            try:
                scheme(recipe.model.scheme, **recipe.model.options)
            except InputError as error:
                raise InputError(f"sweep {sweep.name}, cell {name}: {error}") from None
        if len(cell.folder) > _LONGEST_NAME:
            raise InputError(
                f"sweep {sweep.name}: the labels of {name:.40} ... make a directory's name of {len(cell.folder)} "
                f"characters; shorten them to {_LONGEST_NAME}"
            )
        twin = folders.setdefault(cell.folder.lower(), name)
        if twin != name:
            raise InputError(f"sweep {sweep.name}: the labels of {twin} and {name} make the same directory; rename one")
        same = runs.setdefault(json.dumps(grid.settings(Point(name, rate, seed)), sort_keys=True), name)
        if same != name:
            raise InputError(f"sweep {sweep.name}: {same} and {name} have the same settings; leave one of them out")


def load_sweep(source: str | Path) -> Grid:
    """The sweep of a YAML file, or one that comes with the package, with its cells.

    A base that is a relative path is looked for beside the sweep's file first.
    """
    path = Path(source)
    if not (path.exists() or path.suffix in (".yaml", ".yml", ".json") or str(source) in shipped()):
        raise unknown("sweep", str(source), shipped_sweeps())
    data = read_yaml(source)
    if data.get("schema") != SCHEMA:
        raise InputError(f"{source} is not a sweep: its schema is {data.get('schema')!r}; expected {SCHEMA}")
    sweep = Sweep(**data)
    base = sweep.base
    return grid_of(sweep, read_recipe(beside(base, path.parent)) if isinstance(base, str) else base)


def shipped_sweeps() -> list[str]:
    """Names of the sweeps that come with the package."""
    return [name for name in shipped() if read_yaml(name).get("schema") == SCHEMA]

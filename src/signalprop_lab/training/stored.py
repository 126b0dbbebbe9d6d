"""Finished runs of a stored `results.json`, taken up by a sweep's directory instead of being run again."""

from __future__ import annotations

from pathlib import Path

from signalprop.errors import InputError
from signalprop.files.storage import read_json
from signalprop_lab.training.claims import Entry, Runs, refuse_other_settings
from signalprop_lab.training.grid import Point, grid_of
from signalprop_lab.training.sweep_definition import Sweep
from signalprop_lab.training.tables import SCHEMA

__all__ = ["restore"]


def stored_entries(file: Path) -> list[Entry]:
    """The runs of a stored value, each with the settings of the recipe that was stored with it."""
    store = read_json(file)
    if not isinstance(store, dict) or store.get("schema") != SCHEMA:
        raise InputError(f"{file} holds no results of a sweep; give one that `signalprop sweep` has written")
    sweep = Sweep(**store["sweep"])
    grid, column = grid_of(sweep, store["base"]), sweep.tune.column if sweep.tune else None
    dropped = {"cell", "score", "directory", "environment", column, *sweep.axes}  # `store_of` writes them anew
    entries = []
    for row in store["rows"]:
        point = Point(row["cell"], row[column] if column else None, row["seed"])
        result = {key: value for key, value in row.items() if key not in dropped}
        if row.get("environment") is not None:
            result["environment"] = store["environments"][row["environment"]]
        elif len(store["environments"]) == 1:  # stored before rows said which
            result["environment"] = store["environments"][0]
        entries.append(Entry(point, grid.settings(point), result))
    return entries


def restore(runs: Runs, file: Path) -> int:
    """Write the finished runs of a stored value into the directory; how many. Those that it has stay as they are."""
    entries = [entry for entry in stored_entries(file) if entry.point.cell in runs.grid.cells]
    refuse_other_settings(runs.grid, entries, file)
    return sum(runs.put(entry) for entry in entries)

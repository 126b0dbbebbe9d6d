"""The pages, from what came back: sections of docs/benchmarks.md, and pages of sweeps in docs/results."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import page, results
from benchmarks.gpu.__main__ import TIMED, TRAINED
from benchmarks.gpu.trained import sweep_of
from signalprop.errors import InputError
from signalprop.files.storage import make_folder, read_json, write_json
from signalprop_lab.training.claims import Entry
from signalprop_lab.training.grid import Point
from signalprop_lab.training.tables import store_of


def write(folder: Path, records: Path = page.RECORDS, stored: Path = results.FOLDER) -> list[str]:
    """Store what `folder` has, and write the pages anew; what was stored.

    Raises:
        InputError: there is nothing.
    """
    found = {part: read_json(path) for part in (*TIMED, *TRAINED) if (path := folder / f"{part}.json").is_file()}
    if not found:
        raise InputError(f"{folder} holds no results; expected files such as {TIMED[0]}.json")
    paths = []
    for part, store in found.items():
        name, value = (f"gpu.{part}", timed(part, store)) if part in TIMED else (f"gpu-{part}", trained(part, store))
        place = (records if part in TIMED else stored) / f"{name}.json"
        make_folder(place.parent)
        write_json(place, value)
        paths.append(str(place))
    if records == page.RECORDS:
        page.write_page()
    if stored == results.FOLDER:
        results.write_pages()
    return paths


def timed(part: str, store: Mapping[str, Any]) -> dict[str, Any]:
    """A part's record, as `benchmarks.page` takes it."""
    module, e = importlib.import_module(f"benchmarks.gpu.{part}"), store["environment"]
    return {
        "where": f"{e['device']}; {e['machine']}",
        "versions": e["versions"],
        "date": e["started"][:10],
        "command": f"python -m benchmarks.gpu {part}",
        "revision": e["git"],
        "section": module.section(store["rows"]),
    }


def trained(part: str, store: Mapping[str, Any]) -> dict[str, Any]:
    """A part's results, as `benchmarks.results` takes them.

    Raises:
        InputError: its runs are of other settings than the sweep has now.
    """
    grid = sweep_of(part, store["rehearsed"])
    entries = [Entry(**{**entry, "point": Point(**entry["point"])}) for entry in store["entries"]]
    if any(entry.point.cell not in grid.cells or entry.settings != grid.settings(entry.point) for entry in entries):
        raise InputError(f"the runs of {part} are of another sweep than {part}.yaml is now; check out their revision")
    return store_of(grid, entries)

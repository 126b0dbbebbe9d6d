"""What was measured of the cells of docs/accuracy.md, one line each in docs/accuracy.json."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from benchmarks.accuracy_grid import Cell
from benchmarks.measured import Measured
from signalprop.files.storage import read_json, write_json

STORE = Path("docs/accuracy.json")
SCHEMA = "signalprop/accuracy/2"


def read_store() -> dict[Cell, Measured]:
    """All cells that were measured."""
    rows = read_json(STORE)["cells"]
    return {Cell(**{k: row[k] for k in Cell.__dataclass_fields__}): Measured.from_row(row) for row in rows}


def write_store(measured: dict[Cell, Measured]) -> None:
    """Write all cells, cheap ones first."""
    cells = sorted(measured, key=lambda cell: (cell.cost, cell.name))
    write_json(STORE, {"schema": SCHEMA, "cells": [asdict(cell) | measured[cell].row() for cell in cells]})

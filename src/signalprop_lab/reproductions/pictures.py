"""The picture of a reproduction, drawn from its section of a report. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from signalprop.errors import InputError
from signalprop.files.storage import write_json
from signalprop.report.plots import save_figure, sections_figure
from signalprop.report.sections import HeatMap, Section
from signalprop_lab.report.reproductions import Reproduced, reproduction_section
from signalprop_lab.reproductions.result import Reproduction


def picture(found: Reproduction) -> Any:
    """A matplotlib Figure of what was found."""
    if found.findings is None or not found.findings.panels:
        raise InputError(f"{found.id} has no picture: {found.reason}")
    if found.findings.figure is not None:
        return found.findings.figure()
    panels = reproduction_section(Reproduced(**found.to_json()))
    if not found.findings.maps:
        return sections_figure([panels], found.title, columns=2, size=(5.2, 3.9))
    maps = [HeatMap(name, {"": matrix}, "", "", (0, 1)) for name, matrix in found.findings.maps.items()]
    return sections_figure([Section("", maps), panels], found.title)


def save(directory: Path, found: Reproduction) -> list[Path]:
    """Write the JSON of a reproduction, and its picture where it has one; the paths that were written."""
    written = [directory / f"{found.slug}.json"]
    write_json(written[0], found.to_json())
    if found.findings is not None and found.findings.panels:
        written.append(directory / f"{found.slug}.png")
        save_figure(written[1], lambda: picture(found))
    return written

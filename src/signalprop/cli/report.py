"""`signalprop report`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from signalprop.cli import output

if TYPE_CHECKING:
    from signalprop.prediction import Cost

_SECONDS, _MEMORY = 1.5e-7, 4  # of one core, and bytes, for a byte that is read


def report(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="JSON of predict, measure, compare, diagnose, kernel, reproduce or schemes NAME --for; the "
            ".jsonl of a SignalMonitor; directories of training runs and of sweeps.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="The file to write (default: report-SOURCE.html)."),
    ] = None,
) -> None:
    """Make one interactive HTML page of results, which opens offline.

    Profiles, comparisons and diagnoses share their axes; training runs and sweeps add their curves and verdicts.

    \b
    Example: signalprop report a.json b.json --out report.html
    """
    from signalprop.errors import require

    require("plotly", "report")
    if out is None:
        out = output.page_of("report", sources[0])
    output.check_outputs(out)
    from signalprop.report.html import read, write_report

    output.announce([_cost(sources)], less="fewer sources")
    items = [item for source in sources for item in read(source).items()]
    write_report(out, items)
    output.facts(("report", out))


def _cost(sources: list[str]) -> Cost:
    """What reading and drawing take, by the sizes of the files: measured with profiles of 2,000 layers (6 MB each)."""
    from signalprop.prediction import Cost

    size = 0
    for source in map(Path, sources):
        with suppress(OSError, ValueError):
            size += sum(p.stat().st_size for p in (source.rglob("*.json*") if source.is_dir() else [source]))
    return Cost(_SECONDS * size, _MEMORY * size)

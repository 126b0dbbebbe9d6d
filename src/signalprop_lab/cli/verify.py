"""`signalprop verify`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from signalprop.cli import options as opt
from signalprop.cli import output


def verify(
    component: Annotated[
        list[str] | None, typer.Argument(metavar="COMPONENT", help="Only these, e.g. attention; none: all.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Some four minutes on two cores.")] = False,
    json_file: opt.Json = None,
) -> None:
    """Check every component formula against simulation.

    The 50th, 90th and 99th percentile of the error in per cent, beside those of Transformers Get Stable's table 20.
    Exit status 1 if a cell is worse.

    \b
    Example: signalprop verify attention --quick
    """
    from signalprop.errors import require
    from signalprop.results.text import text_table

    output.check_outputs(json_file)
    require("torch", "models")
    from signalprop_lab.verification.verify import verify as verified

    effort = "quick" if quick else "default"
    report = verified(component, effort=effort, progress=lambda line: print(line, file=sys.stderr))

    def show() -> None:
        header = ["component", "quantity", "error %: 50, 90, 99", "s.e. %", "papers' Table 20", "configurations", ""]
        rows = [
            [row.component, row.quantity, _triple(row.percentiles), f"{row.standard_error:.2f}", _triple(row.paper),
             str(row.configurations), row.standing]
            for row in report.rows
        ]  # fmt: skip
        output.echo(text_table(header, rows, left=2))

    said = []
    for verdict, words in (("wrong", "off from the simulation"), ("worse", "worse than the papers' Table 20")):
        cells = [f"{row.component} {row.quantity}" for row in report.rows if row.standing == verdict]
        said += [f"{words} in {len(cells)} cells: {', '.join(cells)}"] if cells else []
    output.deliver(json_file, report.as_json, show, failure="; ".join(said) or None)


def _triple(values: tuple[float, float, float] | None) -> str:
    return "-" if values is None else ", ".join(f"{value:.1f}" for value in values)

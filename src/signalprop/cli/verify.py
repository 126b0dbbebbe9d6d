"""`signalprop verify`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from signalprop.cli import options as opt
from signalprop.cli import output

if TYPE_CHECKING:
    from signalprop.verification import Row

ROUNDING = 0.05  # Table 20 prints one digit after the point


def verify(
    component: Annotated[
        list[str] | None, typer.Option("--component", help="Only this component (repeatable); default: all.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="About half a minute on two cores.")] = False,
    thorough: Annotated[bool, typer.Option("--thorough", help="Some twenty minutes: small standard errors.")] = False,
    seed: opt.Seed = 0,
    json_file: opt.Json = None,
) -> None:
    """Check every component formula against simulation.

    Ranges are those of Table 21 of Transformers Get Stable (v1); the table shows the 50th, 90th and 99th
    percentile of the error in per cent, and beside them the papers' Table 20. Exit status 1 when a cell is worse
    than the papers'.

    \b
    Example:
      signalprop verify --quick --component attention
    """
    from signalprop.errors import InputError, require
    from signalprop.report.tables import text_table

    if quick and thorough:
        raise InputError("--quick and --thorough exclude each other")
    output.check_outputs(json_file)
    require("torch", "models")
    from signalprop.verification import verify as verified

    effort = "quick" if quick else "thorough" if thorough else "default"
    report = verified(component, effort=effort, seed=seed, progress=lambda line: print(line, file=sys.stderr))

    worse = [row for row in report.rows if _is_worse(row)]
    if output.write_result(json_file, report.as_json()):
        header = ["component", "quantity", "error %: 50, 90, 99", "s.e. %", "papers' Table 20", "configurations", ""]
        rows = [
            [row.component, row.quantity, _triple(row.percentiles), f"{row.standard_error:.2f}", _triple(row.paper),
             str(row.configurations), "worse" if row in worse else ""]
            for row in report.rows
        ]  # fmt: skip
        typer.echo(text_table(header, rows, left=2))
    if worse:
        names = ", ".join(f"{row.component} {row.quantity}" for row in worse)
        print(f"signalprop: worse than the papers' Table 20 in {len(worse)} cells: {names}", file=sys.stderr)
        raise typer.Exit(1)


def _is_worse(row: Row) -> bool:
    """Whether a percentile is above the papers'."""
    if row.paper is None:
        return False
    return any(own > max(theirs, ROUNDING) for own, theirs in zip(row.percentiles, row.paper, strict=True))


def _triple(values: tuple[float, float, float] | None) -> str:
    return "-" if values is None else ", ".join(f"{value:.1f}" for value in values)

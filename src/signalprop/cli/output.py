"""What commands do with a result: checks before the long work, JSON, plot, text, progress."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from signalprop.errors import InputError, MissingExtra, printable, require
from signalprop.files.storage import real_path, write_json

if TYPE_CHECKING:
    from signalprop.report.html import Item
    from signalprop.results.comparison import Comparison
    from signalprop.results.profile import Profile

# Where commands write their report unless they are told.
REPORT = "signalprop-report.html"


class ReportFile(NamedTuple):
    """Where a command writes its report, and whether it was asked to."""

    path: Path
    asked: bool


def echo(text: str = "", *, nl: bool = True) -> None:
    """Print on standard output; names that came from a file cannot steer the terminal."""
    typer.echo(printable(text), nl=nl)


def check_outputs(json_file: str | None, plot: Path | None = None) -> None:
    """Refuse files that could not be written before the long work starts.

    Raises:
        InputError: no such directory, one without write permission, a directory in the file's place, or a picture of an
            unknown format. MissingExtra: a picture without matplotlib.
    """
    if plot is not None:
        from signalprop.report.plots import check_format

        check_format(plot)
        require("matplotlib", "report")
    for name in (json_file, plot):
        if name is None or str(name) == "-":
            continue
        path = real_path(name)
        if path.is_dir():
            raise InputError(f"cannot write {name}: it is a directory")
        if not path.parent.is_dir():
            raise InputError(f"cannot write {name}: there is no directory {path.parent}")
        if not os.access(path.parent, os.W_OK):
            raise InputError(f"cannot write {name}: the directory {path.parent} is not writable")


def write_outputs(result: Profile | Comparison, json_file: str | None, plot: Path | None) -> bool:
    """Write plot and JSON where asked for; whether standard output is left for text."""
    if plot is not None:
        from signalprop.report.plots import save_plot

        save_plot(plot, result)
    if json_file is not None:
        write_json(json_file, result.to_json())
    return json_file != "-"


def write_result(json_file: str | None, value: Any) -> bool:
    """Write a JSON value where asked for; whether standard output is left for text."""
    if json_file is not None:
        write_json(json_file, value)
    return json_file != "-"


def echo_findings(lines: list[str], warnings: list[str], json_file: str | None, plot: Path | None) -> None:
    """Print what stands under a table: numbers, warnings, and the files that were written."""
    echo()
    for line in lines:
        echo(line)
    for line in warnings:
        echo(f"{'warning':<20}{line}")
    for name, path in (("json", json_file), ("plot", plot)):
        if path is not None:
            echo(f"{name:<20}{path}")


def report_file(report: Path | None, no_report: bool, json_file: str | None) -> ReportFile | None:
    """Where the report goes; None for no report, which is the default where JSON on standard output is for a program.

    Raises:
        InputError: both --report and --no-report, or a file that could not be written. MissingExtra: a report that was
            asked for, without plotly.
    """
    if report is None:
        return None if no_report or json_file == "-" else ReportFile(Path(REPORT), asked=False)
    if no_report:
        raise InputError("--report and --no-report exclude each other; leave one out")
    if str(report) == "-":
        raise InputError("--report needs the name of a file; standard output is for the result")
    check_outputs(str(report))
    require("plotly", "report")
    return ReportFile(report, asked=True)


def write_report(file: ReportFile | None, items: Sequence[tuple[str, Item]]) -> None:
    """Write the report and say so on stderr; one that nobody asked for and that cannot be written costs a line only."""
    if file is None:
        return
    from signalprop.report.html import write_report as written

    try:
        written(file.path, items)
    except (InputError, MissingExtra) as error:
        if file.asked:
            raise
        print(f"no report: {error}", file=sys.stderr)
    else:
        print(f"report: {file.path}", file=sys.stderr)


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Progress on stderr: a bar on a terminal, else at most ten lines; yields a function (done, total) -> None."""
    if not sys.stderr.isatty():

        def report(done: int, total: int) -> None:
            if 10 * done // total > 10 * (done - 1) // total:
                print(f"{label}: {done} of {total}", file=sys.stderr)

        yield report
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def sections() -> Iterator[Callable[[str, int, int], None]]:
    """Progress of work in named parts: yields a function (part, done, total) -> None; a `progress` for every part."""
    open_parts: dict[str, Callable[[int, int], None]] = {}
    with ExitStack() as stack:

        def report(part: str, done: int, total: int) -> None:
            if part not in open_parts:
                stack.close()  # the part before is over
                open_parts[part] = stack.enter_context(progress(part))
            open_parts[part](done, total)

        yield report

"""What commands do with a result: checks before the long work, JSON, plot, text, progress."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import typer

from signalprop.errors import InputError, MissingExtra, as_line, printable, require
from signalprop.files.storage import real_path, write_json

if TYPE_CHECKING:
    from signalprop.prediction import Cost
    from signalprop.report.html import Item
    from signalprop.results.findings import Findings, Severity
    from signalprop.results.profile import Profile


def echo(text: str = "", *, nl: bool = True, style: str = "") -> None:
    """Print on standard output; a terminal gets sentences folded, and no name from a file can steer it."""
    text, columns = printable(text), room()
    if columns is not None:
        from signalprop.network.shown import wrapped

        text = wrapped(text, columns)
    if not style or columns is None:
        typer.echo(text, nl=nl)
        return
    from rich.console import Console
    from rich.text import Text

    Console(highlight=False).print(Text(text, style=style), soft_wrap=True)


# Whether the running command has --overwrite.
OVERWRITE: ContextVar[bool] = ContextVar("overwrite", default=False)


def check_outputs(*names: str | Path | None, plot: Path | None = None) -> None:
    """Refuse, before the long work starts, files that could not be written or that are there without --overwrite."""
    if plot is not None and is_page(plot):
        require("plotly", "report")
    elif plot is not None:
        from signalprop.report.plots import check_format

        check_format(plot)
        require("matplotlib", "report")
    for name in (*names, plot):
        if name is None or str(name) == "-":
            continue
        target = real_path(name)
        if target.is_dir():
            raise InputError(f"cannot write {name}: it is a directory")
        if target.is_file() and not OVERWRITE.get():
            raise InputError(f"cannot write {name}: it is there already; give --overwrite, or choose another name")
        check_parent(name)


def check_parent(name: str | Path) -> None:
    """Raise InputError where the directory that a file or directory is to be in is not there, or not writable."""
    parent = real_path(name).parent
    if not parent.is_dir():
        raise InputError(f"cannot write {name}: there is no directory {parent}")
    if not os.access(parent, os.W_OK):
        raise InputError(f"cannot write {name}: the directory {parent} is not writable")


class File(NamedTuple):
    """A file or directory that a command was asked for: what it is called under the result, and what writes it."""

    label: str
    path: Path | None
    write: Callable[[Path], object]


def is_page(plot: Path) -> bool:
    """Whether --plot names an interactive page, not a picture."""
    return plot.suffix.lower() in (".html", ".htm")


def picture(path: Path | None, draw: Callable[[], Any], items: Callable[[], Sequence[tuple[str, Item]]]) -> File:
    """What --plot writes: a page of the items, or the matplotlib figure that `draw` makes."""

    def save(path: Path) -> None:
        from signalprop.report.html import write_report
        from signalprop.report.plots import save_figure

        if is_page(path):
            write_report(path, items())
        else:
            save_figure(path, draw)

    return File("plot", path, save)


class _Delivery:
    """What became of the results of a command: each is handed out whatever became of the others."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.reader_left: BrokenPipeError | None = None

    def tried(self, write: Callable[[], object]) -> bool:
        """Whether writing went well."""
        try:
            write()
            if sys.stdout is not None:  # none: it was closed before the start
                sys.stdout.flush()
        except BrokenPipeError as error:
            self.reader_left = error
        except (InputError, MissingExtra) as error:
            self.problems.append(str(error))
        except Exception as error:  # a fault in one result must not cost another
            if os.environ.get("SIGNALPROP_DEBUG"):
                traceback.print_exc()
            self.problems.append(f"{type(error).__name__}: {error} (SIGNALPROP_DEBUG=1 shows where)")
            drop_what_nobody_takes()
        else:
            return True
        return False


def drop_what_nobody_takes() -> None:
    """Where standard output takes nothing more, what waits for it goes: it would fail again at every later line."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        send_to_nobody()


def send_to_nobody() -> None:
    """Discard standard output from now on."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)


def deliver(
    json_file: str | None,
    value: Callable[[], Any],
    show: Callable[[], object],
    *files: File,
    page: Path | None = None,
    items: Callable[[], Sequence[tuple[str, Item]]] = tuple,
    failure: str | None = None,
) -> None:
    """Hand out the results of a command: JSON, then text, then pictures and other files, then the report.

    One that cannot be written does not keep those after it from being written. What was written is listed under the
    text, what could not be is said at the end, a line each.

    Args:
        value: makes the JSON value, for `json_file` (`-`: standard output, which then holds nothing else). show: prints
            the text. files: those without a path were not asked for. page: where the report goes; items: what is in it.
        failure: what the result itself says against the model, a line for stderr.

    Raises:
        typer.Exit: with status 1, where something could not be written, or for `failure`.
    """
    done = _Delivery()
    text = json_file != "-"
    written: list[tuple[str, str | Path]] = []
    if json_file is not None and done.tried(lambda: write_json(json_file, value())):
        written.append(("json", json_file))
    if text:
        done.tried(show)
    written += [(f.label, p) for f in files if (p := f.path) is not None and done.tried(partial(f.write, p))]
    if text:
        done.tried(lambda: facts(*written))
    if page is not None:
        done.tried(lambda: _write_report(page, items()))
    for line in done.problems if failure is None else [*done.problems, failure]:
        note(line)
    if done.problems or failure is not None:
        raise typer.Exit(1)
    if done.reader_left is not None:
        raise done.reader_left


def note(line: str) -> None:
    """A line on stderr, after the name of the command; a terminal gets it folded."""
    from signalprop.network.shown import wrapped

    text = f"signalprop: {as_line(line)}"
    print(wrapped(text, shutil.get_terminal_size().columns) if sys.stderr.isatty() else text, file=sys.stderr)


LONG, _LARGE = 10, 1e9  # seconds and bytes from which work says beforehand what it takes
_LONGEST = 600  # seconds of work that is begun though nobody said how it should be done


def announce(
    costs: Sequence[Cost], *, chosen: bool = True, less: str = "fewer layers (--layers) or tokens (--seq-len)"
) -> None:
    """Say on stderr what work takes, one part after the other, where that is long or much.

    Args:
        chosen: somebody said how it is to be done; else work of more than ten minutes is refused.
        less: what would take less, in words; empty: nothing does.
    """
    seconds, most = sum(cost.seconds for cost in costs), max((cost.bytes for cost in costs), default=0.0)
    memory = f" and {most / 1e9:.1f} GB of memory" if most > _LARGE / 10 else ""
    takes = f"about {seconds:,.0f} s{memory}{less and f'; {less} take less'}"
    if not chosen:
        refuse_hours(costs, takes)
    if seconds > LONG or most > _LARGE:
        note(f"this takes {takes}")


def refuse_hours(costs: Sequence[Cost], takes: str = "") -> None:
    """Refuse work of more than ten minutes that nobody chose to be done in this way; `takes`: its cost in words."""
    seconds = sum(cost.seconds for cost in costs)
    if seconds > _LONGEST:
        takes = takes or f"about {seconds:,.0f} s or more; fewer layers (--layers) take less"
        raise InputError(f"this would take {takes}; choose predict with --fidelity moments (the fastest) or kernel")


def facts(*lines: tuple[str, object]) -> None:
    """Print what there is to say, a line each, under its name."""
    for name, text in lines:
        echo(f"{name:<20}{text}")


def _write_report(path: Path, items: Sequence[tuple[str, Item]]) -> None:
    """Write the page of a run or a sweep and say so on stderr; one that cannot be written costs a line only."""
    from signalprop.report.html import write_report

    try:
        write_report(path, items)
    except (InputError, MissingExtra) as error:
        print(f"no report: {error}", file=sys.stderr)
    else:
        print(f"report: {path}", file=sys.stderr)


_MANY = 8  # lines of warnings from which the table is short
SCREEN = 24  # lines of a terminal that a result without --all takes
FOUND = 3  # exit status of a command that found what --fail-on names


def check_severity(severity: str | None) -> None:
    """Refuse a --fail-on that names none, before the long work."""
    from signalprop.results.findings import SEVERITIES

    if severity is not None and severity not in SEVERITIES:
        raise InputError(f"--fail-on is {severity!r:.80}; expected {', '.join(SEVERITIES)}")


def fail_on(findings: Findings, severity: str | None) -> None:
    """End with status 3 where a finding is as severe as --fail-on says, or more.

    Raises:
        InputError: an unknown severity. typer.Exit: such a finding.
    """
    check_severity(severity)
    if severity is not None and findings.at_least(cast("Severity", severity)):
        raise typer.Exit(FOUND)


def echo_profile(
    profile: Profile,
    table: Callable[..., str],
    *more: str,
    all_rows: bool = False,
    judged: Profile | None = None,
    numbers: bool = True,
    whole: str = "--all",
) -> None:
    """Print what a profile is of and the verdict, a table, and the profile's `numbers` with its notes.

    Args:
        table: makes it; of `errors` and, for all rows, `max_rows`. more: what is printed between the table and the
            numbers.
        judged: the profile that the verdict is of, where it is another one. whole: what prints everything.
    """
    from signalprop.report import findings

    warnings = findings.warnings(profile if judged is None else judged)
    top = [*findings.headline(profile), *(f"{'warning':<20}{line}" for line in warnings)]
    if not warnings:
        top.append(f"{'verdict':<20}nothing to warn of")
    for line in top:
        style = "bold red" if line.startswith("warning") else "bold green" if line.startswith("verdict") else ""
        echo(line, style=style)
    rows = {"max_rows": None} if all_rows else {"max_rows": 3} if _lines("\n".join(top)) > _MANY else {}
    tables = "".join(f"\n{text}\n" for text in (_fitting(table, **rows), *more))
    echo(tables)
    if numbers:
        facts = findings.summary(profile)
        echo("\n".join(facts if all_rows else _within(facts, SCREEN - _lines("\n".join(top) + "\n" + tables), whole)))


def _lines(text: str) -> int:
    """Lines of a terminal of 80 columns."""
    from signalprop.network.shown import wrapped

    return wrapped(text).count("\n") + 1


def _within(lines: list[str], room: int, whole: str) -> list[str]:
    """The lines, without the last notes and remarks where they do not fit into so many lines of a terminal."""
    shown, hidden = list(lines), 0
    spare = [line for line in lines if line.startswith(("note ", " " * 20))]
    while spare and _lines("\n".join(shown)) + (hidden > 0) > room:
        shown.remove(spare.pop())
        hidden += 1
    return [*shown, *([f"{'notes':<20}{hidden} more; {whole} prints them"] if hidden else [])]


def deliver_profile(profile: Profile, json_file: str | None, plot: Path | None, *, all_rows: bool) -> None:
    """`deliver` of a profile alone."""
    from signalprop.report.tables import profile_table

    table = partial(profile_table, profile)
    show = partial(echo_profile, profile, table, all_rows=all_rows)
    deliver(json_file, profile.to_json, show, picture(plot, profile.plot, lambda: [(profile.scheme, profile)]))


def _fitting(table: Callable[..., str], **rows: int | None) -> str:
    """A table, without its standard errors where the terminal is too narrow for them."""
    text = table(**rows)
    columns = room()
    return table(errors=False, **rows) if columns and max(map(len, text.splitlines())) > columns else text


def room() -> int | None:
    """Columns of the terminal that is written to; None where it is not one."""
    return shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else None


def free(path: Path) -> Path:
    """The path, or the first with a number after its name that no file has: report.html, report-2.html."""
    names = (path.with_stem(f"{path.stem}-{number}") for number in count(2))
    return next(found for found in chain((path,), names) if not found.is_file())


def page_of(kind: str, subject: str) -> Path:
    """The name of a page that nobody named, in the current directory: comparison-gpt2.html; a free one."""
    name = Path(subject).stem if Path(subject).is_file() else Path(subject).name or Path(subject).resolve().name
    return free(Path(f"{kind}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)[:60]}.html"))


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Progress on stderr: a bar on a terminal, else at most ten lines; yields a function (done, total) -> None."""
    if not sys.stderr.isatty():
        began = time.monotonic()

        def report(done: int, total: int) -> None:
            if 10 * done // total > 10 * (done - 1) // total:
                left = (time.monotonic() - began) * (total - done) / done
                print(f"{label}: {done} of {total}{f', about {left:.0f} s left' * (left > 5)}", file=sys.stderr)

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

"""`signalprop sweep`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from textwrap import fill
from typing import Annotated

import typer

from signalprop.cli import output
from signalprop.results.text import columns


def sweep(
    source: Annotated[
        str | None,
        typer.Argument(metavar="SWEEP", help="A YAML file, or the name of a sweep; none: list them."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Runs and results (default: sweeps/NAME).")
    ] = None,
    stored: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="FILE", help="A results.json of this sweep; its finished runs are not run again."
        ),
    ] = None,
    jobs: Annotated[
        int,
        typer.Option(
            "--jobs", min=0, max=1024, help="Processes, a run at a time each; 0: run nothing, write what is there."
        ),
    ] = 1,
    plan: Annotated[
        bool, typer.Option("--plan", help="Run nothing: print the runs, and which of the paper's effects they can see.")
    ] = False,
) -> None:
    """Train every run of a sweep: schemes, sizes, rates, seeds.

    Finished runs stay: the same command goes on after an interruption, and joins in on other machines that have the
    directory. Exit status 1 if a run failed.

    \b
    Example: signalprop sweep sweep-tgs-tab11 --plan
    """
    from signalprop.errors import InputError, MissingExtra, require
    from signalprop_lab.training.grid import load_sweep, shipped_sweeps

    require("yaml", "training")
    if source is None:
        output.echo(f"{columns(shipped_sweeps())}\n\n`signalprop sweep NAME --plan`: what it compares, and its runs")
        return
    require("filelock", "training")
    from signalprop_lab.report.sweeps import of_results
    from signalprop_lab.training.sweep import SWEEP, least_runs, prepare, to_stderr
    from signalprop_lab.training.sweep import sweep as run
    from signalprop_lab.training.tables import results_table, store_of, stored_entries, verdict_lines, writers
    from signalprop_lab.training.verdicts import foresight, verdicts

    grid = load_sweep(source)
    told = foresight(grid.sweep)
    if not told and any(check.less is not None for check in grid.sweep.verdict):
        told = ["which differences these runs can see is not known: the sweep gives no spread between seeds"]
    if (paper := grid.sweep.paper) is not None:
        told.append(
            f"the paper: {paper.variant}; warm-up {paper.warm_up}; rates {paper.rates}; {paper.per_parameter:g} "
            f"{paper.unit} per parameter"
        )
    if plan:
        lines = [grid.sweep.title, f"{len(grid.cells)} cells, at least {least_runs(grid)} runs", *told]
        output.echo("\n".join(fill(line, 80) for line in lines))
        return
    folder = out or Path("sweeps") / grid.sweep.name
    if not jobs and stored is None and not (folder / SWEEP).is_file():
        raise InputError(f"there are no runs in {folder}; start them without --jobs 0, or name --out")
    entries = [] if stored is None else stored_entries(grid, stored)
    runs = prepare(grid, folder)
    if stored is not None:
        to_stderr(f"{sum(map(runs.put, entries))} finished runs taken from {stored}")
    try:
        if jobs:
            for line in told:
                to_stderr(line)
            run(grid, folder, jobs=jobs)
    except BaseException:  # what was done until an interruption
        for path, write in writers(store_of(grid, runs.entries()), folder).items():
            with suppress(InputError, MissingExtra):
                write(path)
        raise
    store = store_of(grid, runs.entries())
    failed = store["failed"]
    output.deliver(
        None,
        lambda: store,
        lambda: output.echo("\n".join([results_table(store), *verdict_lines(verdicts(store))])),
        *(output.File(path.suffix[1:], path, write) for path, write in writers(store, folder).items()),
        page=folder / "report.html",
        items=lambda: [(grid.sweep.name, of_results(store, folder))],
        failure=f"{len(failed)} run{'s' * (len(failed) > 1)} failed; {failed[0]['cell']}: {failed[0]['error']}"
        if failed
        else None,
    )

"""Running a sweep: as many processes as wanted, each of which takes the next run until none is left.

What is finished is kept in and beside the runs' directories, so that a sweep that was stopped, by whatever, goes on
where it was, and a sweep that has got more cells, seeds or values runs only those.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import secrets
import shutil
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from signalprop.errors import InputError, printable
from signalprop.files.storage import finite, make_folder, read_json, write_json
from signalprop.files.validation import typed
from signalprop_lab.training.grid import Grid, Point, load_sweep
from signalprop_lab.training.json_lines import read_lines
from signalprop_lab.training.ladder import alternatives, best_rung, rungs, wanted_of_cells
from signalprop_lab.training.recipe import Recipe
from signalprop_lab.training.run_locks import Entry, RunLock, Runs, refuse_other_settings
from signalprop_lab.training.sweep_cells import number
from signalprop_lab.training.tables import duration
from signalprop_lab.training.verdicts import course_of

__all__ = ["sweep"]

INTERRUPTED = 130  # exit status of a process that was
SWEEP = "sweep.json"  # what a sweep's directory has from its beginning on
POLL = 1.0  # seconds between two looks at what other processes do
Train = Callable[..., Any]  # as `signalprop_lab.training.run.train`
Costs = dict[str, dict[tuple[float | None, int], float]]


def real_train(recipe: Recipe, out: Path, **options: Any) -> Any:
    """`signalprop_lab.training.run.train`, imported when it is needed, without bars and warnings of transformers."""
    from signalprop.diagnosis.loading import quiet
    from signalprop_lab.training.run import train

    quiet()
    return train(recipe, out, **options)


# --- what is wanted ---------------------------------------------------------------------------------------------------


def costs(grid: Grid, entries: Sequence[Entry]) -> Costs:
    """By cell: the cost of every run that is done."""
    found: Costs = {name: {} for name in grid.cells}
    for entry in entries:
        if entry.row is not None and entry.point.cell in found:
            found[entry.point.cell][entry.point.rate, entry.point.seed] = grid.sweep.cost_of(entry.row)
    return found


def open_points(grid: Grid, found: Costs) -> list[Point]:
    """Runs that the sweep lacks, as far as is known now: first the ladder of every cell, then beyond, then seeds."""
    ordered = []
    for i, (cell, runs) in enumerate(wanted_of_cells(grid.sweep, found).items()):
        for j, run in enumerate(runs):
            ordered.append(((run.stage, j, i), Point(cell, run.rate, run.seed)))
    return [point for _, point in sorted(ordered, key=lambda item: item[0])]


# --- one process ------------------------------------------------------------------------------------------------------


def work(runs: Runs, train: Train, jobs: int = 1) -> None:
    """Take runs and train them until none is left, others' included.

    Raises:
        KeyboardInterrupt: a run was stopped from outside; it goes on with the next call.
        InputError: the score that the sweep asks for does not exist.
    """
    while True:
        entries = runs.entries()
        spent = {entry.point for entry in entries if entry.session == runs.session and entry.error}
        left = [point for point in open_points(runs.grid, costs(runs.grid, entries)) if point not in spent]
        taken = next((claim for point in left if (claim := runs.take(point)) is not None), None)
        if taken is not None:
            try:
                _one(runs, train, taken, jobs)
            finally:
                taken.release()
        elif left:
            time.sleep(POLL)  # what others find decides what is wanted next
        else:
            return


def _one(runs: Runs, train: Train, claim: RunLock, jobs: int) -> None:
    grid, point = runs.grid, claim.entry.point
    recipe, folder = grid.recipe(point), runs.out / grid.directory(point)
    models = grid.sweep.keep == "models"
    try:
        make_folder(folder)
        bar = jobs == 1 and sys.stderr.isatty()
        result = train(recipe, folder, resume=True, progress=bar, final=models)
        row = row_of(result.to_json(), folder)
    except Exception as error:  # one run's trouble is not that of the others
        if os.environ.get("SIGNALPROP_DEBUG"):
            raise
        reason = " ".join(f"{'' if isinstance(error, InputError) else f'{type(error).__name__}: '}{error}".split())
        claim.write(error=reason[:500])
        to_stderr(f"{shown(grid, point)} failed: {reason[:300]}")
        return
    if row["status"] == "stopped":
        raise KeyboardInterrupt
    grid.sweep.score_of(row)  # it has one
    if not models:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    claim.write(row=row)
    to_stderr(progress_line(grid, runs.entries(), point, row, jobs))


def row_of(result: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A run's result, the course of its loss, and where it comes from: versions, machine, git revision."""
    row: dict[str, Any] = {key: value for key, value in finite(dict(result)).items() if key != "schema"}
    try:
        environment = read_json(folder / "environment.json")
    except InputError:
        environment = {}  # the run is what counts
    if (course := course_of(read_lines(folder / "metrics.jsonl"), result["steps"])) is not None:
        row["course"] = course
    row["revision"] = environment.get("git")
    row["environment"] = {key: environment[key] for key in ("versions", "machine", "device") if key in environment}
    return row


def shown(grid: Grid, point: Point) -> str:
    """A run in words."""
    tune = grid.sweep.tune
    rate = f" {'lr' if tune.column == 'learning_rate' else tune.column}={point.rate:g}" if tune and point.rate else ""
    return f"{point.cell}{rate} seed={point.seed}"


def progress_line(grid: Grid, entries: Sequence[Entry], point: Point, row: Mapping[str, Any], jobs: int) -> str:
    """How far the sweep is, what this run came to, what is best in its cell, and how long the rest may take."""
    sweep, found = grid.sweep, costs(grid, entries)
    done, left = sum(len(runs) for runs in found.values()), outstanding(grid, found)
    n_left = sum(left.values())
    rest = f", about {duration(expected_seconds(entries, left) / jobs)} left" if n_left else ""
    score = sweep.score_of(row)
    text = row["status"] if score is None else f"{sweep.score} {number(score)}"
    own = found[point.cell]
    best = best_rung(sweep, own)
    cost = own.get((best, sweep.seeds[0]), math.inf)
    if sweep.tune is not None and math.isfinite(cost):
        text += f"; best of the cell {number(abs(cost))} at {best:g}"
    return f"{done}/{done + n_left} runs{rest}: {shown(grid, point)}: {text}"


def outstanding(grid: Grid, found: Costs) -> dict[str, int]:
    """By cell, how many runs there are still to do, if no ladder has to be extended further."""
    sweep = grid.sweep
    left = {}
    walked = {name for names in alternatives(sweep).values() for name in names if name != names[len(names) // 2]}
    for cell, wanted in wanted_of_cells(sweep, found).items():
        n_rungs, n_seeds = len(rungs(sweep.tune, found[cell])), len(sweep.seeds)
        all_in_all = n_rungs * n_seeds if sweep.seeds_at == "all" else n_rungs + (n_seeds - 1) * (not sweep.best_of)
        left[cell] = max((1 if cell in walked else all_in_all) - len(found[cell]), len(wanted))
    return left


def least_runs(grid: Grid) -> int:
    """How many runs the whole sweep takes, if no ladder has to be extended."""
    return sum(outstanding(grid, costs(grid, [])).values())


def expected_seconds(entries: Sequence[Entry], left: Mapping[str, int]) -> float:
    """Of the runs that are left: as long as those of the same cell, or of any, took in the mean."""
    took: dict[str, list[float]] = {}
    for entry in entries:
        if entry.row is not None and entry.row.get("seconds") is not None:
            took.setdefault(entry.point.cell, []).append(float(entry.row["seconds"]))
    if not took:
        return 0.0
    anywhere = statistics.fmean(itertools.chain(*took.values()))
    return math.fsum(n * (statistics.fmean(took[cell]) if cell in took else anywhere) for cell, n in left.items())


# --- many processes ---------------------------------------------------------------------------------------------------


def to_stderr(line: str) -> None:
    """One line of progress."""
    print(f"sweep: {printable(line)}", file=sys.stderr, flush=True)


@typed
def sweep(
    source: str | Path | Grid,
    out: Path,
    *,
    jobs: int = 1,
    train: Train = real_train,
) -> list[Entry]:
    """Run what a sweep lacks; what is known of every run.

    Args:
        source: a YAML file, or a sweep that comes with the package. out: its directory; what is there is not run again.
        jobs: processes. train: what trains; a function of a module where there are several processes.

    Raises:
        InputError: the sweep or a cell of it is wrong, or `out` holds runs of other settings.
        KeyboardInterrupt: it was interrupted; the next call goes on.
    """
    runs = prepare(source if isinstance(source, Grid) else load_sweep(source), out)
    if jobs == 1:
        work(runs, train)
    else:
        _work_together(runs, jobs, train)
    return runs.entries()


def prepare(grid: Grid, out: Path) -> Runs:
    """The runs of a sweep in a directory, with what is finished already."""
    try:
        make_folder(out / "runs")
    except OSError as error:
        raise InputError(f"cannot make {out}: {error.strerror}; choose another directory") from None
    runs = Runs(grid, out, secrets.token_hex(8))
    refuse_other_settings(grid, runs.entries(), out)
    write_json(out / SWEEP, grid.sweep.to_json())
    return runs


def _work_together(runs: Runs, jobs: int, train: Train) -> None:
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    processes = [context.Process(target=_process, args=(i, runs, jobs, train)) for i in range(jobs)]
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = before or str(max(1, (os.cpu_count() or 1) // jobs))
    try:
        for process in processes:
            process.start()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
    try:
        for process in processes:
            process.join()
    except (KeyboardInterrupt, SystemExit):  # the latter by SIGTERM
        _stop(processes)
        raise
    codes = [process.exitcode for process in processes]
    if INTERRUPTED in codes:
        raise KeyboardInterrupt
    broken = [code for code in codes if code]
    if broken:
        to_stderr(f"{len(broken)} of {jobs} processes ended with status {broken[0]}")
    if len(broken) == jobs:
        raise ChildProcessError("every process of the sweep has failed; --jobs 1 shows why")


def _stop(processes: Sequence[Any]) -> None:
    """Let runs write their checkpoints and end; a second interruption ends them at once."""
    for process in processes:
        process.terminate()
    try:
        for process in processes:
            process.join()
    except KeyboardInterrupt:
        for process in processes:
            process.kill()


def _process(i: int, runs: Runs, jobs: int, train: Train) -> None:
    """One of several processes. Its parent says when it is to end, and it ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: it goes to all processes, of which one decides
    signal.signal(signal.SIGTERM, _interrupt)
    threading.Thread(target=_follow, daemon=True).start()
    own_device(i)
    try:
        work(runs, train, jobs)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except InputError as error:
        to_stderr(str(error))
        sys.exit(2)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _follow() -> None:
    """End this process when its parent has ended."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def own_device(i: int) -> None:
    """Of several GPUs, one for this process; it has not touched them yet."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # the driver's, without the seconds that importing torch takes
    there = [file for file in Path("/dev").glob("nvidia*") if file.name.removeprefix("nvidia").isdigit()]
    devices = visible.split(",") if visible is not None else [str(n) for n in range(len(there))]
    if len(devices) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[i % len(devices)]

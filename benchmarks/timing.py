"""Times of variants that take turns, what is made of them, and the record that a benchmark leaves.

A record is {"machine", "versions", "date", "revision", "command", "seconds", "section"}; the section is Markdown.
"""

from __future__ import annotations

import datetime
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from signalprop_lab.training.environment import processor
from signalprop_lab.training.tables import markdown_table as table

PACKAGES = ("signalprop", "numpy", "pydantic", "typer", "torch", "transformers")
_BEGAN = time.time()
_LOAD_AT_START = os.getloadavg()[0]


def one_thread() -> None:
    """Keep NumPy's BLAS, and torch where it is loaded, to one thread of this process."""
    from threadpoolctl import threadpool_limits

    threadpool_limits(1)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def take_turns(
    actions: Mapping[str, Callable[[], Any]],
    rounds: int,
    *,
    clock: Callable[[], float] = time.process_time,
    warm_up: int = 1,
) -> dict[str, list[float]]:
    """Seconds of every action in every round. The order changes from round to round, so that a busy machine, caches
    and the clock of the processor meet all alike.

    Args:
        clock: CPU time of this process, by default.
        warm_up: times that each action runs before anything is counted.
    """
    for run in actions.values():
        for _ in range(warm_up):
            run()
    names = list(actions)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        for j in np.random.default_rng(i).permutation(len(names)):
            began = clock()
            actions[names[j]]()
            seconds[names[j]].append(clock() - began)
    return seconds


def ratios(seconds: Mapping[str, Sequence[float]], base: str) -> dict[str, dict[str, float]]:
    """Summaries of every action's time over that of `base` in the same round."""
    return {
        name: summary([own / other for own, other in zip(values, seconds[base], strict=True)])
        for name, values in seconds.items()
        if name != base
    }


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles, and the standard error of the median (1.253 s / sqrt(n), normal errors; of one value 0)."""
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    spread = (high - low) / 1.349  # a standard deviation that outliers do not move
    error = 1.253 * spread / math.sqrt(len(values))
    return {"median": median, "low": low, "high": high, "standard_error": error, "n": len(values)}


def shown(found: Mapping[str, float], digits: int = 3) -> str:
    """A summary as a cell of a table: median ± standard error [quartiles]; of one value that."""
    if found["n"] == 1:
        return f"{found['median']:.{digits}f} (one run)"
    numbers = {key: f"{found[key]:.{digits}f}" for key in ("median", "standard_error", "low", "high")}
    return "{median} ± {standard_error} [{low}, {high}]".format(**numbers)


def duration(seconds: float) -> str:
    """In milliseconds, or from one second on in seconds."""
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def compact(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table whose columns are not aligned, for long ones."""
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [header, ["---"] * len(header), *rows])


def compared(title: str, seconds: Mapping[str, Sequence[float]], base: str, **more: Mapping[str, str]) -> str:
    """A table: the time of every variant, and what it is of that of `base`.

    Args:
        more: further columns, by variant.
    """
    over = ratios(seconds, base)
    rows = [
        [name, duration(statistics.median(values)), shown(over[name]) if name in over else "",
         *(column.get(name, "") for column in more.values())]
        for name, values in seconds.items()
    ]  # fmt: skip
    return f"{title}\n\n{table(['variant', 'time', f'over *{base}*', *more], rows)}"


def machine() -> dict[str, Any]:
    """What the numbers were taken on. The load average counts this process too."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "load_average": {"start": round(_LOAD_AT_START, 2), "end": round(os.getloadavg()[0], 2)},
    }


def versions() -> dict[str, str]:
    """Of Python, of NumPy's BLAS, and of the packages that this process has loaded."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]  # type: ignore[index]
    found = {"python": platform.python_version(), "blas": f"{blas['name']} {blas['version']}"}
    for name in PACKAGES:
        if name in sys.modules:
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:  # read from its sources
                continue
    return found


def revision() -> str:
    """The commit that is measured, with `-dirty` where its code has changed since; '' outside of a repository."""

    def git(*words: str) -> str:
        where = Path(__file__).parent.parent
        return subprocess.run(["git", *words], capture_output=True, text=True, cwd=where, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--", "src", "benchmarks")
    return git("rev-parse", "--short=8", "HEAD") + ("-dirty" if changed else "")


def record(name: str, section: str) -> dict[str, Any]:
    """A benchmark's section of the page, with all that its numbers depend on."""
    return {
        "machine": machine(),
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
        "revision": revision(),
        "command": f"python -m benchmarks {name}",
        "seconds": round(time.time() - _BEGAN, 1),
        "section": section,
    }

"""Times of variants that take turns, what is made of them, and the record that a benchmark writes.

A record is {"machine", "versions", "date", "command", "rows"}; `benchmarks.page` writes docs/benchmarks.md from them.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from signalprop.files.storage import write_json

PACKAGES = ("signalprop", "numpy", "pydantic", "typer", "torch", "transformers")
_BEGAN = time.time()
_LOAD_AT_START = os.getloadavg()[0]


def command_line(doc: str | None) -> argparse.ArgumentParser:
    """The parser of a benchmark that is its module's docstring and `--json FILE`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the numbers to this file")
    return parser


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
    """Median, quartiles, and the standard error of the median (1.253 s / sqrt(n), normal errors)."""
    low, median, high = statistics.quantiles(values, n=4)
    spread = (high - low) / 1.349  # a standard deviation that outliers do not move
    return {
        "median": median,
        "low": low,
        "high": high,
        "standard_error": 1.253 * spread / math.sqrt(len(values)),
        "n": len(values),
    }


def shown(found: Mapping[str, float], digits: int = 3) -> str:
    """A summary as a cell of a table: median ± standard error [quartiles]."""
    numbers = {key: f"{found[key]:.{digits}f}" for key in ("median", "standard_error", "low", "high")}
    return "{median} ± {standard_error} [{low}, {high}]".format(**numbers)


def machine() -> dict[str, Any]:
    """What the numbers were taken on. The load average counts this process too."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "load_average": {"start": round(_LOAD_AT_START, 2), "end": round(os.getloadavg()[0], 2)},
    }


def versions() -> dict[str, str]:
    """Of Python, of NumPy's BLAS, and of the packages that this process has loaded."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]  # type: ignore[index]
    found = {"python": platform.python_version(), "blas": f"{blas['name']} {blas['version']}"}
    return found | {name: metadata.version(name) for name in PACKAGES if name in sys.modules and _installed(name)}


def command() -> str:
    """The command that started this process, without where its record goes."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    words = ["python", "-m", module.name.removesuffix(".__main__")] if module else ["python", Path(sys.argv[0]).name]
    arguments = iter(sys.argv[1:])
    for argument in arguments:
        if argument == "--json":
            next(arguments, None)
        elif not argument.startswith("--json="):
            words.append(argument)
    return " ".join(words)


def record(rows: Sequence[Mapping[str, Any]], peers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The rows of a benchmark with all that they depend on.

    Args:
        peers: versions of packages that ran in environments of their own.
    """
    return {
        "machine": machine(),
        "versions": versions() | dict(peers or {}),
        "date": datetime.date.today().isoformat(),
        "command": command(),
        "seconds": round(time.time() - _BEGAN, 1),
        "rows": list(rows),
    }


def write_rows(path: str | None, rows: Sequence[Mapping[str, Any]], peers: Mapping[str, str] | None = None) -> None:
    """Write the record of a benchmark as JSON, where a file is named."""
    if path:
        write_json(path, record(rows, peers))


def _processor() -> str:
    """Its name as Linux has it, or as Python does."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _installed(package: str) -> bool:
    """Whether it has a version: a package read from its sources has none."""
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True

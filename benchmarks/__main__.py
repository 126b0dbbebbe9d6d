"""Timed benchmarks, one after the other, and the page records/benchmarks.md.

    python -m benchmarks                 # all, in less than half an hour of two cores
    python -m benchmarks NAME ...        # some; the page takes the others from their records
    python -m benchmarks --page          # only the page

Each runs as one process on one thread, and writes records/benchmarks/NAME.json; peers run in environments that
`benchmarks.peers` makes under out/, once. A section that fails says so, and the others run. `benchmarks.accuracy` and
others are separate commands.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import traceback

from benchmarks.page import MODULES, RECORDS, ROOT, write_page
from benchmarks.timing import one_thread, record
from signalprop.files.storage import write_json

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def measure(name: str) -> None:
    """Measure one in this process, and write its record."""
    module = importlib.import_module(f"benchmarks.{name}")
    one_thread()
    parts = []
    try:
        for part in module.measured():
            print(part, end="\n\n", flush=True)
            parts.append(part)
    except Exception as error:
        traceback.print_exc()
        parts.append(f"The rest did not run here: {type(error).__name__}: {error}"[:400])
    write_json(RECORDS / f"{name}.json", record(name, "\n\n".join(parts)))


def in_a_process(name: str) -> None:
    """Measure one in a process of its own."""
    command = [sys.executable, "-m", "benchmarks", "--here", name]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | ONE_THREAD)


def main() -> None:
    """Command line of the package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODULES)}")
    parser.add_argument("--page", action="store_true", help="run nothing")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in MODULES]
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(MODULES)}")
    RECORDS.mkdir(exist_ok=True)
    for name in given.names or ([] if given.page else MODULES):
        if given.here:
            measure(name)
        else:
            print(f"== {name}", flush=True)
            in_a_process(name)
    if not given.here:
        write_page()


if __name__ == "__main__":
    main()

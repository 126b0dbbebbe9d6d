"""Timed benchmarks, one after the other, and the page docs/benchmarks.md.

    python -m benchmarks                 # all, in less than half an hour on one core
    python -m benchmarks NAME ...        # some, also those in a browser; the page takes the others from their records
    python -m benchmarks --page          # only the page

Each is a process of its own, on one thread, and writes docs/benchmarks/NAME.json. `benchmarks.accuracy` and
others have commands of their own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from benchmarks.page import IN_A_BROWSER, MODULES, RECORDS, ROOT, write_page

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def main() -> None:
    """Command line of the package."""
    known = (*MODULES, *IN_A_BROWSER)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    parser.add_argument("--page", action="store_true", help="run nothing")
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in known]
    if unknown:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(known)}")
    RECORDS.mkdir(exist_ok=True)
    for name in given.names or ([] if given.page else MODULES):
        print(f"== {name}", flush=True)
        run = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(RECORDS / f"{name}.json")]
        subprocess.run(run, check=True, cwd=ROOT, env=os.environ | ONE_THREAD)
    write_page()


if __name__ == "__main__":
    main()

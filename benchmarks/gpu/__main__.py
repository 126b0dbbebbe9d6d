"""What needs an accelerator, for one that is lent for minutes on a machine without network.

    make gpu-pack                                  # here: wheels and token files, in out/gpu-pack
    sh out/gpu-pack/install.sh                     # there, beside PyTorch, with the clone and out/gpu-pack
    timeout 540 python -m benchmarks.gpu PART      # there; again, until it says no more
    python -m benchmarks.gpu pages DIR             # here: sections of records/benchmarks.md, of what came back

A part writes DIR/PART.json, row by row; started again, there or on another machine of the same kind that has the file,
it goes on. Parts, in the order of what they answer per minute: {parts}. `--rehearse` makes everything tiny, on whatever
device there is. Exit status 1: rows failed. Trainings are the sweeps in this folder, there and here:

    XDG_CACHE_HOME=out/gpu-pack/cache timeout 540 signalprop sweep benchmarks/gpu/spa.yaml --out out/gpu/spa
    python -m benchmarks.results out/gpu/spa

The first goes on where it was; on another machine `--from results.json` takes up the runs that were finished.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from signalprop.errors import InputError

TIMED = ("ceilings", "wall", "overheads")
PACK = Path("out/gpu-pack")


def main(arguments: list[str] | None = None) -> int:
    """Command line of the package; the exit status."""
    about = (__doc__ or "").format(parts=", ".join(TIMED))
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=(*TIMED, "pack", "pages"))
    parser.add_argument("folder", nargs="?", type=Path, help="of `pages`: what came back")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), metavar="DIR", help="of results (out/gpu)")
    parser.add_argument("--pack", type=Path, default=PACK, metavar="DIR", help=f"what `pack` makes ({PACK})")
    parser.add_argument("--python", default="3.12", help="of `pack`: the version on the other machine (3.12)")
    parser.add_argument("--rehearse", action="store_true", help="everything tiny")
    given = parser.parse_args(arguments)
    try:
        if given.part == "pack":
            from benchmarks.gpu.packing import pack

            print(f"{pack(given.pack, given.python) / 2**20:.1f} MiB in {given.pack}")
            return 0
        from benchmarks.gpu.timed import measure, write_records

        if given.part == "pages":
            print("\n".join(write_records(given.folder or given.out)))
            return 0
        failed = measure(given.part, given.out, given.pack, given.rehearse)
    except InputError as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2
    if failed:
        print(f"gpu: {failed} rows of {given.part} failed, see {given.out}; they are tried again", file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

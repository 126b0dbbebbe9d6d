"""What needs an accelerator, for one that is lent for minutes on a machine without network.

    make gpu-pack                                              # here: wheels and token files, in out/gpu-pack
    python -m benchmarks.gpu PART --minutes 9 --out DIR        # there; again, until it says that all is done
    python -m benchmarks.gpu pages DIR                         # here: the pages, of what came back

There, with the clone and out/gpu-pack beside PyTorch: `sh out/gpu-pack/install.sh`. A part writes DIR/PART.json, row
by row; started again, there or on another machine of the same kind that has the file, it goes on. A training that time
ends goes on from its checkpoint where DIR/runs is kept, else from its start. Parts, in the order of what they answer
per minute: {parts}. `--rehearse` makes everything tiny, on whatever device there is. Exit status 1: rows failed;
3: not done yet.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from signalprop.errors import InputError

TIMED = ("ceilings", "wall", "overheads")
TRAINED = ("spa", "bert", "llama")
PACK = Path("out/gpu-pack")
NOT_DONE = 3


@contextmanager
def at_most(minutes: float) -> Iterator[None]:
    """Ends what runs as SIGTERM does: a training after the step that it is at, with a checkpoint; all else at once.

    Raises:
        KeyboardInterrupt: the minutes are over.
    """

    def end(*_: Any) -> None:
        raise KeyboardInterrupt

    before = (
        signal.signal(signal.SIGTERM, end),
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGTERM)),
    )
    signal.setitimer(signal.ITIMER_REAL, 60 * minutes, 20)  # again, where the first falls into what swallows it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGALRM, before[1])


def run(part: str, out: Path, minutes: float, pack: Path, rehearse: bool) -> int:
    """Run what a part lacks, until the minutes are over; the exit status."""
    if (pack / "cache").is_dir():
        os.environ["XDG_CACHE_HOME"] = str((pack / "cache").resolve())  # of texts as tokens
    if part in TRAINED:
        from benchmarks.gpu.trained import measure
    else:
        from benchmarks.gpu.timed import measure
    try:
        with at_most(minutes):
            failed = measure(part, out, pack, rehearse)
    except KeyboardInterrupt:
        print(f"gpu: {part} is not done yet; run this again", file=sys.stderr)
        return NOT_DONE
    if failed:
        print(f"gpu: {failed} rows of {part} failed, see {out}; run again, they are tried again", file=sys.stderr)
    return int(failed > 0)


def main(arguments: list[str] | None = None) -> int:
    """Command line of the package; the exit status."""
    about = (__doc__ or "").format(parts=", ".join((*TIMED, *TRAINED)))
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=(*TIMED, *TRAINED, "pack", "pages"))
    parser.add_argument("folder", nargs="?", type=Path, help="of `pages`: what came back")
    parser.add_argument("--minutes", type=float, default=9.0, help="that a part may take (9)")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), metavar="DIR", help="of results (out/gpu)")
    parser.add_argument("--pack", type=Path, default=PACK, metavar="DIR", help=f"what `pack` makes ({PACK})")
    parser.add_argument("--python", default="3.12", help="of `pack`: the version on the other machine (3.12)")
    parser.add_argument("--rehearse", action="store_true", help="everything tiny")
    given = parser.parse_args(arguments)
    try:
        if given.part == "pack":
            from benchmarks.gpu.packing import pack

            print(f"{pack(given.pack, given.python, given.rehearse) / 2**20:.1f} MiB in {given.pack}")
        elif given.part == "pages":
            from benchmarks.gpu.pages import write

            print("\n".join(write(given.folder or given.out)))
        else:
            return run(given.part, given.out, given.minutes, given.pack, given.rehearse)
    except InputError as error:
        print(f"gpu: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

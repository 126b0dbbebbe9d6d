"""How well predictions agree with random-weight networks on real text, cell by cell: writes records/accuracy.md.

    python -m benchmarks.accuracy                                 # only predict anew and write the page
    python -m benchmarks.accuracy --minutes 60                    # measure first: cells without a profile, then more
    python -m benchmarks.accuracy --minutes 60 --layers 12 192    # of networks of 12 to 192 layers

What was measured is kept in records/accuracy.json cell by cell, so that a change of a formula needs no new simulation.
Networks scatter, so as many are drawn as the predicted scatter asks for (`needed_networks`), first of those cells that
need the least time for it; what comes out does not decide how many.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks.accuracy_grid import GROUPS, Cell, grid
from benchmarks.accuracy_page import page
from benchmarks.accuracy_rows import needed_networks, row_of
from benchmarks.measured import Measured, read_store, write_store
from signalprop.files.storage import write_text
from signalprop.results.profile import Profile, average

PAGE, STORE = Path("records/accuracy.md"), Path("records/accuracy.json")
MIN_NETWORKS = 3
AT_A_TIME = 60.0  # seconds of one cell, between which the store is written


def draw(cell: Cell, before: Measured | None, most: int, seconds: float) -> Measured:
    """More networks, `most` in all, but three at least, until the processor time is spent."""
    from signalprop.measurement.simulation import simulate

    a = cell.architecture()
    p, batch = cell.parametrization(a), cell.batch(a)
    if before is not None and before.forward is None:
        before = None  # only errors were kept: the same networks again
    first = before.networks if before else 0
    began, spent = time.process_time(), 0.0
    profiles: list[Profile] = []
    while len(profiles) < MIN_NETWORKS or (first + len(profiles) < most and spent < seconds):
        profiles.append(simulate(p, batch=batch, n_seeds=1, seed=first + len(profiles)))
        spent = time.process_time() - began
    measured = Measured.of(average(profiles), spent)
    return measured if before is None else before.and_more(measured)


def needed(cell: Cell, measured: Measured | None, networks: int) -> float:
    """Seconds until a cell has so many networks. Negative, by cost: not begun yet."""
    if measured is None or measured.forward is None:
        return -1 / cell.cost
    return measured.seconds * (networks / measured.networks - 1)


def measure(minutes: float, group: str | None, layers: tuple[int, int]) -> None:
    """Measure for so many minutes of the clock, the cells that need the least first; all are begun before."""
    store, deadline = read_store(STORE, Cell), time.monotonic() + 60 * minutes
    chosen = (c for c in grid() if group in (None, c.group) and layers[0] <= c.n_layers <= layers[1])
    cells = {cell: max(needed_networks(cell), MIN_NETWORKS) for cell in chosen} if minutes else {}
    while time.monotonic() < deadline:
        open_ = [c for c, most in cells.items() if (m := store.get(c)) is None or not m.forward or m.networks < most]
        if not open_:
            return
        cell = min(open_, key=lambda c: needed(c, store.get(c), cells[c]))
        begun = cell in store and store[cell].forward is not None
        store[cell] = draw(cell, store.get(cell), cells[cell], AT_A_TIME if begun else 0.0)
        by_cost = sorted(store, key=lambda cell: (cell.cost, cell.name))
        write_store(STORE, "signalprop/accuracy/2", {cell: store[cell] for cell in by_cost})
        print(f"{cell.name}: {store[cell].networks} of {cells[cell]} networks", flush=True)


def main() -> None:
    """Command line of the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=0.0, help="time to measure")
    parser.add_argument("--group", choices=GROUPS, help="only cells of one group")
    parser.add_argument(
        "--layers", type=int, nargs=2, default=(1, 768), metavar=("FROM", "TO"), help="only these depths"
    )
    arguments = parser.parse_args()
    measure(arguments.minutes, arguments.group, tuple(arguments.layers))
    rows = [row_of(cell, measured) for cell, measured in read_store(STORE, Cell).items()]
    write_text(PAGE, page(rows))
    print(f"wrote {PAGE}: {len(rows)} cells")


if __name__ == "__main__":
    main()

"""The runs of a sweep, shared by any number of processes: what each has come to, and who is at it.

Beside a run's directory lies a file of its name, `seed=0.json`. Only the process that holds the run's lock writes it;
the lock is one of the operating system, which lets go of it when the process dies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from signalprop.errors import InputError, require
from signalprop.files.storage import read_json, write_json
from signalprop_lab.training.grid import Grid, Point
from signalprop_lab.training.recipe_files import difference

ATTEMPTS = 2  # of a run whose process dies, per call of the command


@dataclass(frozen=True)
class Entry:
    """What is known of a run.

    Attributes:
        settings: `Grid.settings` when it was begun. row: of a run that is done. error: of one that failed.
        session: the call of the command that took it last; attempts: how often that one did.
    """

    point: Point
    settings: Mapping[str, Any] = field(default_factory=dict)
    row: Mapping[str, Any] | None = None
    error: str | None = None
    session: str | None = None
    attempts: int = 0


class RunLock:
    """A run that this process has. Nobody else writes its file until it is given back."""

    def __init__(self, path: Path, lock: Any, entry: Entry) -> None:
        self._path, self._lock, self.entry = path, lock, entry

    def write(self, **changes: Any) -> None:
        """Write down what is new of the run."""
        self.entry = replace(self.entry, **changes)
        write_json(self._path, asdict(self.entry))

    def release(self) -> None:
        """Give it back."""
        self._lock.release()


@dataclass(frozen=True)
class Runs:
    """The runs of a sweep as one process sees them.

    Attributes:
        grid, out: the sweep and its directory. session: one call of the command, whatever the number of its processes.
    """

    grid: Grid
    out: Path
    session: str

    def entries(self) -> list[Entry]:
        """Every run that was begun."""
        return [_read(path) for depth in ("*", "*/*") for path in sorted(self.out.glob(f"runs/{depth}/seed=*.json"))]

    def take(self, point: Point) -> RunLock | None:
        """A run for this process; None: another one has it, or it is done, or was tried often enough."""
        claim = self._claim(point)
        if claim is None:
            return None
        known = claim.entry
        earlier = known.attempts if known.session == self.session else 0
        if known.row is None and earlier < ATTEMPTS:
            settings = self.grid.settings(point)
            claim.write(settings=settings, error=None, session=self.session, attempts=earlier + 1)
            return claim
        if known.row is None and known.error is None:
            claim.write(error=f"its process died {earlier} times")
        claim.release()
        return None

    def put(self, entry: Entry) -> bool:
        """Write down a run that was finished elsewhere; False: it is done here, or a process has it."""
        claim = self._claim(entry.point)
        if claim is None:
            return False
        new = claim.entry.row is None
        if new:
            claim.write(settings=entry.settings, row=entry.row, error=None)
        claim.release()
        return new

    def _claim(self, point: Point) -> RunLock | None:
        """The run's file, held; None: another process holds it."""
        filelock = require("filelock", "training")
        path = self.out / f"{self.grid.directory(point)}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path.with_suffix(".lock"), timeout=0)
        try:
            lock.acquire()
        except filelock.Timeout:
            return None
        return RunLock(path, lock, _read(path) if path.exists() else Entry(point))


def _read(path: Path) -> Entry:
    data = read_json(path)
    try:
        return Entry(**{**data, "point": Point(**data["point"])})
    except (KeyError, TypeError, ValueError, AttributeError):
        raise InputError(
            f"{path} is not what a sweep writes of a run; delete it, and the run is taken up anew"
        ) from None


def refuse_other_settings(grid: Grid, entries: Sequence[Entry], place: Path) -> None:
    """Of runs that the sweep has too."""
    for entry in entries:
        known = entry.point.cell in grid.cells and (entry.point.rate is None) == (grid.sweep.tune is None)
        if known and entry.settings != grid.settings(entry.point):
            change = difference(entry.settings, grid.settings(entry.point))
            raise InputError(
                f"{place} holds runs of other settings ({entry.point.cell}: {change}); choose another "
                f"{'file' if place.is_file() else 'directory'}"
            )

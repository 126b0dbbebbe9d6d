"""The runs of a sweep in an Optuna study, shared by any number of processes: wanted, taken, finished, left behind.

One trial is one attempt at one run. A run is known by its key (`Grid.key`), which is a trial's user attribute `key`.
Processes may put the same run into the queue at the same time; the trial with the lowest number has it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from signalprop.errors import InputError, require
from signalprop_lab.training.grid import Grid, Point

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

SILENT = 3600.0  # seconds without a sign of life after which a process on another machine counts as dead
_WATCHED = 180.0  # seconds without one before this process's eyes: its wall clock may have jumped, or be another's
_NAMELESS = 30.0  # seconds that a process has to write its name on a trial
_LEAST, _MOST = 1e-300, 1e300
ATTEMPTS = 2  # of a run whose process dies, per call of the command


@dataclass(frozen=True)
class Entry:
    """A trial, as far as sweeps know it.

    Attributes:
        state: `waiting`, `running`, `done` or `failed`. row: of a run that is done. error: of one that failed; none:
            its process died or was interrupted. session: the call of the command that took it.
        curve: loss by mark. settings: `Grid.settings` when the run was queued.
    """

    number: int
    key: str
    point: Point
    state: str
    row: Mapping[str, Any] | None
    error: str | None
    session: str | None
    curve: Mapping[int, float]
    settings: Mapping[str, Any]


def storage_of(out: Path, url: str | None) -> BaseStorage:
    """Where the study lives: OUT/study.log, or a database of SQLAlchemy's kinds.

    Raises:
        InputError: the file is damaged, or the database cannot be opened.
    """
    optuna = require("optuna", "training")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    file = out / "study.log"
    try:
        if url is None:
            lock: Any = FileLock(out / "study.lock", file)
            return JournalStorage(JournalFileBackend(str(file), lock))
        if not url.startswith("sqlite"):
            return RDBStorage(url)
        storage = RDBStorage(url, engine_kwargs={"connect_args": {"timeout": 60}})
        _serialise(storage.engine)
        return storage
    except Exception as error:  # of SQLAlchemy, a driver of its, JSON, the file system
        reason = " ".join(str(error).split())[:160]
        if url is None:
            raise InputError(
                f"cannot read {file}: {reason}; delete it: finished runs are found again in {out / 'runs'}"
            ) from None
        raise InputError(f"cannot open the storage {_without_password(url)}: {reason}") from None


def _serialise(engine: Any) -> None:
    """Optuna locks rows before it changes them, which SQLite cannot; here a transaction locks the file as it begins."""
    from sqlalchemy import event

    event.listen(engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    engine.dispose()  # connections that were made before


class FileLock:
    """Of the study's file. Optuna's own locks outlive a process that is killed; this one does not.

    It is held by who adds a line. Half a line, of a process that was killed or on a disk that was full, goes: what is
    added next would make it one that nothing can read.
    """

    def __init__(self, path: Path, file: Path) -> None:
        self._path, self._file, self._descriptor = path, file, -1

    def acquire(self) -> bool:
        """Wait for it."""
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        _cut_half_a_line(self._file)
        return True

    def release(self) -> None:
        """Give it back."""
        os.close(self._descriptor)


def _cut_half_a_line(file: Path) -> None:
    """Take what stands behind the last end of a line out of a file."""
    with file.open("r+b") as opened:
        end = opened.seek(0, os.SEEK_END)
        block, kept = b"", end
        while b"\n" not in block and kept > 0:
            start = max(0, kept - 4096)
            opened.seek(start)
            block, kept = opened.read(kept - start), start
        kept += block.rfind(b"\n") + 1
        if kept < end:
            opened.truncate(kept)


def _without_password(url: str) -> str:
    scheme, found, rest = url.partition("://")
    return f"{scheme}://...@{rest.rpartition('@')[2]}" if found and "@" in rest else url


@dataclass
class Queue:
    """The study of one sweep, as one process sees it.

    Attributes:
        grid, out: the sweep and its directory. study: Optuna's. session: one call of the command, whatever the number
            of its processes. shared: whether all processes of the study have this directory; else they may be anywhere.
    """

    grid: Grid
    out: Path
    study: Study
    session: str
    shared: bool
    _locks: dict[str, int] = field(default_factory=dict)
    _seen: dict[int, tuple[Any, float]] = field(default_factory=dict)

    def entries(self) -> list[Entry]:
        """Every attempt at a run, in order."""
        return [_entry(trial) for trial in self._trials()]

    def _trials(self) -> list[FrozenTrial]:
        return [trial for trial in self.study.get_trials(deepcopy=False) if "key" in trial.user_attrs]

    def add(self, points: list[Point]) -> None:
        """Put runs into the queue that are not in it."""
        from optuna.trial import TrialState, create_trial

        known = {entry.key for entry in self.entries() if entry.state != "failed"}
        for point in points:
            key = self.grid.key(point)
            if key not in known:
                place = {"cell": point.cell, "rate": point.rate, "seed": point.seed}
                about = {"key": key, **place, "settings": self.grid.settings(point)}
                values, ranges = _parameters(point)
                self.study.add_trial(
                    create_trial(state=TrialState.WAITING, params=values, distributions=ranges, user_attrs=about)
                )

    def take(self, open_keys: Collection[str]) -> tuple[Trial, Point] | None:
        """The next run of the queue; None: nothing is waiting.

        Args:
            open_keys: of runs that are wanted; others in the queue are of an older sweep, and go.
        """
        while any(entry.state == "waiting" for entry in self.entries()):
            trial = self.study.ask()
            mine = self._entry_of(trial)
            # Optuna makes up a trial where another process took the last one of the queue
            if mine is None or mine.key not in open_keys or self._has_an_elder(mine):
                self._drop(trial.number)
                continue
            if not self._lock(mine.key):
                self._drop(trial.number)  # a process that was taken for dead is not
                continue
            self.alive(trial)
            return trial, mine.point
        return None

    def _entry_of(self, trial: Trial) -> Entry | None:
        return next((entry for entry in self.entries() if entry.number == trial.number), None)

    def _lock(self, key: str) -> bool:
        """Take a run's lock, which the operating system gives back when the process dies; whether it was free."""
        folder = self.out / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / key, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        self._locks[key] = descriptor
        return True

    def _unlock(self, key: str) -> None:
        if key in self._locks:
            os.close(self._locks.pop(key))

    def release(self) -> None:
        """Give back every lock, as the end of the process would."""
        for key in [*self._locks]:
            self._unlock(key)

    def _has_an_elder(self, mine: Entry) -> bool:
        """Whether the run is done, or another trial that is not dead has it already."""
        others = [entry for entry in self.entries() if entry.key == mine.key and entry.number != mine.number]
        return any(
            other.state == "done" or (other.state != "failed" and other.number < mine.number) for other in others
        )

    def alive(self, trial: Trial) -> None:
        """Whose trial this is, and a sign of life."""
        from optuna.exceptions import UpdateFinishedTrialError

        with contextlib.suppress(UpdateFinishedTrialError):  # another process took this one for dead
            trial.set_user_attr("worker", [socket.gethostname(), str(self.out.resolve()), time.time(), self.session])

    def done(self, trial: Trial, row: Mapping[str, Any], score: float | None) -> None:
        """A run has ended; without a score it has failed to learn."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        with contextlib.suppress(UpdateFinishedTrialError):  # another process took this one for dead
            trial.set_user_attr("row", dict(row))
            if score is None:
                self.study.tell(trial, state=TrialState.PRUNED)
            else:
                self.study.tell(trial, score)
        self._unlock(trial.user_attrs["key"])

    def _drop(self, number: int) -> None:
        """A trial that comes to nothing."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        with contextlib.suppress(UpdateFinishedTrialError):  # another process was faster
            self.study.tell(number, state=TrialState.FAIL, skip_if_finished=True)

    def failed(self, trial: Trial, error: str | None) -> None:
        """A run has ended without a result. None: it was interrupted."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        with contextlib.suppress(UpdateFinishedTrialError):
            trial.set_user_attr("error", error)
            self.study.tell(trial, state=TrialState.FAIL)
        self._unlock(trial.user_attrs["key"])

    def bury(self) -> None:
        """Give back the runs of processes that are dead."""
        from optuna.trial import TrialState

        for trial in self._trials():
            if trial.state == TrialState.RUNNING and self._is_dead(trial):
                self._drop(trial.number)

    def _is_dead(self, trial: FrozenTrial) -> bool:
        worker, watched = trial.user_attrs.get("worker"), self._silence(trial)
        if worker is None:
            return watched > _NAMELESS
        host, out, when, _ = worker
        if not self.shared and (host, out) != (socket.gethostname(), str(self.out.resolve())):
            return bool(time.time() - when > SILENT) and watched > _WATCHED
        key = trial.user_attrs["key"]
        if key in self._locks or not self._lock(key):
            return False
        self._unlock(key)
        return True

    def _silence(self, trial: FrozenTrial) -> float:
        """Seconds in which this process has seen no sign of life, by a clock that does not jump."""
        sign, now = trial.user_attrs.get("worker"), time.monotonic()
        if trial.number not in self._seen or self._seen[trial.number][0] != sign:
            self._seen[trial.number] = sign, now
        return now - self._seen[trial.number][1]

    def attempts(self) -> dict[str, int]:
        """How often runs failed in this session, by key; an error counts as all attempts that there are."""
        found: dict[str, int] = {}
        for entry in self.entries():
            if entry.state == "failed" and entry.session == self.session:
                found[entry.key] = found.get(entry.key, 0) + (ATTEMPTS if entry.error else 1)
        return found


def open_queue(grid: Grid, out: Path, url: str | None, session: str) -> Queue:
    """The study of a sweep, made or found again.

    Raises:
        InputError: as `storage_of`.
    """
    require("optuna", "training")
    import optuna

    direction = grid.sweep.direction
    storage = storage_of(out, url)
    study = optuna.create_study(
        storage=storage, study_name=grid.sweep.name, direction=direction, load_if_exists=True,
        sampler=optuna.samplers.RandomSampler(), pruner=optuna.pruners.NopPruner(),
    )  # fmt: skip
    return Queue(grid, out, study, session, shared=url is None)


def _parameters(point: Point) -> tuple[dict[str, Any], dict[str, Any]]:
    """What Optuna's own pictures show of a run: values and their ranges."""
    from optuna.distributions import FloatDistribution, IntDistribution

    values: dict[str, Any] = {"seed": point.seed}
    ranges: dict[str, Any] = {"seed": IntDistribution(0, 2**32 - 1)}
    if point.rate is not None:
        values["rate"] = float(point.rate)
        ranges["rate"] = FloatDistribution(_LEAST, _MOST, log=True)
    return values, ranges


def _entry(trial: FrozenTrial) -> Entry:
    from optuna.trial import TrialState

    about = trial.user_attrs
    row = about.get("row")
    states = {TrialState.WAITING: "waiting", TrialState.RUNNING: "running", TrialState.FAIL: "failed"}
    return Entry(
        number=trial.number,
        key=about["key"],
        point=Point(about["cell"], about["rate"], about["seed"]),
        state=states.get(trial.state, "done" if row is not None else "failed"),
        row=row,
        error=about.get("error"),
        session=about["worker"][-1] if "worker" in about else None,
        curve=trial.intermediate_values,
        settings=about["settings"],
    )

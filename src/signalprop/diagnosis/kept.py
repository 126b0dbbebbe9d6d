"""What an interrupted diagnosis has done: every result that took a pass over the data, a line in a file."""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from signalprop.data import Batch
from signalprop.diagnosis.result import tuples
from signalprop.errors import InputError
from signalprop.files.storage import finite, read_text, write_text
from signalprop.files.validation import Value

SCHEMA = "signalprop/kept/1"
_SAME_LOSS = 1e-4  # relative: another number of threads adds in another order, another model is further off
V = TypeVar("V", bound=Value)


class Kept:
    """Results of single passes (a layer removed, a cast, a task), in a file from which a diagnosis goes on.

    Give it to `diagnose`, and `discard` it once the diagnosis is safe.

    Args:
        path: the file. resume: go on with what it holds; where there is none, start.
        settings: what else the results depend on, e.g. the name of a task; plain values.

    Raises:
        InputError: the file is there and `resume` is False, or it holds something else.
    """

    def __init__(self, path: str | Path, *, resume: bool = False, settings: Mapping[str, Any] | None = None) -> None:
        self.path = Path(path)
        self._settings = dict(settings or {})
        self._of: dict[str, Any] | None = None
        self._results: dict[str, Any] = {}
        self._writes = True
        if self.path.exists():
            if not resume:
                raise InputError(
                    f"{self.path} holds what an interrupted diagnosis has done; go on with --resume, or remove it"
                )
            self._read()

    def __len__(self) -> int:
        """How many results there are."""
        return len(self._results)

    def begin(self, **of: Any) -> None:
        """Say what the results are of; `loss` may differ by rounding.

        Raises:
            InputError: those in the file are of something else.
        """
        now = json.loads(json.dumps({"schema": SCHEMA} | finite(self._settings | of)))
        before = now if self._of is None else self._of
        other = next((name for name in {**before, **now} if not _same(name, before.get(name), now.get(name))), None)
        if other is not None:
            was, now_is = before.get(other), now.get(other)
            raise InputError(
                f"{self.path} is of another diagnosis ({other}: {was!r:.60}, now {now_is!r:.60}); "
                "repeat the command that was interrupted, or remove the file"
            )
        self._of = before
        lines = [before, *({"key": key, "value": value} for key, value in self._results.items())]
        self._write(lambda: write_text(self.path, "".join(json.dumps(line) + "\n" for line in lines)))

    def result(self, key: Sequence[Any], kind: type[V], make: Callable[[], V]) -> V:
        """The kept result of a key, or the one that `make` gives, which is kept from now on.

        Args:
            key: plain values that name it. kind: its class.

        Raises:
            InputError: what the file holds is not such a result.
        """
        name = json.dumps(key)
        if name in self._results:
            try:
                return kind(**tuples(self._results[name]))
            except InputError as error:
                self._results = {}  # nothing to go on from
                raise InputError(
                    f"{self.path} was kept by another version of signalprop, or changed; remove it ({error})"
                ) from None
        value = make()
        self._results[name] = finite(value.model_dump(mode="json"))
        self._write(lambda: self._append({"key": name, "value": self._results[name]}))
        return value

    def discard(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)

    def _append(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _write(self, write: Callable[[], None]) -> None:
        """Write, as long as that is possible: the diagnosis does not end for it."""
        if not self._writes:
            return
        try:
            write()
        except (InputError, OSError) as error:
            self._writes = False
            reason = getattr(error, "strerror", None) or str(error)
            warnings.warn(f"results are not kept in {self.path} from here on: {reason}", UserWarning, stacklevel=4)

    def _read(self) -> None:
        lines = []
        for text in read_text(self.path).splitlines():
            try:
                lines.append(json.loads(text))
            except (ValueError, RecursionError):
                break  # the half of a line that was being written
        wrong = f"{self.path} is not what an interrupted diagnosis keeps; remove it, or name another file with --json"
        if not lines or not isinstance(lines[0], dict) or lines[0].get("schema") != SCHEMA:
            raise InputError(wrong)
        self._of = lines[0]
        for line in lines[1:]:
            if (
                not isinstance(line, dict)
                or not isinstance(line.get("key"), str)
                or not isinstance(line.get("value"), dict)
            ):
                raise InputError(wrong)
            self._results[line["key"]] = line["value"]


def result_of(kept: Kept | None, key: Sequence[Any], kind: type[V], make: Callable[[], V]) -> V:
    """`Kept.result`, or what `make` gives where nothing is kept."""
    return make() if kept is None else kept.result(key, kind, make)


def digest(batches: Sequence[Batch]) -> str:
    """A short name for all that batches hold."""
    sums = hashlib.sha256()
    for batch in batches:
        for name, part in vars(batch).items():
            if isinstance(part, np.ndarray):
                sums.update(f"{name} {part.dtype} {part.shape}".encode())
                sums.update(part.tobytes())
    return sums.hexdigest()[:16]


def _same(name: str, one: Any, other: Any) -> bool:
    if name == "loss" and isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_SAME_LOSS)
    return bool(one == other)

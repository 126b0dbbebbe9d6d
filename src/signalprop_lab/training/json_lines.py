"""Files of JSON lines, one for every step that something was logged at."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from signalprop.data.texts import json_lines
from signalprop.errors import InputError
from signalprop.files.storage import finite, write_text

_LAST_STEP = 2**53  # up to which numbers on an axis are whole


class JsonLines:
    """A file of JSON lines, each with its `step`; one of a kind for a step, whatever is done again after a restart.

    A line that cannot be written does not end the run: it is said once, and tried again with every later one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: set[tuple[int, frozenset[str]]] = set()
        self._waiting: list[str] = []
        self._size: int | None = None  # of the file before a line that failed midway
        self._said = False

    def append(self, line: dict[str, Any]) -> None:
        """Add a line; a run that is killed midway leaves at most a half of it, which readers skip."""
        kind = (line["step"], frozenset(line))
        if kind in self._written:
            return
        self._written.add(kind)
        self._waiting.append(json.dumps(finite(line), allow_nan=False) + "\n")
        try:
            with self.path.open("ab") as file:
                end = file.seek(0, os.SEEK_END)
                self._size = end if self._size is None else min(self._size, end)
                if self._size < end:
                    file.truncate(self._size)
                file.write("".join(self._waiting).encode())
        except OSError as error:
            if not self._said:
                self._said = True
                print(
                    f"signalprop: cannot write {self.path} ({error.strerror}); the run continues, and its lines are "
                    "written when that is possible again",
                    file=sys.stderr,
                )
            return
        self._waiting.clear()
        self._size = None

    def keep_until(self, step: int) -> None:
        """Drop what was written of later steps, which will be done again, and a broken last line."""
        kept = [line for line in read_lines(self.path) if line["step"] <= step]
        self._written = {(line["step"], frozenset(line)) for line in kept}
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file that may still be written to; none if there is no such file.

    Raises:
        InputError: a line but the last is not JSON, or one is not of a step.
    """
    out = []
    for place, row in json_lines(path, growing=True) if path.is_file() else ():
        step = row.get("step") if isinstance(row, dict) else None
        if type(step) is not int or not 0 <= step <= _LAST_STEP:
            raise InputError(f"{path}: {place} has step {step!r:.40}; expected a whole number from 0 on")
        out.append(row)
    return out

"""Where the numbers of a monitor go, and what it says, each thing once."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from collections.abc import Mapping as Dictionary
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from signalprop.errors import InputError
from signalprop.monitoring.bands import Departure
from signalprop.monitoring.events import finding_of, line_of
from signalprop.monitoring.jumps import Jump
from signalprop.results.findings import Findings
from signalprop.results.profile import Profile
from signalprop.results.verdicts import findings_of

Log = Callable[[dict[str, float], int], None]
_ONCE = ("finite", "stalled")  # quantities
LOGGER = logging.getLogger("signalprop.monitoring")


class Logs:
    """Of one monitor.

    Args:
        writer, log: as of `SignalMonitor`. path: its `jsonl`.

    Attributes:
        warnings: every Departure that was reported. found: what the rules say of the last signal.
    """

    def __init__(self, writer: Any, path: str | Path | None, log: Log | None) -> None:
        if writer is not None and not hasattr(writer, "add_scalar"):
            raise InputError(f"the writer is a {type(writer).__name__} without add_scalar(name, value, step)")
        self._writer, self._path, self._log = writer, path, log
        self._file: TextIO | None = None
        self._said: set[str] = set()
        self.warnings: list[Departure] = []
        self.found = Findings()
        self._network: dict[str, Any] | None = None

    def judge(self, profile: Profile, step: int) -> None:
        """Keep what the rules say of a signal, and of what network it is."""
        self.found = findings_of(profile, step)
        if self._network is None:
            shape = profile.architecture.model_dump(mode="json", exclude_defaults=True)
            self._network = {"architecture": shape, "scheme": profile.scheme}

    def write(self, numbers: Dictionary[str, float], step: int) -> None:
        """Hand the numbers of `step` to all."""
        if self._writer is not None:
            try:
                for name, value in numbers.items():
                    self._writer.add_scalar(name, value, step)
            except Exception as error:  # of whatever it is
                self.say_once(f"step {step}: the writer failed ({type(error).__name__}: {error})", key="writer")
        if self._path is not None:
            line = {"step": step, **numbers, **_told([item for item in self.warnings if item.step == step])}
            line["findings"] = self.found.to_json()
            self.write_line(line | ({"network": self._network} if self._network else {}), step)
            self._network = self._network and {}  # the first line alone has it
        if self._log is not None:
            self._log(dict(numbers), step)

    def write_line(self, line: dict[str, Any], step: int) -> None:
        """Add a line to the file."""
        assert self._path is not None
        try:
            if self._file is None:
                self._file = opened(self._path)
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()
        except (InputError, OSError) as error:
            self.say_once(f"step {step}: not written to {self._path}: {error}", key="jsonl")
            self.close()

    def close(self) -> None:
        """Close the file; it is opened again for the next line."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # of what is still to be written
                file.close()

    def tell(self, found: Sequence[Departure]) -> None:
        """Warn of departures; of some once: when weights are NaN, every later signal is, too."""
        for item in found:
            if item.quantity in _ONCE:
                if item.quantity in self._said:
                    continue
                self._said.add(item.quantity)
            self.warnings.append(item)
            LOGGER.warning(line_of(item))

    def tell_jumps(self, jumps: Sequence[Jump]) -> None:
        """Warn of what jumped, and write the steps before it."""
        for jump in jumps:
            places = () if jump.place is None else (jump.place,)
            told = Departure(jump.step, jump.what, places, jump.place, jump.value, jump.text)
            self.tell([told])
            if self._path is not None:
                self.write_line({"step": jump.step, "jump": jump.to_json(), **_told([told])}, jump.step)

    def say_once(self, text: str, key: str = "") -> None:
        """Warn, unless something of this key (default: the text) has been said."""
        if (key or text) not in self._said:
            self._said.add(key or text)
            LOGGER.warning(text)


def _told(items: Sequence[Departure]) -> dict[str, Any]:
    """Warnings of one step as a line has them: in words, and as findings with cause and next action."""
    return {"warnings": [item.text for item in items], "events": Findings(map(finding_of, items)).to_json()}


def opened(path: str | Path) -> TextIO:
    """A log that is continued."""
    try:
        return open(path, "a", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from None

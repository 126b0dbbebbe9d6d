"""The wish to stop a run: SIGTERM, Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupts:
    """Takes SIGTERM, and SIGINT once, for a wish to stop after the step; a second SIGINT interrupts as always.

    A signal that the process ignores (SIGINT in a shell's background) stays ignored.

    Attributes:
        received: the signal's name, or None.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # others cannot have handlers
            for number in (signal.SIGTERM, signal.SIGINT):
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def pass_on(self) -> None:
        """Raise the received signal again: it came when no step was left to stop after, and is for the caller."""
        if self.received is not None:
            signal.raise_signal(signal.Signals[self.received])

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, self._before[signal.SIGINT])
        # a handler may run in the midst of another write to the stream, which only the system's call survives
        with contextlib.suppress(OSError):
            os.write(2, f"signalprop: {self.received}: stopping with a checkpoint after this step\n".encode())

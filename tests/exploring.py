"""The explorer as users run it: a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

EXPLORE = (sys.executable, "-m", "signalprop", "explore")


class Explorer(NamedTuple):
    """A running `signalprop explore` and the address that it printed."""

    process: subprocess.Popen[str]
    address: str

    def interrupt(self) -> tuple[int, str, str]:
        """End it as Ctrl-C does; its status, and what it wrote since."""
        self.process.send_signal(signal.SIGINT)
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err


@contextmanager
def explorer(*arguments: str, command: Sequence[str] = EXPLORE) -> Iterator[Explorer]:
    """The command with more arguments, until the end of the block."""
    process = subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # it may come ignored
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    try:
        line = process.stdout.readline()
        words = line.split()
        if len(words) < 2:
            raise RuntimeError(f"the explorer did not start: {process.communicate(timeout=120)[1]}")
        yield Explorer(process, words[1])
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()

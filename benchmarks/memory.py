"""The largest memory that a process had."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

# Linux counts for a process what the one that started it had at that moment, so one that is small starts it.
_STARTER = """
import json, os, subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(child.pid, 0)
seconds, unit = usage.ru_utime + usage.ru_stime, 1 if sys.platform == "darwin" else 1024
print(json.dumps([os.waitstatus_to_exitcode(status), usage.ru_maxrss * unit, seconds]))
"""


def peak(arguments: Sequence[str], **options: Any) -> tuple[int, float]:
    """Largest resident memory of `python ARGUMENTS` in bytes, mapped files included, and its CPU seconds.

    Args:
        options: of `subprocess.run`.

    Raises:
        RuntimeError: it failed; what it said is on the standard error.
    """
    run = [sys.executable, "-c", _STARTER, sys.executable, *arguments]
    found = subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True, **options)
    status, most, seconds = json.loads(found.stdout)
    if status:
        raise RuntimeError(f"python {' '.join(arguments)} ended with status {status}")
    return most, seconds

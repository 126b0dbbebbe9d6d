"""Whether what is asked for can fit into memory: said before the work, not by the system that ends the process."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from signalprop.errors import InputError

_GROUP = Path("/sys/fs/cgroup/memory.max")  # of a container under Linux: bytes, or `max`


def memory_limit() -> int | None:
    """Bytes that this process may take, by machine, container and process limit; None: not known."""
    limits = []
    if sys.platform != "win32":
        import resource

        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        own = resource.getrlimit(resource.RLIMIT_AS)[0]
        if own != resource.RLIM_INFINITY:
            limits.append(own)
    with suppress(OSError, ValueError):
        limits.append(int(_GROUP.read_text()))
    return min(limits, default=None)


def memory_free() -> int | None:
    """Bytes that are free, of the machine and its container; None: not known."""
    free = []
    with suppress(OSError, ValueError):
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free.append(1024 * int(lines["MemAvailable"].split()[0]))
    with suppress(OSError, ValueError):
        free.append(int(_GROUP.read_text()) - int(_GROUP.with_name("memory.current").read_text()))
    return min(free, default=None)


def check_fits(needed: float, what: str, cure: str) -> None:
    """Refuse what cannot fit.

    Args:
        needed: bytes that it takes at least.
    """
    limit = memory_limit()
    if limit is not None and needed > limit:
        raise InputError(
            f"{what} needs at least {needed / 1e9:,.1f} GB of memory; there are {limit / 1e9:,.1f} GB; {cure}"
        )

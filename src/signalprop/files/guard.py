"""What may happen while something of a stranger's is loaded: nothing outside its directory, within a budget of memory.

The second wall. The first is that a stranger's values reach no loader (`signalprop.files.configuration`); this one ends
a load whatever led to it.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from signalprop.errors import InputError

# Audit events (https://docs.python.org/3/library/audit_events.html) that no load needs, by how they begin.
_FORBIDDEN = (
    "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.startfile", "pty.spawn",
    "socket.connect", "socket.bind", "socket.send", "socket.getaddrinfo", "socket.gethostby", "urllib.", "http.client.",
    "ftplib.", "pickle.find_class", "webbrowser.",
)  # fmt: skip
_SYSTEM = ("/proc/", "/sys/", "/dev/null", "/dev/urandom", "/usr/share/zoneinfo/")
_CODE = (".py", ".pyc", ".so", ".pyd", ".dll")
_here = threading.local()  # `reads`: where files may be opened; None: this thread loads nothing


class _LeftError(BaseException):
    """An event that ends a load. No `except Exception` of a library goes on after it."""


@contextmanager
def guarded(where: str | Path, *reads: str | Path) -> Iterator[None]:
    """End a load, in this thread, that opens a file elsewhere, unpickles, runs a program or connects to anything.

    Args:
        where: what is loaded, for messages. reads: directories and files that may be opened, links followed; so may the
            installed packages, and what Python imports.

    Raises:
        InputError: one of these was tried, also where a library went on after it.
    """
    _install()
    before = getattr(_here, "reads", None), getattr(_here, "left", None)
    _here.reads, _here.left = tuple(os.path.realpath(path) for path in reads), None
    try:
        yield
        left = _here.left
    except BaseException as error:
        left = _here.left
        if left is None or not isinstance(error, (Exception, _LeftError)):
            raise
    finally:
        _here.reads, _here.left = before
    if left is not None:
        raise InputError(f"{where} was not loaded: it leads to {left!s:.200}, which no checkpoint may")


@contextmanager
def budget(size: float, where: str | Path) -> Iterator[None]:
    """Refuse what takes more memory than this, where the system can say how much that is (Linux), instead of ending.

    Args:
        size: bytes beside what the process has.
    """
    try:
        import resource

        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    except (ImportError, OSError):
        yield
        return
    most = [now + int(size), *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(most), hard))
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        raise InputError(
            f"{where} needs more than {size / 1e9:,.1f} GB of memory; correct its sizes, or use a larger machine"
        ) from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@cache
def _install() -> None:
    sys.addaudithook(_audit)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    reads = getattr(_here, "reads", None)
    if reads is None:
        return
    left = ""
    if event == "open" and isinstance(args[0], (str, bytes)):
        path = os.path.realpath(os.fsdecode(args[0]))
        known = path.startswith(_SYSTEM) or within(path, reads) or _installed(path) or _importable(path, reads)
        left = "" if known else path
    elif event == "exec" and not str(name := args[0].co_filename).startswith("<"):
        path = os.path.realpath(name)
        left = "" if _installed(path) or _importable(path, reads) else f"the code in {path}"
    elif event.startswith(_FORBIDDEN):
        left = f"{event} {' '.join(map(str, args[:2]))}"
    if left:
        _here.left = _here.left or left
        raise _LeftError(left)


def _installed(path: str) -> bool:
    return within(path, _packages())


def _importable(path: str, reads: tuple[str, ...]) -> bool:
    """Whether it is code on Python's path, and not in the directory that is loaded."""
    paths = tuple(os.path.realpath(entry) for entry in sys.path if entry)
    return path in paths or (path.endswith(_CODE) and within(path, paths) and not within(path, reads))


def within(path: str, roots: tuple[str, ...]) -> bool:
    """Whether a path is one of these, or lies below one."""
    return any(path == root or path.startswith(root.rstrip(os.sep) + os.sep) for root in roots)


@cache
def _packages() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    found: list[str | None] = [sysconfig.get_path(name) for name in names]
    with suppress(ImportError):  # beside Python's directories, if they were installed with --user or --target
        import torch
        import transformers

        found += [os.path.dirname(os.path.dirname(str(module.__file__))) for module in (torch, transformers)]
    found.append(sys.pycache_prefix)  # bytecode of imports
    return tuple(os.path.realpath(path) for path in found if path)


@contextmanager
def alone(*files: Path) -> Iterator[Path]:
    """A new directory that holds these files alone, as links, for libraries that read whatever lies beside one."""
    with tempfile.TemporaryDirectory() as place:
        for file in files:
            os.symlink(file.resolve(), Path(place) / file.name)
        yield Path(place)

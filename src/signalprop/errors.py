"""The two errors a user can see: bad input (exit status 2) and a missing optional dependency; and how both are shown.

What a message repeats may come from a file: it can hold line ends, megabytes, or the control characters by which a
terminal can be made to hide text.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from types import ModuleType

_LONGEST, _END = 1000, 200  # characters of a message, and how many of them are its end, where it was cut


def printable(text: str) -> str:
    """The text with everything that a terminal would not show as a character written as an escape; lines stay."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def as_line(text: str) -> str:
    """The text as a message: one line, printable, and cut in the middle where it is longer than can be read."""
    if len(text) > 10 * _LONGEST:  # before the work on every character of it
        text = f"{text[:_LONGEST]} ... {text[-_LONGEST:]}"
    line = printable(" ".join(text.split()))
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - _END]} ... {line[-_END:]}"


class InputError(ValueError):
    """Bad input. The message is one line: what is wrong, what was expected, how to fix it."""

    def __init__(self, message: str) -> None:
        super().__init__(as_line(message))


def unknown(what: str, name: object, known: Iterable[str]) -> InputError:
    """The error for a name that is not among the known ones: with the nearest of them; without one, or of few, all."""
    names = list(known)
    near = get_close_matches(str(name), names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ";"
    listed = f"known {what}s: {', '.join(names)}"
    if near and len(names) > _FEW:
        listed = f"{len(names)} {what}s are known"
    return InputError(f"unknown {what} {name!r:.80}{hint} {listed}")


_FEW = 12  # names that are all listed beside the nearest one


def check_index(what: str, index: int, n: int) -> int:
    """The index of one of n things, counted from 0; negative ones count from the end, as in Python.

    Raises:
        InputError: there is no such thing.
    """
    if not -n <= index < n:
        raise InputError(f"there is no {what} {index}; expected 0 to {n - 1}" if n else f"there is no {what}")
    return index % n


def first_line(error: BaseException) -> str:
    """What an error says on its first line, and on the next ones where that ends with a colon; else its name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = next((i for i, line in enumerate(lines) if not line.endswith(":")), len(lines) - 1)
    return " ".join(lines[: last + 1]) or type(error).__name__


class MissingExtra(ImportError):
    """An optional dependency is not installed; the message names the extra and the command that installs it."""


@contextmanager
def refusing(what: str, advice: str) -> Iterator[None]:
    """Report whatever a library raises within as bad input: `what`, the library's reason, `advice`; not a MemoryError.

    Raises:
        InputError: instead of the library's error, which is its cause.
    """
    try:
        yield
    except (InputError, MissingExtra, MemoryError):
        raise
    except BaseException as error:
        panics = type(error).__name__ == "PanicException"  # of libraries in Rust: not an Exception
        if not (panics or isinstance(error, Exception)) or "memory" in str(error):
            raise
        raise InputError(f"{what} ({type(error).__name__}: {error}); {advice}") from error


def release(version: str) -> tuple[int, int]:
    """Major and minor number of a version, such as 5.23.0 or 5.0.0.dev0."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return major, minor


# Older transformers ran the code of a checkpoint (until 5.0), and do not declare the fields of their configurations;
# older datasets run loading scripts of the hub.
_LOWEST = {"transformers": (5, 4), "datasets": (4, 0)}


def require(module: str, extra: str) -> ModuleType:
    """Import `module`, or raise MissingExtra naming the pip extra that brings it; likewise where it is too old."""
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise MissingExtra(
            f"this needs {module.partition('.')[0]}, which cannot be imported ({reason}); "
            f"install it with: pip install 'signalprop[{extra}]' (in a clone: '.[{extra}]')"
        ) from error
    lowest = _LOWEST.get(module)
    if lowest is not None and release(found.__version__) < lowest:
        raise MissingExtra(
            f"{extra} needs {module} {lowest[0]}.{lowest[1]} or newer, and {found.__version__} is installed; "
            f"install it with: pip install --upgrade 'signalprop[{extra}]'"
        )
    return found

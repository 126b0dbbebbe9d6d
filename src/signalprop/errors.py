"""The two errors a user can meet: bad input (exit status 2) and a missing optional dependency."""

from __future__ import annotations

import importlib
from types import ModuleType


class InputError(ValueError):
    """Bad input. The message is one line: what is wrong, what was expected, how to mend it."""


class MissingExtra(ImportError):
    """An optional dependency is not installed; the message names the extra and the command that installs it."""


def require(module: str, extra: str) -> ModuleType:
    """Import `module`, or raise MissingExtra naming the pip extra that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise MissingExtra(
            f"this needs {module.partition('.')[0]}, which cannot be imported ({reason}); "
            f"install it with: pip install 'signalprop[{extra}]'"
        ) from error

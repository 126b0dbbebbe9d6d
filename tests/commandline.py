"""Types and arguments of the command-line tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

TINY = ["--layers", "2", "--d-model", "32", "--vocab-size", "200", "--seq-len", "12"]


class Result(NamedTuple):
    """How a command ended and what it wrote."""

    status: int
    out: str
    err: str


Command = Callable[..., Result]

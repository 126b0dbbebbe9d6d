"""Parameters of tests, of which representative members are fast tests."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def some(every: Iterable[Any], fast: Container[Any]) -> list[Any]:
    """All of them; those that are not among `fast` with the slow tests. A tuple is several arguments."""
    return [
        pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=() if one in fast else pytest.mark.slow)
        for one in every
    ]

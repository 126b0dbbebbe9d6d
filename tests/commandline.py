"""Types, arguments and helpers of tests of the command line, and of what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from signalprop.errors import InputError

TINY = ["--layers", "2", "--set", "d_model=32", "--set", "vocab_size=200", "--seq-len", "12"]


class Result(NamedTuple):
    """How a command ended and what it wrote."""

    status: int
    out: str
    err: str


Command = Callable[..., Result]
Refused = Callable[..., str]


def result_of(command: Command, *arguments: Any) -> Any:
    """The JSON that a command writes to standard output, which holds nothing else."""
    status, out, err = command(*arguments, "--json", "-")
    assert status == 0, err
    return json.loads(out)


def refusal_of(call: Callable[[], Any]) -> str:
    """The one line with which the library refuses a call."""
    with pytest.raises(InputError) as caught:
        call()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    return str(caught.value)

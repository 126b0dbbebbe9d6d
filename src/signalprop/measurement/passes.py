"""One pass of a model; what it raises on its inputs is one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from signalprop.errors import InputError, first_line
from signalprop.streams.calls import call, is_function


def output_of(model: nn.Module, arguments: Mapping[str, Any], inputs: Any = None) -> Any:
    """What a model gives for its keyword arguments, or what `inputs` returns, where that is a function that calls it.

    Raises:
        InputError: it fails on them.
    """
    with refusing_inputs(model, arguments):
        return inputs(model) if is_function(inputs) else call(model, arguments)


@contextmanager
def refusing_inputs(model: nn.Module, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Report what a model raises on its inputs as an InputError; not a lack of memory."""
    try:
        yield
    except InputError:
        raise
    except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        if "memory" in str(error):
            raise
        given = ", ".join(arguments) or "nothing"
        raise InputError(f"{type(model).__name__} failed on {given}: {first_line(error)}") from error

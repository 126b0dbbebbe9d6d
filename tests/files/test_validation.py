"""Validated values and errors: every mistake is one line."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import Field

from signalprop.errors import InputError, MissingExtra, require
from signalprop.files.validation import Value


class Point(Value):
    width: int = Field(ge=1)
    height: float = 1.0
    name: str = ""
    tags: tuple[str, ...] = ()


def message(call: Any) -> str:
    with pytest.raises(InputError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and len(text) < 400
    return text


def test_numpy_scalars_count_as_numbers() -> None:
    point = Point(width=np.int32(3), height=np.float32(0.5))
    assert point == Point(width=3, height=0.5) and type(point.width) is int
    assert Point(width=3, height=2).height == 2.0


def test_an_unknown_field_gets_a_suggestion() -> None:
    assert "did you mean height?" in message(lambda: Point(width=1, heigth=2.0))
    assert "there is no such field" in message(lambda: Point(width=1, zzz=2.0))


def test_many_mistakes_make_one_readable_line() -> None:
    text = message(lambda: Point(width=0, height="x\ny", name=3, tags=5))
    assert text.startswith("Point: width: ") and "and 1 more" in text


def test_a_missing_extra_names_the_command() -> None:
    with pytest.raises(MissingExtra, match=r"pip install 'signalprop\[models\]'") as caught:
        require("no_such_module_here.part", "models")
    assert "\n" not in str(caught.value) and "no_such_module_here" in str(caught.value)


class Line(Value):
    start: Point


def test_names_within_are_text() -> None:
    """YAML can write others: {100, x: 1} has the name 100."""
    assert "the name of a field is not text" in message(lambda: Line(start={100: None, "width": 1}))

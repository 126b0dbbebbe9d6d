"""The base of every validated value: frozen, no unknown fields, and one line per mistake instead of a traceback."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from signalprop.errors import InputError

_SHOWN = 3  # a file with a mistake in every row still gives one readable line


def one_line(error: ValidationError, known: Collection[str] = ()) -> str:
    """The mistakes of a pydantic error in one line: `field: what is wrong (got value)`, the first three of them.

    Args:
        known: names of fields, to suggest one where a name is unknown.
    """
    parts: dict[str, str] = {}
    for item in error.errors(include_url=False):
        unknown = item["type"] == "extra_forbidden"  # then a name of the input's own comes last
        # pydantic names the members of a union, which all failed, by their types: `literal['pre', ...]`
        loc, own = (item["loc"][:-1], item["loc"][-1:]) if unknown else (item["loc"], ())
        steps = [str(step) for step in loc if not (isinstance(step, str) and step.endswith("]"))]
        place = ".".join((*steps, *map(str, own)))
        message = item["msg"].removeprefix("Value error, ")
        if unknown:
            near = get_close_matches(str(own[0]), known, n=1)
            message = "there is no such field" + (f"; did you mean {near[0]}?" if near else "")
        got = "" if item["type"] in {"missing", "value_error"} else f" (got {item['input']!r:.60})"
        parts.setdefault(place, f"{place}: {message}{got}" if place else message)
    shown = list(parts.values())[:_SHOWN]
    more = f"; and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
    return " ".join(f"{error.title}: {'; '.join(shown)}{more}".split())


class Value(BaseModel):
    """A frozen value. Types are strict (no "64" for 64, no True for 1); NumPy scalars count as Python's.

    Raises:
        InputError: a bad or unknown field; one line that says what is wrong.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    def __init__(self, **data: Any) -> None:
        plain = {key: value.item() if isinstance(value, np.generic) else value for key, value in data.items()}
        try:
            super().__init__(**plain)
        except ValidationError as error:
            raise InputError(one_line(error, type(self).model_fields)) from None
        except TypeError as error:  # of pydantic, which gives a mapping to a Value within this one
            if "keywords must be strings" not in str(error):
                raise
            title = type(self).__name__
            raise InputError(f"{title}: the name of a field is no text; expected names, in quotation marks") from None

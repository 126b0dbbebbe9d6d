"""What is checked of arguments and fields: one line per mistake instead of a traceback.

`Value` is the base of every validated value: frozen, no unknown fields. `typed` checks what a public function is given
against its annotations.
"""

from __future__ import annotations

import errno
import functools
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import ArrayLike
from pydantic import BaseModel, ConfigDict, ValidationError

from signalprop.errors import InputError

P = ParamSpec("P")
R = TypeVar("R")
_SHOWN = 3  # a file with a mistake in every row still gives one readable line


def one_line(error: ValidationError, known: Collection[str] = ()) -> str:
    """The mistakes of a pydantic error in one line: `field: what is wrong (got value)`, the first three of them.

    Args:
        known: names of fields, to suggest one where a name is unknown.
    """
    parts: dict[str, str] = {}
    for item in error.errors(include_url=False):
        unknown = item["type"] == "extra_forbidden"  # then a name from the input comes last
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

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True, defer_build=True)

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
            raise InputError(f"{title}: the name of a field is not text; expected names, in quotation marks") from None


def typed(function: Callable[P, R]) -> Callable[P, R]:
    """The function, or the class whose fields these are, with its arguments checked against their annotations.

    Names of arguments and their number are left to Python, which says TypeError; values are left to the function. A
    path that no system takes is refused, whichever call found out.
    """
    if isinstance(function, type):
        function.__init__ = _checked(function.__init__, function.__name__)  # type: ignore[misc]
        return cast(Callable[P, R], function)
    return _checked(function, function.__qualname__.removesuffix(".__init__"))


def _checked(function: Callable[P, R], name: str) -> Callable[P, R]:
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        names, rest, more, hints = _declared(function, tuple(name in sys.modules for name in _LATER.values()))
        given = [*zip(names, args, strict=False), *((rest, value) for value in args[len(names) :])]
        given += [(key if key in hints else more, value) for key, value in kwargs.items()]
        for parameter, value in given:
            if parameter in hints and not _is_a(value, hints[parameter]):
                declared = str(inspect.signature(function).parameters[parameter].annotation)
                shape = getattr(value, "shape", None)
                got = f"of shape {tuple(shape)}" if isinstance(shape, tuple) else f"{value!r:.60}"
                got = f"{type(value).__name__} {got}"
                raise InputError(f"{name} takes as {parameter}: {_in_words(declared)}; it was given the {got}")
        try:
            return function(*args, **kwargs)
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            raise InputError(f"the name {error.filename!r:.80} is too long for a file") from None

    return call


class _NotImported:
    """What stands for a module, and for its classes, before it is imported, when nothing can be one of them."""

    class Module:
        """Of no value."""

    Anatomy = Module


_LATER = {
    "nn": "torch.nn",
    "Anatomy": "signalprop.attachment.anatomy",
}  # names that are imported for type checkers alone


@functools.cache
def _declared(
    function: Callable[..., Any], imported: tuple[bool, ...]
) -> tuple[tuple[str, ...], str, str, dict[str, Any]]:
    """Names of positional parameters, of the one for further positions, of that for further names, and all types.

    Of what a module imports for type checkers alone, _LATER is known.
    """
    nn, anatomy = (sys.modules.get(name, _NotImported) for name in _LATER.values())
    known = {"nn": nn, "Anatomy": getattr(anatomy, "Anatomy", _NotImported.Module)}
    by_kind: dict[Any, list[str]] = {kind: [] for kind in inspect._ParameterKind}
    for parameter in inspect.signature(function).parameters.values():
        by_kind[parameter.kind].append(parameter.name)
    only, both, rest, _, more = by_kind.values()
    return (*only, *both), "".join(rest), "".join(more), get_type_hints(function, localns=known)


def _in_words(annotation: str) -> str:
    """An annotation as a reader of the documentation knows it."""
    return re.sub(r"\b(nn|np|torch)\.", "", annotation).replace("Dictionary", "Mapping").replace(" | ", " or ")


def _is_a(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type, as far as one look shows; NumPy scalars count as Python's."""
    origin = get_origin(hint) or hint
    if origin in (Union, UnionType):
        numbers, members = _members(hint)
        return (numbers and _is_numbers(value)) or any(_is_a(value, member) for member in members)
    if origin is Annotated:
        return _is_a(value, get_args(hint)[0])
    if origin is Literal:  # the function names the choices
        return isinstance(value, tuple({type(member) for member in get_args(hint)}))
    if origin in _CONTAINERS:
        return _is_container(value, origin, get_args(hint))
    if origin in _SCALARS:
        return isinstance(value, _SCALARS[origin]) and (origin is bool or not isinstance(value, bool))
    if origin is np.ndarray:  # NumPy turns one number into no array
        return isinstance(value, (np.ndarray, np.generic))
    if getattr(origin, "_is_protocol", False) or origin is Callable:  # one that is not a function says what it looks at
        return isinstance(value, origin) if getattr(origin, "_is_runtime_protocol", False) else callable(value)
    return origin is Any or not isinstance(origin, type) or isinstance(value, origin)


@functools.cache
def _members(union: Any) -> tuple[bool, tuple[Any, ...]]:
    """Whether an ArrayLike is one of a union's types, and the other ones."""
    members, numbers = set(get_args(union)), set(get_args(ArrayLike))
    return numbers <= members, tuple(members - numbers if numbers <= members else members)


_SCALARS: dict[Any, tuple[type, ...]] = {
    bool: (bool, np.bool_), int: (int, np.integer), float: (int, float, np.integer, np.floating), None: (NoneType,)
}  # fmt: skip
_CONTAINERS = (Sequence, Iterable, Mapping, tuple, list, dict)


def _is_container(value: Any, origin: Any, members: tuple[Any, ...]) -> bool:
    if origin in (Mapping, dict):
        return isinstance(value, Mapping) and (not members or _all_are(value.values(), members[1]))
    if isinstance(value, (str, bytes, Mapping)):
        return False
    if origin is Iterable and not isinstance(value, Sequence):
        return isinstance(value, Iterable)
    if not isinstance(value, Sequence):
        return False
    if origin is not tuple or members[1:] == (...,):
        return not members or _all_are(value, members[0])
    return len(value) == len(members) and all(map(_is_a, value, members))


def _all_are(values: Iterable[Any], hint: Any) -> bool:
    if _is_told_by_type(hint):  # then one of each is enough: tables have hundreds of columns
        values = {type(value): value for value in values}.values()
    return all(_is_a(value, hint) for value in values)


@functools.cache
def _is_told_by_type(hint: Any) -> bool:
    return (get_origin(hint) or hint) not in (*_CONTAINERS, Union, UnionType, Annotated)


def _is_numbers(value: Any) -> bool:
    try:
        return np.asarray(value).dtype.kind in "biuf"
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: of a tensor that has a gradient
        return False

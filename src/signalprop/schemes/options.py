"""Options of schemes: the type of a field says what it takes, and checks it.

gain: Positive = 1.0
activation: Literal["auto", "keep"] = "auto"
norm: bool = True
epsilon: Positive | None = None
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.network.embedding_and_head import LARGEST

__all__ = ["Number", "Positive", "Share", "Whole", "within"]

Check = Callable[[Any, str, Any], None]  # of (scheme, name of the option, its value)
_WIDEST = 10_000_000


def _refuse(owner: Any, name: str, value: Any, expected: str) -> InputError:
    return InputError(f"option {name} of scheme {owner.name!r} is {value!r:.60}; expected {expected}")


@typed
def within(low: float, high: float) -> Check:
    """The check of a number from `low` to `high`, for `Annotated[float, within(0, 30)]`."""

    def check(owner: Any, name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise _refuse(owner, name, value, f"a number from {low:g} to {high:g}")

    return check


def _positive(owner: Any, name: str, value: Any) -> None:
    within(0.0, LARGEST)(owner, name, value)
    if value == 0:
        raise InputError(f"option {name} of scheme {owner.name!r} is 0; expected a positive number")


def _whole(owner: Any, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _WIDEST:
        raise _refuse(owner, name, value, f"a whole number from 1 to {_WIDEST}")


def _truth(owner: Any, name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise _refuse(owner, name, value, "true or false")


Positive = Annotated[float, _positive]
Number = Annotated[float, within(-LARGEST, LARGEST)]
Share = Annotated[float, within(0.0, 1.0)]
Whole = Annotated[int, _whole]


def check_options(owner: Any) -> None:
    """Refuse an option that its type does not take."""
    for name, (check, optional) in _checks(owner.__class__).items():
        value = getattr(owner, name)
        if not (optional and value is None):
            check(owner, name, value)


@cache
def _checks(cls: type) -> dict[str, tuple[Check, bool]]:
    """By option: its check, and whether it may be None; options of other types check themselves."""
    try:
        declared = get_type_hints(cls, include_extras=True)
    except NameError:  # a stranger's class, with names that only a type checker knows
        return {}
    out = {}
    for name in getattr(cls, "__dataclass_fields__", {}):
        kind = declared[name]
        optional = type(None) in get_args(kind)
        one = next(item for item in get_args(kind) if item is not type(None)) if optional else kind
        if check := _check_of(one):
            out[name] = check, optional
    return out


def _check_of(kind: Any) -> Check | None:
    if kind is bool:
        return _truth
    if get_origin(kind) is Literal:
        return _among(get_args(kind))
    return next((item for item in getattr(kind, "__metadata__", ()) if callable(item)), None)


def _among(choices: tuple[Any, ...]) -> Check:
    def check(owner: Any, name: str, value: Any) -> None:
        if value not in choices:
            raise _refuse(owner, name, value, f"one of {', '.join(map(str, choices))}")

    return check

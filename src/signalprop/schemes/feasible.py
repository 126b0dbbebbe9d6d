"""What a scheme can do: the smallest option that fits, in digits that can be typed; attention that can be shaped."""

from __future__ import annotations

import math
from collections.abc import Callable

from signalprop.errors import InputError
from signalprop.network.parametrization import Parametrization
from signalprop.theory.branches import branches_of


def smallest_that_fits(fits: Callable[[float], bool], low: float, high: float) -> float:
    """The smallest number from `low`, which does not fit, to `high` that fits, as do all larger ones; or infinity."""
    if not fits(high):
        return math.inf
    for _ in range(50):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def rounded_down(number: float) -> str:
    """Five digits, rounded down: a bound that can be typed."""
    return _digits(number, math.floor)


def rounded_up(number: float) -> str:
    """Five digits, rounded up."""
    return _digits(number, math.ceil)


def _digits(number: float, rounded: Callable[[float], int]) -> str:
    unit = 10.0 ** (math.floor(math.log10(number)) - 4)
    return f"{rounded(number / unit) * unit:.5g}"


def followed(table: Parametrization) -> Parametrization:
    """The table, whose attention prediction can follow and `build` can build; both ask the same."""
    try:
        branches_of(table)
    except InputError as error:
        raise InputError(f"scheme {table.scheme!r}: {error}, or choose another scheme") from None
    return table

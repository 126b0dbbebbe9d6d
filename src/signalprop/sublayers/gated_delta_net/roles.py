"""Gated DeltaNet (Yang, Kautz and Hatamizadeh 2025): a short convolution, the gated delta rule, a norm per head."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
from pydantic import Field, model_validator

from signalprop.files.validation import Value
from signalprop.network.kinds import Kind, Role
from signalprop.network.moments import FloatArray

if TYPE_CHECKING:
    from signalprop.network.architecture import Architecture


class Settings(Value):
    """What a gated DeltaNet is beyond an Architecture's fields.

    Attributes:
        n_heads, d_value: heads, and features of the value of each.
        n_groups: consecutive heads of a group share queries and keys. d_key: numbers of each of these.
        width: tokens that a filter reads, the token itself and those before it.
        rates: exp(A_log), between these evenly, at the middles of n_heads equal parts.
        step_bias: dt_bias of every head. eps: of the norm, and of those of queries and keys.
    """

    n_heads: int = Field(8, ge=1, le=1_000_000)
    d_value: int = Field(64, ge=1, le=1_000_000)
    n_groups: int = Field(8, ge=1, le=1_000_000)
    d_key: int = Field(64, ge=1, le=1_000_000)
    width: int = Field(4, ge=1, le=10_000)
    rates: tuple[float, float] = (0.01, 16.0)
    step_bias: float = 1.0
    eps: float = Field(1e-6, ge=0, le=1)

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        if self.n_heads % self.n_groups:
            raise ValueError(f"n_heads {self.n_heads} is not a multiple of n_groups {self.n_groups}; choose a divisor")
        if min(self.rates) <= 0:
            raise ValueError("rates: expected positive numbers")
        return self

    @property
    def inner(self) -> int:
        """Values of all heads."""
        return self.n_heads * self.d_value

    @property
    def shared(self) -> int:
        """Numbers of the keys, or of the queries, of all groups."""
        return self.n_groups * self.d_key

    def rate(self, n: int | None = None) -> FloatArray:
        """exp(A_log) of every head, or of so many that stand for them."""
        n = n or self.n_heads
        low, high = self.rates
        return np.asarray(low + (high - low) * (np.arange(n) + 0.5) / n)


def settings(a: Architecture) -> Settings:
    """Of the gated DeltaNets of an architecture; the defaults where it has none."""
    return cast(Settings, a.settings.get("gated_delta_net") or Settings.model_validate({}))


def _inner(a: Architecture) -> tuple[int, int]:
    return a.d_model, settings(a).inner


def _shared(a: Architecture) -> tuple[int, int]:
    return a.d_model, settings(a).shared


def _heads(a: Architecture) -> tuple[int, int]:
    return a.d_model, settings(a).n_heads


def _taps(a: Architecture) -> tuple[int, int]:
    s = settings(a)
    return s.width, s.inner + 2 * s.shared


def _out(a: Architecture) -> tuple[int, int]:
    return settings(a).inner, a.d_model


def _never(a: Architecture) -> bool:
    return False


KIND = Kind(
    name="gated_delta_net",
    package=__name__.rpartition(".")[0],
    roles=(
        Role("delta_gate", _inner, biased=_never, reads=True),
        Role("delta_value", _inner, biased=_never, reads=True),
        Role("delta_key", _shared, biased=_never, reads=True),
        Role("delta_query", _shared, biased=_never, reads=True),
        Role("delta_decay", _heads, biased=_never, reads=True),
        Role("delta_write", _heads, biased=_never, reads=True),
        Role("delta_filter", _taps, biased=_never),
        Role("delta_out", _out, biased=_never, writes=True),
    ),
    words="gated DeltaNet",
    short="delta",
    line="-.",
    settings=Settings,
    longest=128,
    beyond="of gated DeltaNets they are means over the first 64",
)

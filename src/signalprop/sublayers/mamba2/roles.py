"""Mamba-2 (Dao and Gu 2024, section 7): a selective scan between a short convolution and a gated norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
from pydantic import Field, model_validator

from signalprop.files.validation import Value
from signalprop.network.kinds import Kind, Role
from signalprop.network.moments import FloatArray

if TYPE_CHECKING:
    from signalprop.network.architecture import Architecture

_GOLDEN = (5**0.5 - 1) / 2


class Settings(Value):
    """What a Mamba-2 sublayer is beyond an Architecture's fields.

    Attributes:
        n_heads, d_head: heads of the scan, and features of each (default: those that twice d_model have, by 64).
        n_groups: heads of a group share keys and queries, and a norm. d_state: numbers of each of these.
        width: tokens that a filter reads, the token itself and those before it. conv_bias: filters have biases.
        bias: the maps from and onto the stream have biases.
        rates: exp(A_log), from the first head's to the last one's in equal steps.
        steps: softplus(dt_bias), between these evenly in the logarithm, in an order that the rates do not follow.
        skip: D. normed: a norm follows the gate. eps: of that norm.
    """

    n_heads: int = Field(8, ge=1, le=1_000_000)
    d_head: int = Field(64, ge=1, le=1_000_000)
    n_groups: int = Field(1, ge=1, le=1_000_000)
    d_state: int = Field(64, ge=1, le=1_000_000)
    width: int = Field(4, ge=1, le=10_000)
    conv_bias: bool = True
    bias: bool = False
    rates: tuple[float, float] = (1.0, 16.0)
    steps: tuple[float, float] = (0.001, 0.1)
    skip: float = 1.0
    normed: bool = True
    eps: float = Field(1e-5, ge=0, le=1)

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        if self.n_heads % self.n_groups:
            raise ValueError(f"n_heads {self.n_heads} is not a multiple of n_groups {self.n_groups}; choose a divisor")
        if min(*self.rates, *self.steps) <= 0:
            raise ValueError("rates and steps: expected positive numbers")
        return self

    @property
    def inner(self) -> int:
        """Features of all heads."""
        return self.n_heads * self.d_head

    @property
    def shared(self) -> int:
        """Numbers of the keys, or of the queries, of all groups."""
        return self.n_groups * self.d_state

    def rate(self) -> FloatArray:
        """exp(A_log) of every head."""
        return np.linspace(*self.rates, self.n_heads)

    def step_bias(self, turn: float) -> FloatArray:
        """dt_bias of every head; `turn` moves the order of the steps."""
        place = (_GOLDEN * (np.arange(self.n_heads) + 0.5) + turn) % 1
        low, high = np.log(self.steps)
        step = np.exp(low + place * (high - low))
        return np.asarray(step + np.log(-np.expm1(-step)))


def settings(a: Architecture) -> Settings:
    """Of the Mamba-2 sublayers of an architecture; the defaults where it has none."""
    return cast(Settings, a.settings.get("mamba2") or Settings.model_validate({}))


def _inner(a: Architecture) -> tuple[int, int]:
    return a.d_model, settings(a).inner


def _shared(a: Architecture) -> tuple[int, int]:
    return a.d_model, settings(a).shared


def _steps(a: Architecture) -> tuple[int, int]:
    return a.d_model, settings(a).n_heads


def _taps(a: Architecture) -> tuple[int, int]:
    s = settings(a)
    return s.width, s.inner + 2 * s.shared


def _out(a: Architecture) -> tuple[int, int]:
    return settings(a).inner, a.d_model


def _biased(a: Architecture) -> bool:
    return settings(a).bias


def _filter_biased(a: Architecture) -> bool:
    return settings(a).conv_bias


KIND = Kind(
    name="mamba2",
    package=__name__.rpartition(".")[0],
    roles=(
        Role("scan_gate", _inner, biased=_biased, reads=True),
        Role("scan_value", _inner, biased=_biased, reads=True),
        Role("scan_key", _shared, biased=_biased, reads=True),
        Role("scan_query", _shared, biased=_biased, reads=True),
        Role("scan_step", _steps, biased=_biased, reads=True),
        Role("scan_filter", _taps, biased=_filter_biased),
        Role("scan_out", _out, biased=_biased, writes=True),
    ),
    words="Mamba-2",
    short="mamba",
    line="-.",
    settings=Settings,
    longest=128,
    beyond="of Mamba-2 they are means over the first 64, and token correlations were 7 % off",
)

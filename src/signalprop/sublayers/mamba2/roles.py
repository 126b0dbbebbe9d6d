"""Mamba-2 (Dao and Gu 2024, section 7): a selective scan between a short convolution and a gated norm."""

from __future__ import annotations

import numpy as np
from pydantic import Field, model_validator

from signalprop.network.kinds import Kind
from signalprop.network.moments import FloatArray
from signalprop.sublayers.recurrent_settings import Recurrent

_GOLDEN = (5**0.5 - 1) / 2


class Settings(Recurrent):
    """What a Mamba-2 sublayer is beyond an Architecture's fields.

    Attributes:
        d_head: features of each head of the scan. d_state: numbers of a key or a query. Heads of a group share a norm,
            too. conv_bias: filters have biases.
        bias: the maps from and onto the stream have biases.
        rates: exp(A_log), from the first head's to the last one's in equal steps.
        steps: softplus(dt_bias), between these evenly in the logarithm, in an order that the rates do not follow.
        skip: D. normed: a norm follows the gate. eps: of that norm.
    """

    kind = "mamba2"
    prefix = "scan"
    d_head: int = Field(64, ge=1, le=1_000_000)
    d_state: int = Field(64, ge=1, le=1_000_000)
    conv_bias: bool = True
    bias: bool = False
    rates: tuple[float, float] = (1.0, 16.0)
    steps: tuple[float, float] = (0.001, 0.1)
    skip: float = 1.0
    normed: bool = True
    eps: float = Field(1e-5, ge=0, le=1)

    @model_validator(mode="after")
    def _positive(self) -> Settings:
        if min(*self.rates, *self.steps) <= 0:
            raise ValueError("rates and steps: expected positive numbers")
        return self

    @property
    def sizes(self) -> tuple[int, int]:
        """As `Recurrent.sizes`."""
        return self.d_head, self.d_state

    def rate(self) -> FloatArray:
        """exp(A_log) of every head."""
        return np.linspace(*self.rates, self.n_heads)

    def step_bias(self, turn: float) -> FloatArray:
        """dt_bias of every head; `turn` moves the order of the steps."""
        place = (_GOLDEN * (np.arange(self.n_heads) + 0.5) + turn) % 1
        low, high = np.log(self.steps)
        step = np.exp(low + place * (high - low))
        return np.asarray(step + np.log(-np.expm1(-step)))


KIND = Kind(
    name="mamba2",
    roles=Settings.roles(
        "step", biased=lambda a: Settings.of(a).bias, filter_biased=lambda a: Settings.of(a).conv_bias
    ),
    words="Mamba-2",
    short="mamba",
    settings=Settings,
    narrower=Settings.narrower,
)

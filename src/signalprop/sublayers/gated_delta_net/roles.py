"""Gated DeltaNet (Yang, Kautz and Hatamizadeh 2025): a short convolution, the gated delta rule, a norm per head."""

from __future__ import annotations

import numpy as np
from pydantic import Field, model_validator

from signalprop.network.kinds import Kind
from signalprop.network.moments import FloatArray
from signalprop.sublayers.recurrent_settings import Recurrent


class Settings(Recurrent):
    """What a gated DeltaNet is beyond an Architecture's fields.

    Attributes:
        d_value: features of a head's value. d_key: numbers of a query or a key.
        rates: exp(A_log), between these evenly, at the middles of n_heads equal parts.
        step_bias: dt_bias of every head. eps: of the norm, and of those of queries and keys.
    """

    kind = "gated_delta_net"
    prefix = "delta"
    d_value: int = Field(64, ge=1, le=1_000_000)
    n_groups: int = Field(8, ge=1, le=1_000_000)
    d_key: int = Field(64, ge=1, le=1_000_000)
    rates: tuple[float, float] = (0.01, 16.0)
    step_bias: float = 1.0
    eps: float = Field(1e-6, ge=0, le=1)

    @model_validator(mode="after")
    def _positive(self) -> Settings:
        if min(self.rates) <= 0:
            raise ValueError("rates: expected positive numbers")
        return self

    @property
    def sizes(self) -> tuple[int, int]:
        """As `Recurrent.sizes`."""
        return self.d_value, self.d_key

    def rate(self, n: int | None = None) -> FloatArray:
        """exp(A_log) of every head, or of so many that stand for them."""
        n = n or self.n_heads
        low, high = self.rates
        return np.asarray(low + (high - low) * (np.arange(n) + 0.5) / n)


KIND = Kind(
    name="gated_delta_net",
    roles=Settings.roles("decay", "write"),
    words="gated DeltaNet",
    short="delta",
    settings=Settings,
    narrower=Settings.narrower,
)

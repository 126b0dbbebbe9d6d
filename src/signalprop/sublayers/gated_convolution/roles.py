"""A short causal convolution between two gates (LFM2): out(g (taps * (b x))), b, g and x maps of the stream."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from signalprop.network.kinds import Kind, KindSettings, Role


class Settings(KindSettings):
    """width: tokens that a filter reads, the token itself and those before it. bias: its maps and taps have biases."""

    kind = "gated_convolution"
    width: int = Field(3, ge=1, le=10_000)
    bias: bool = False


def _role(name: str, width: bool = False, **changes: Any) -> Role:
    """A square map, or the filter."""
    return Role(
        name,
        lambda a: (Settings.of(a).width if width else a.d_model, a.d_model),
        biased=lambda a: Settings.of(a).bias,
        **changes,
    )


KIND = Kind(
    name="gated_convolution",
    roles=(
        _role("conv_before", reads=True),
        _role("conv_after", reads=True),
        _role("conv_value", reads=True),
        _role("conv_filter", width=True),
        _role("conv_out", writes=True),
    ),
    words="gated convolution",
    short="conv",
    settings=Settings,
)

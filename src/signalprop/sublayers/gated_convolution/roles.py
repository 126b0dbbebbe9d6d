"""A short causal convolution between two gates (LFM2): out(g (taps * (b x))), b, g and x maps of the stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from pydantic import Field

from signalprop.files.validation import Value
from signalprop.network.kinds import Kind, Role

if TYPE_CHECKING:
    from signalprop.network.architecture import Architecture


class Settings(Value):
    """width: tokens that a filter reads, the token itself and those before it. bias: its maps and taps have biases."""

    width: int = Field(3, ge=1, le=10_000)
    bias: bool = False


_DEFAULTS = Settings.model_validate({})


def settings(a: Architecture) -> Settings:
    """Of the convolutions of an architecture; the defaults where it has none."""
    return cast(Settings, a.settings.get("gated_convolution") or _DEFAULTS)


def _square(a: Architecture) -> tuple[int, int]:
    return a.d_model, a.d_model


def _taps(a: Architecture) -> tuple[int, int]:
    return settings(a).width, a.d_model


def _biased(a: Architecture) -> bool:
    return settings(a).bias


KIND = Kind(
    name="gated_convolution",
    package=__name__.rpartition(".")[0],
    roles=(
        Role("conv_before", _square, biased=_biased, reads=True),
        Role("conv_after", _square, biased=_biased, reads=True),
        Role("conv_value", _square, biased=_biased, reads=True),
        Role("conv_filter", _taps, biased=_biased),
        Role("conv_out", _square, biased=_biased, writes=True),
    ),
    words="gated convolution",
    short="conv",
    line="-.",
    settings=Settings,
)

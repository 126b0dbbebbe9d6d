"""A short causal convolution between two gates as a PyTorch module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from signalprop.models.surroundings import Surroundings
from signalprop.models.weights import WithMaps
from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import Parametrization


class GatedConvolutionModule(WithMaps):
    """out(after (filter * (before value))); the filter is one per feature, causal."""

    def __init__(self, a: Architecture, biases: dict[str, bool], dtype: torch.dtype) -> None:
        super().__init__()
        self.add_maps(a, biases, dtype, "conv_filter")

    def forward(self, stream: Tensor, around: Surroundings) -> Tensor:
        """(batch, tokens, features) -> the same shape."""
        gated = (self.conv_before(stream) * self.conv_value(stream)).transpose(1, 2)
        filtered = self.conv_filter(gated)[..., : stream.shape[1]].transpose(1, 2)
        out: Tensor = self.conv_out(filtered * self.conv_after(stream))
        return out


def make(p: Parametrization, index: int, biases: dict[str, bool], dtype: torch.dtype, shape: Any) -> nn.Module:
    return GatedConvolutionModule(p.architecture, biases, dtype)

"""A short causal convolution between two gates as a PyTorch module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from signalprop.models.surroundings import Surroundings
from signalprop.models.weights import Linear
from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import Parametrization
from signalprop.sublayers.gated_convolution.roles import Settings


class GatedConvolutionModule(nn.Module):
    """out(after (filter * (before value))); the filter is one per feature, causal."""

    def __init__(self, a: Architecture, biases: dict[str, bool], dtype: torch.dtype) -> None:
        super().__init__()
        d, width = a.d_model, Settings.of(a).width
        self.conv_before, self.conv_after, self.conv_value, self.conv_out = (
            Linear(d, d, bias=biases[role], dtype=dtype)
            for role in ("conv_before", "conv_after", "conv_value", "conv_out")
        )
        self.conv_filter = nn.Conv1d(
            d, d, width, groups=d, padding=width - 1, bias=biases["conv_filter"], dtype=dtype, device="meta"
        ).to_empty(device="cpu")

    def forward(self, stream: Tensor, around: Surroundings) -> Tensor:
        """(batch, tokens, features) -> the same shape."""
        gated = (self.conv_before(stream) * self.conv_value(stream)).transpose(1, 2)
        filtered = self.conv_filter(gated)[..., : stream.shape[1]].transpose(1, 2)
        out: Tensor = self.conv_out(filtered * self.conv_after(stream))
        return out


def make(p: Parametrization, index: int, biases: dict[str, bool], dtype: torch.dtype, shape: Any) -> nn.Module:
    """The module of sublayer `index` of a table, its weights not drawn yet."""
    return GatedConvolutionModule(p.architecture, biases, dtype)

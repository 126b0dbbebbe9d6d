"""A short causal convolution between two gates as a PyTorch module."""

from __future__ import annotations

from torch import Tensor

from signalprop.models.surroundings import Surroundings
from signalprop.models.weights import WithMaps


class GatedConvolutionModule(WithMaps):
    """out(after (filter * (before value))); the filter is one per feature, causal."""

    filter = "conv_filter"

    def forward(self, stream: Tensor, around: Surroundings) -> Tensor:
        """(batch, tokens, features) -> the same shape."""
        gated = (self.conv_before(stream) * self.conv_value(stream)).transpose(1, 2)
        filtered = self.conv_filter(gated)[..., : stream.shape[1]].transpose(1, 2)
        out: Tensor = self.conv_out(filtered * self.conv_after(stream))
        return out


make = GatedConvolutionModule

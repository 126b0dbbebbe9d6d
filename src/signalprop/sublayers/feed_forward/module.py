"""The feed-forward sublayer as a PyTorch module."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from signalprop.models.activations import torch_activation
from signalprop.models.surroundings import Surroundings
from signalprop.models.weights import WithMaps
from signalprop.network.parametrization import Parametrization


class FeedForward(WithMaps):
    """down(f(up x)), or gated: down(f(gate x) * up x)."""

    def __init__(self, p: Parametrization, *more: Any) -> None:
        super().__init__(p, *more)
        self.gated, self.activation = p.architecture.gated, torch_activation(p.architecture.activation)

    def forward(self, stream: Tensor, around: Surroundings) -> Tensor:
        """(batch, tokens, features) -> the same shape; tokens do not mix."""
        hidden = self.up(stream)
        hidden = self.activation(self.gate(stream)) * hidden if self.gated else self.activation(hidden)
        out: Tensor = self.down(hidden)
        return out


make = FeedForward

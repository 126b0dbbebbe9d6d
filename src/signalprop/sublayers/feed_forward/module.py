"""The feed-forward sublayer as a PyTorch module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from signalprop.models.activations import torch_activation
from signalprop.models.surroundings import Surroundings
from signalprop.models.weights import WithMaps
from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import Parametrization


class FeedForward(WithMaps):
    """down(f(up x)), or gated: down(f(gate x) * up x)."""

    def __init__(self, architecture: Architecture, biases: dict[str, bool], *, dtype: torch.dtype) -> None:
        super().__init__()
        self.gated = architecture.gated
        self.activation = torch_activation(architecture.activation)
        self.add_maps(architecture, biases, dtype)

    def forward(self, stream: Tensor, around: Surroundings) -> Tensor:
        """(batch, tokens, features) -> the same shape; the tokens do not meet."""
        hidden = self.up(stream)
        hidden = self.activation(self.gate(stream)) * hidden if self.gated else self.activation(hidden)
        out: Tensor = self.down(hidden)
        return out


def make(p: Parametrization, index: int, biases: dict[str, bool], dtype: torch.dtype, shape: Any) -> FeedForward:
    """The feed-forward of sublayer `index` of a table, its weights not drawn yet; nothing shapes it."""
    return FeedForward(p.architecture, biases, dtype=dtype)

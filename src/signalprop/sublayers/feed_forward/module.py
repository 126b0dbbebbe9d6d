"""The feed-forward sublayer as a PyTorch module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from signalprop.models.activations import torch_activation
from signalprop.models.surroundings import Surroundings
from signalprop.models.weights import Linear
from signalprop.network.architecture import Architecture
from signalprop.network.parametrization import Parametrization, fan


class FeedForward(nn.Module):
    """down(f(up x)), or gated: down(f(gate x) * up x)."""

    def __init__(self, architecture: Architecture, biases: dict[str, bool], *, dtype: torch.dtype) -> None:
        super().__init__()
        self.activation = torch_activation(architecture.activation)
        self.gate = Linear(*fan(architecture, "gate"), bias=biases["gate"], dtype=dtype) if architecture.gated else None
        self.up, self.down = (
            Linear(*fan(architecture, role), bias=biases[role], dtype=dtype) for role in ("up", "down")
        )

    def forward(self, stream: Tensor, around: Surroundings) -> Tensor:
        """(batch, tokens, features) -> the same shape; the tokens do not meet."""
        hidden = self.up(stream)
        hidden = self.activation(hidden) if self.gate is None else self.activation(self.gate(stream)) * hidden
        out: Tensor = self.down(hidden)
        return out


def make(p: Parametrization, index: int, biases: dict[str, bool], dtype: torch.dtype, shape: Any) -> FeedForward:
    """The feed-forward of sublayer `index` of a table, its weights not drawn yet; nothing shapes it."""
    return FeedForward(p.architecture, {"gate": False} | biases, dtype=dtype)

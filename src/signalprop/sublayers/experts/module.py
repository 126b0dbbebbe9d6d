"""A mixture of experts as a PyTorch module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.models.activations import torch_activation
from signalprop.models.surroundings import Surroundings
from signalprop.models.weights import Linear
from signalprop.network.architecture import Architecture
from signalprop.network.kinds import ROLE
from signalprop.network.parametrization import Parametrization, fan
from signalprop.streams.routing import choose
from signalprop.sublayers.experts.roles import Settings


class Copies(nn.Module):
    """One map per expert, not drawn yet.

    Attributes:
        weight: (experts, outputs, inputs). bias: (experts, outputs), or None.
    """

    def __init__(self, copies: int, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(copies, outputs, inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(copies, outputs, dtype=dtype)) if bias else None

    def of(self, expert: int, x: Tensor) -> Tensor:
        """The map of one expert, (tokens, inputs) -> (tokens, outputs)."""
        return nn.functional.linear(x, self.weight[expert], None if self.bias is None else self.bias[expert])


class ChosenExperts(nn.Module):
    """Every token through the experts that it has chosen; who watches the load of experts sees them here."""

    def __init__(self, num_experts: int, activation: Callable[[Tensor], Tensor], up_shift: float = 0.0) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.activation = activation
        self.up_shift = up_shift

    def forward(self, x: Tensor, index: Tensor, weight: Tensor, maps: list[Copies]) -> Tensor:
        """(tokens, features) -> the same; `index` and `weight` are (tokens, k); maps: (gate,) up, down."""
        out = torch.zeros_like(x)
        for expert in torch.unique(index).tolist():
            token, place = torch.where(index == expert)
            hidden = maps[-2].of(expert, x[token])
            gated = len(maps) == 3
            gate = self.activation(maps[0].of(expert, x[token]) if gated else hidden)
            hidden = gate * (hidden + self.up_shift) if gated else gate
            out = out.index_add(0, token, maps[-1].of(expert, hidden) * weight[token, place, None])
        return out


class ExpertsModule(nn.Module):
    """scale * sum over the chosen of w_e(x) f_e(x), plus a shared feed-forward; `Settings` says which."""

    def __init__(self, a: Architecture, biases: dict[str, bool], dtype: torch.dtype, *, by_table: bool = False) -> None:
        super().__init__()
        self.settings, self.by_table = Settings.of(a), by_table
        for role, bias in biases.items():
            options: dict[str, Any] = {"bias": bias, "dtype": dtype}
            copied = ROLE[role].copies is not None
            size = (ROLE[role].held(a)[0], *fan(a, role))
            setattr(self, role, Copies(*size, **options) if copied else Linear(*fan(a, role), **options))
        self.roles = tuple(biases)
        self.experts = ChosenExperts(self.settings.n_experts, torch_activation(a.activation), self.settings.up_shift)

    def forward(self, stream: Tensor, around: Surroundings) -> Tensor:
        """(batch, tokens, features) -> the same shape; tokens do not mix."""
        s, x = self.settings, stream.flatten(0, 1)
        maps: dict[str, Any] = {role: getattr(self, role) for role in self.roles}
        weight, index = choose(maps["router"](x), s)
        if self.by_table:  # of zeros: all of them the first expert, whose weights are one another's
            weight, index = torch.full_like(weight, 1 / s.top_k), torch.zeros_like(index)
        chosen = [one for role, one in maps.items() if role.startswith("expert_")]
        out: Tensor = self.experts(x, index, weight * s.scale, chosen)
        if s.shared_width:
            hidden, f = maps["shared_up"](x), self.experts.activation
            hidden = f(maps["shared_gate"](x)) * hidden if "shared_gate" in maps else f(hidden)
            shared = maps["shared_down"](hidden)
            out = out + (maps["shared_router"](x).sigmoid() * shared if s.shared_gated else shared)
        return out.view_as(stream)


def make(p: Parametrization, index: int, biases: dict[str, bool], dtype: torch.dtype, shape: Any) -> nn.Module:
    """The experts of sublayer `index` of a table, their weights not drawn yet; nothing shapes them."""
    return ExpertsModule(
        p.architecture, biases, dtype, by_table=bool(p.layer[index] < Settings.of(p.architecture).hashed)
    )

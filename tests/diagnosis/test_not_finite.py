"""Activations that are not finite while parameters are: the operation, its layer, the cause that was tested."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from signalprop.diagnosis.not_finite import layer_paths, why_not_finite
from signalprop.results.findings import Finding


class Layer(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.map, self.norm = fault, nn.Linear(8, 8), nn.LayerNorm(8, eps=0.0)

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "mask":
            hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(0)
            scores = (x @ x.transpose(-1, -2)).masked_fill(hidden, -math.inf)
            return x + scores.softmax(-1) @ x
        if self.fault == "range":
            return x + self.map(x * 1e3) * 1e3
        if self.fault == "norm":
            return x + self.norm(x - x)
        if self.fault == "division":
            return x + x / (x.detach() * 0).abs().sum()
        if self.fault == "logarithm":
            return x + torch.asin(x.abs() + 2)
        return x + self.map(x)


class Model(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(fault if i == 2 else "") for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def found(fault: str) -> tuple[Finding, ...]:
    torch.manual_seed(0)
    model: Any = Model(fault).to(torch.float16 if fault == "range" else torch.float32)
    x = torch.randn(2, 5, 8).to(next(model.parameters()).dtype)
    return why_not_finite(model, [{"x": x}], layer_paths(model, model.layers))


@pytest.mark.parametrize(
    ("fault", "says", "ruled"),
    [
        ("mask", "in softmax in layers.2: a row of the mask allows no key", 1),
        ("range", "float16 ends at 65504", 2),
        ("norm", "in layer_norm in layers.2.norm: all features of a token are equal", 3),
        ("division", "it divides by 0", 3),
        ("logarithm", "in asin in layers.2: none of the causes", 4),
    ],
)
def test_the_first_operation_and_its_cause(fault: str, says: str, ruled: int) -> None:
    (one,) = found(fault)
    assert one.layers == (2,) and says in one.text, one.text
    assert one.cause.startswith("tested") and one.cause.count(", ") - one.cause.count(", which") == ruled - 1


def test_nothing_where_all_is_finite() -> None:
    assert found("") == ()

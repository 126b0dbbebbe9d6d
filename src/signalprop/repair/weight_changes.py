"""A factor along one axis of a parameter: what `fold` and `fit` do to weights, biases and gains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Factor = float | Tensor  # one number, or one per output feature


@dataclass(frozen=True)
class Change:
    """A parameter, and the factor along one of its axes: new = (old + offset) * factor - offset."""

    tensor: Tensor
    factor: Factor
    axis: int
    offset: float

    def value(self) -> Tensor:
        """The new entries, computed in float64."""
        factor = self.factor
        if isinstance(factor, Tensor):
            shape = [-1 if i == self.axis else 1 for i in range(self.tensor.ndim)]
            factor = factor.reshape(shape).to(self.tensor.device)
        return (self.tensor.detach().double() + self.offset) * factor - self.offset

    def problem(self) -> str:
        """Why the parameter cannot take the factor; empty where it can."""
        tensor = self.tensor
        if not tensor.is_floating_point() or not isinstance(tensor, torch.nn.Parameter):
            return f"its weight is {'quantized' if not tensor.is_floating_point() else 'computed'}"
        if isinstance(self.factor, Tensor) and self.factor.numel() not in (1, tensor.shape[self.axis]):
            return f"its {tensor.shape[self.axis]} features do not fit {self.factor.numel()} multipliers"
        largest = float(self.value().abs().max()) if tensor.numel() else 0.0
        if not largest <= torch.finfo(tensor.dtype).max:
            return f"its weight would reach {largest:.3g}, too much for {tensor.dtype}"
        return ""


def product(one: Factor, other: Factor) -> Factor:
    """Both factors together; of two vectors on the device of the second."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.to(other.device) * other
    return one * other

"""The activations of `signalprop.network.activations` as PyTorch functions of one tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from signalprop.network.activations import activation, numbers_of

TorchFunction = Callable[[Tensor], Tensor]


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _identity(x: Tensor) -> Tensor:
    return x


def _transformed(x: Tensor, inside: TorchFunction, numbers: tuple[float, ...]) -> Tensor:
    scale, shift, lift, gain = numbers
    return (inside(x * scale + shift) + lift) * gain


# plain functions, no lambdas: a model that holds one can be pickled
TORCH_FUNCTIONS: dict[str, TorchFunction] = {
    "relu": F.relu,
    "leaky_relu": partial(F.leaky_relu, negative_slope=0.01),
    "relu2": _relu2,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": _quick_gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "identity": _identity,
    "erf": torch.erf,
    "mish": F.mish,
    "softplus": F.softplus,
    "elu": F.elu,
}


class _NumpyActivation(torch.autograd.Function):
    """An activation that is registered in NumPy alone: f forward, f' backward, both on the CPU in float64."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.name = name
        return torch.as_tensor(activation(name).function(x.detach().double().cpu().numpy())).to(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        slope = activation(ctx.name).derivative(x.detach().double().cpu().numpy())
        return grads[0] * torch.as_tensor(slope).to(x), None


def _by_numpy(x: Tensor, name: str) -> Tensor:
    out: Tensor = _NumpyActivation.apply(x, name)  # type: ignore[no-untyped-call]
    return out


def torch_activation(name: str) -> TorchFunction:
    """The PyTorch function of a registered activation or of an alias.

    One that was added with `signalprop.network.activations.register` runs through its NumPy functions: right, but
    slow, and without second derivatives.
    """
    canonical = activation(name).name
    inside, numbers = numbers_of(canonical)
    if len(numbers) == 1:
        return partial(F.leaky_relu, negative_slope=numbers[0])
    if numbers:
        return partial(_transformed, inside=torch_activation(inside), numbers=numbers)
    if canonical in TORCH_FUNCTIONS:
        return TORCH_FUNCTIONS[canonical]
    return partial(_by_numpy, name=canonical)

"""The stream at the layers' boundaries by plain hooks, which know nothing of signalprop.

A layer is a member of an nn.ModuleList or nn.Sequential; the stream is the first floating tensor that it is given, and
the first of that shape that it gives. Between boundaries, what enters a layer's norms is seen as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

ADDITIONS = (
    "Residual",
    "GRUGating",
)  # x-transformers: modules that are given a branch and the stream, and give their sum


@dataclass
class Layers:
    """What went through the members of one list of modules, call by call: variances of the stream and of its gradient.

    `correlations`: of different tokens of what entered; NaN where shapes do not tell which axis holds tokens. `norms`:
    the norms inside that ran, with the variance of what entered, call by call.
    """

    path: str
    entering: list[float] = field(default_factory=list)
    correlations: list[float] = field(default_factory=list)
    leaving: list[float] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)
    norms: list[list[tuple[nn.Module, float]]] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)


def floating(values: Any) -> Iterator[Tensor]:
    """The floating tensors of what a module takes or gives, in order."""
    if isinstance(values, Tensor):
        if values.is_floating_point():
            yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from floating(value)
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from floating(value)


def variance(tensor: Tensor) -> float:
    """Over all entries, in double precision."""
    return float(tensor.detach().double().var(correction=0))


def correlation(x: Tensor) -> float:
    """Over pairs of different tokens of one sequence, of (batch, tokens, features), in double precision."""
    x = x.detach().double() - x.detach().double().mean()
    n = x.shape[1]
    pairs = (x.sum(1).square().sum() - x.square().sum()) / (n * (n - 1)) / x.shape[0] / x.shape[2]
    return float(pairs / x.square().mean())


def in_order(x: Tensor, batch: int, *, grid: bool, tokens: int = 0) -> Tensor | None:
    """A stream as (batch, tokens, features), by the number of sequences alone; None where that fits two axes or none.

    Neither where the first axis may hold windows, so many for each sequence, whose tokens are as many as sequences.

    Args:
        x: (batch, tokens, features) or (tokens, batch, features). grid: or (batch, height, width, features).
        tokens: ids of a sequence.
    """
    x = x.flatten(1, 2) if grid and x.ndim == 4 and x.shape[0] == batch else x
    if x.ndim != 3:
        return None
    if x.shape[1] == batch and (x.shape[0] % batch or x.shape[0] == tokens != batch):
        x = x.transpose(0, 1)
    elif x.shape[0] != batch or x.shape[1] == batch:
        return None
    return x if x.shape[1] > 1 else None


def projected(output: Any) -> Tensor:
    """A loss that any output has: the mean of its first floating tensor times fixed random numbers."""
    first = next(t for t in floating(output) if t.numel() > 1)
    numbers = torch.randn(first.shape, generator=torch.Generator().manual_seed(1))
    return (first * numbers.to(first)).sum() / len(first)


def boundaries(model: nn.Module, inputs: dict[str, Any], begins: Mapping[str, str] | None = None) -> list[Layers]:
    """Every list of modules whose members ran, with the stream at its layers; one forward and one backward pass.

    Args:
        begins: norm by layer, by their paths, of layers that begin with a norm on the stream: what leaves it counts as
            what enters the layer.
    """
    norms = {model.get_submodule(layer): model.get_submodule(norm) for layer, norm in (begins or {}).items()}
    lists = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module)
    ]
    seen = [Layers(path) for path, _ in lists]
    handles = []
    batch = len(next(value for value in inputs.values() if isinstance(value, Tensor)))
    tokens = inputs["input_ids"].shape[-1] if "input_ids" in inputs else 0
    order = partial(in_order, batch=batch, grid="pixel_values" in inputs, tokens=tokens)
    for layers, (_, members) in zip(seen, lists, strict=True):
        for member in members:
            if member is not None:
                handles += _watch(member, layers, order, norm=norms.get(member))
    additions = [m for m in model.modules() if type(m).__name__ in ADDITIONS]
    seen.append(Layers("every addition"))
    for member in additions:
        handles += _watch(member, seen[-1], order, stream=1)
    try:
        with torch.enable_grad():
            output = model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    with suppress(RuntimeError, StopIteration):  # a model without gradients: the forward pass is compared alone
        projected(output).backward()  # type: ignore[no-untyped-call]
    for layers in seen:
        layers.gradients = [variance(t.grad) if t.grad is not None else float("nan") for t in layers.held]
        layers.held = []
    model.zero_grad(set_to_none=True)
    return [layers for layers in seen if layers.leaving and len(layers.leaving) == len(layers.entering)]


def _watch(
    member: nn.Module,
    layers: Layers,
    order: Callable[[Tensor], Tensor | None],
    stream: int = 0,
    norm: nn.Module | None = None,
) -> list[Any]:
    """Hooks on one layer and on the norms in it; the stream is that floating argument, or what leaves that norm."""

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensor = next(islice(floating((*args, *kwargs.values())), stream, None), None)
        if tensor is not None:
            begin(tensor)

    def begin(tensor: Tensor) -> None:
        layers.entering.append(variance(tensor))
        ordered = order(tensor)
        layers.correlations.append(float("nan") if ordered is None else correlation(ordered))
        layers.norms.append([])
        if tensor.requires_grad:
            tensor.retain_grad()
        layers.held.append(tensor)

    def leave(_: nn.Module, __: Any, output: Any) -> None:
        tensors = list(floating(output))
        if tensors and layers.held:  # of two streams, the one that is read first
            same = (tensor for tensor in tensors if tensor.shape == layers.held[-1].shape)
            layers.leaving.append(variance(next(same, tensors[0])))

    def normed(module: nn.Module, args: tuple[Any, ...]) -> None:
        tensor = next(floating(args), None)
        if tensor is not None and layers.norms:
            layers.norms[-1].append((module, variance(tensor)))

    inside = [m for m in member.modules() if "norm" in type(m).__name__.lower() and m is not member and m is not norm]
    return [
        member.register_forward_pre_hook(enter, with_kwargs=True)
        if norm is None
        else norm.register_forward_hook(lambda _, __, output: begin(output)),
        member.register_forward_hook(leave),
        *(m.register_forward_pre_hook(normed) for m in inside),
    ]


def apart(values: Any, others: Any) -> float:
    """The largest relative difference of two rows of numbers."""
    a, b = np.asarray(values, float), np.asarray(others, float)
    return float(np.max(np.abs(a - b) / np.maximum(np.abs(b), 1e-30))) if a.size else 0.0


def nearest(layers: list[Layers], fits: Callable[[Layers], float]) -> tuple[Layers, float] | None:
    """The list of modules that fits best, and how far it is off."""
    found = [(one, fits(one)) for one in layers]
    return min(found, key=lambda pair: pair[1], default=None)

"""A live PyTorch model: its device, its mode (what wraps it, and adapters: `streams.wrappers`)."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping as Dictionary
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.network.architecture import Architecture
from signalprop.streams.placement import device_of, kept_elsewhere


def without_gradient(model: nn.Module) -> str:
    """Why no gradient goes through: a layer is quantised, or its weights are elsewhere; empty where one does."""
    for name, module in model.named_modules():
        if type(module).__module__.startswith("torch.ao.nn.quantized"):
            return f"{name} is quantised to integers"
    away = kept_elsewhere(model)
    words = f"device_map keeps the weights of {away} elsewhere and fetches them for the forward pass alone"
    return "" if away is None else words


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards every module is in the mode it was in."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def in_its_mode(architecture: Architecture, model: nn.Module) -> Architecture:
    """The same; without dropout where the model is in evaluation mode."""
    dry = {} if model.training else {"dropout": 0.0, "attention_dropout": 0.0, "embedding_dropout": 0.0}
    return architecture.replace(**dry)


def placed(model: nn.Module, arguments: Dictionary[str, Any]) -> dict[str, Any]:
    """The arguments on the model's device."""
    device = device_of(model)
    with torch.inference_mode(False):  # a tensor of inference mode takes no part in a backward pass, its copy does
        usable = {k: v.clone() if isinstance(v, Tensor) and v.is_inference() else v for k, v in arguments.items()}
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in usable.items()}

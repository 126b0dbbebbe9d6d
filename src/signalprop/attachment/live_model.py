"""A live PyTorch model: its weights with adapters, its device, its mode (what wraps it: `streams.wrappers`).

Libraries that may not be installed are looked up among the imported modules.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from collections.abc import Mapping as Dictionary
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.network.architecture import Architecture
from signalprop.streams.placement import device_of, kept_elsewhere


def adapters_in(model: nn.Module) -> list[str]:
    """The paths of the layers that PEFT has put adapters on."""
    return [name for name, module in model.named_modules() if _is_adapted(module)]


def _is_adapted(module: Any) -> bool:
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer)


def without_adapters(module: Any) -> Any:
    """The layer under PEFT's adapters; anything else passes through."""
    return module.get_base_layer() if _is_adapted(module) else module


def with_adapters_merged(module: Any) -> Any:
    """A layer whose weight is what a signal meets: the base weight with the active adapters merged into it, in a copy.

    A layer without active adapters, and anything else, passes through.
    """
    if not _is_adapted(module) or module.merged or module.disable_adapters:
        return without_adapters(module)
    merged = copy.deepcopy(module)
    merged.merge()
    return merged.get_base_layer()


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

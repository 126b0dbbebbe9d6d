"""A live PyTorch model: where it has its numbers, on its devices or fetched by hooks of accelerate; and its mode."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping as Dictionary
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.network.architecture import Architecture


def device_of(model: nn.Module) -> torch.device:
    """Where a model takes its inputs; where accelerate keeps its weights elsewhere meanwhile, where they run."""
    devices = [p.device for p in model.parameters()]
    there = (device for device in devices if device.type != "meta")
    runs = (hook.execution_device for module in model.modules() for hook in _align_hooks(module))
    found = next(there, None) or next((place for place in runs if place is not None), None)
    return torch.device(found if found is not None else devices[0] if devices else "cpu")


def without_numbers(model: nn.Module) -> bool:
    """Whether a parameter is on the meta device and no hook of accelerate fetches it when it is needed."""
    return any(
        p.is_meta and not any(hook.offload for hook in _align_hooks(module))
        for module in model.modules()
        for p in module.parameters(recurse=False)
    )


def without_gradient(model: nn.Module) -> str:
    """Why no gradient goes through: a layer is quantised, or its weights are elsewhere; empty where one does."""
    for name, module in model.named_modules():
        if type(module).__module__.startswith("torch.ao.nn.quantized"):
            return f"{name} is quantised to integers"
        away = any(p.is_meta for p in module.parameters(recurse=False))
        if away and any(hook.offload for hook in _align_hooks(module)):
            return f"device_map keeps the weights of {name} elsewhere and fetches them for the forward pass alone"
    return ""


@contextmanager
def weights_here(model: nn.Module) -> Iterator[None]:
    """Weights that accelerate keeps elsewhere (main memory, files) are in the model inside, where it must not run."""
    away: list[tuple[nn.Module, str, nn.Parameter]] = []
    loaded: dict[int, nn.Parameter] = {}
    for module in model.modules():
        offloaded = next((hook.weights_map for hook in _align_hooks(module) if hook.offload), None)
        for name, p in list(module._parameters.items()):
            if p is not None and p.is_meta and offloaded is not None and name in offloaded:
                away.append((module, name, p))
                module._parameters[name] = loaded.setdefault(id(p), nn.Parameter(offloaded[name], p.requires_grad))
    try:
        yield
    finally:
        for module, name, p in away:
            module._parameters[name] = p


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


def _align_hooks(module: nn.Module) -> list[Any]:
    """Those of accelerate that fetch a module's weights."""
    hook = getattr(module, "_hf_hook", None)
    several = getattr(hook, "hooks", (hook,))
    return [one for one in several if hasattr(one, "execution_device") and hasattr(one, "offload")]

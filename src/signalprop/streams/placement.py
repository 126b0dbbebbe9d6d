"""Where a model has its numbers: on its devices, or fetched by hooks of accelerate (`device_map` with offloading)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


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


def kept_elsewhere(model: nn.Module) -> str | None:
    """Path of the first module whose own weights a hook of accelerate fetches when it runs; None: there is none."""
    for name, module in model.named_modules():
        away = any(p.is_meta for p in module.parameters(recurse=False))
        if away and any(hook.offload for hook in _align_hooks(module)):
            return str(name)
    return None


@contextmanager
def weights_here(model: nn.Module) -> Iterator[None]:
    """Weights that accelerate keeps elsewhere (main memory, files) are in the model inside, where it must not run."""
    away: list[tuple[nn.Module, str, nn.Parameter]] = []
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        kept = next((hook.weights_map for hook in _align_hooks(module) if hook.offload), None)
        for name, p in list(module._parameters.items()):
            if p is not None and p.is_meta and kept is not None and name in kept:
                away.append((module, name, p))
                module._parameters[name] = made.setdefault(id(p), nn.Parameter(kept[name], p.requires_grad))
    try:
        yield
    finally:
        for module, name, p in away:
            module._parameters[name] = p


def _align_hooks(module: nn.Module) -> list[Any]:
    """Those of accelerate that fetch a module's weights."""
    hook = getattr(module, "_hf_hook", None)
    several = getattr(hook, "hooks", (hook,))
    return [one for one in several if hasattr(one, "execution_device") and hasattr(one, "offload")]

"""Where a model has its numbers: on its devices, or fetched by hooks of accelerate (`device_map` with offloading)."""

from __future__ import annotations

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


def _align_hooks(module: nn.Module) -> list[Any]:
    """Those of accelerate that fetch a module's weights."""
    hook = getattr(module, "_hf_hook", None)
    several = getattr(hook, "hooks", (hook,))
    return [one for one in several if hasattr(one, "execution_device") and hasattr(one, "offload")]

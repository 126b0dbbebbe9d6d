"""A live PyTorch model, whatever wraps it: the module inside, its device, its mode."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping as Dictionary
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def is_compiled(module: nn.Module) -> bool:
    """Whether calling this very module runs code from torch.compile."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile and DistributedDataParallel wrappers."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(inner, nn.Module):
            model = inner
        elif isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            return model


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


def placed(model: nn.Module, arguments: Dictionary[str, Any]) -> dict[str, Any]:
    """The arguments that are not None, on the model's device."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with torch.inference_mode(False):  # a tensor of inference mode takes no part in a backward pass, its copy does
        usable = {k: v.clone() if isinstance(v, Tensor) and v.is_inference() else v for k, v in arguments.items()}
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in usable.items() if v is not None}

"""Weights of a run by name: gathered from all processes, put back, written and read."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from signalprop.errors import InputError
from signalprop.files.storage import check_regular
from signalprop.hooks import whole
from signalprop.repair.initialisation import fill
from signalprop.streams.wrappers import unwrapped
from signalprop_lab.training.processes import first

WEIGHTS, OPTIMIZER, STATE, PROCESS = "model.safetensors", "optimizer.safetensors", "training.json", "process-{}.json"


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write tensors by name, a file of safetensors."""
    from safetensors.torch import save_file

    apart = {name: t if t.untyped_storage().nbytes() == t.nbytes else t.clone() for name, t in tensors.items()}
    save_file(apart, path, metadata={"format": "pt"})


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of safetensors."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    check_regular(path)
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"cannot read {path}: {error}") from None


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The weights and buffers by their names in memory, on the CPU: a shared one once, and of a model with adapters
    only what is trained. Every process calls it; the first one gets them, the others an empty dictionary."""
    out = {}
    for name, tensor in _state(model).items():
        value = whole(tensor.detach())
        if first():
            out[name] = value.cpu().contiguous()
    return out


def fill_weights(model: nn.Module, weights: dict[str, Tensor], source: Path) -> None:
    """Put weights as `weights_of` gave them into a model; every process calls it with all of them."""
    own = _state(model)
    other = own.keys() ^ weights.keys() or {n for n, tensor in own.items() if tensor.shape != weights[n].shape}
    if other:
        raise InputError(f"{source} is of another model: it differs in {min(other)}")
    with torch.no_grad():
        for name, tensor in own.items():
            fill(tensor, weights[name])


def not_finite(weights: dict[str, Tensor]) -> str | None:
    """The first of these that holds NaN or infinite values."""
    return next((name for name, t in weights.items() if t.is_floating_point() and not torch.isfinite(t).all()), None)


def _state(model: nn.Module) -> dict[str, Tensor]:
    """The tensors themselves by state-dict name, a shared one by its first."""
    inner = unwrapped(model)
    adapters = hasattr(inner, "peft_config")
    found: dict[int, str] = {}
    out: dict[str, Tensor] = {}
    for name, tensor in inner.state_dict(keep_vars=True).items():
        frozen = adapters and isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        if isinstance(tensor, Tensor) and not frozen and found.setdefault(id(tensor), name) == name:
            out[name] = tensor
    return out

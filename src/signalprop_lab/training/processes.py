"""The processes of one run (torchrun starts them): what they send each other. One process needs none of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from signalprop.errors import InputError

T = TypeVar("T")


def meet() -> None:
    """Join the other processes, where there are some."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from accelerate import PartialState

        PartialState(cpu=not torch.cuda.is_available())


def see_only(device: str) -> None:
    """Have accelerate, which takes the first GPU there is, train on this device; before PyTorch uses one."""
    kind, _, index = device.partition(":")
    if index not in ("", "0"):
        raise InputError(f"--device {device}: training takes the first GPU it sees; set CUDA_VISIBLE_DEVICES={index}")
    if kind == "cpu":
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}


def several() -> bool:
    """Whether there are other processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def first() -> bool:
    """Whether this is the process that writes."""
    return not several() or dist.get_rank() == 0


def told(value: Any) -> Any:
    """What the first process has; every process calls it."""
    if not several():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def by_first(action: Callable[[], T]) -> T:
    """What the first process does, and what comes of it; every process calls it."""
    result, problem = None, None
    if first():
        try:
            result = action()
        except InputError as error:
            problem = str(error)
    result, problem = told((result, problem))
    if problem is not None:
        raise InputError(problem)
    return result  # type: ignore[no-any-return]


def gathered(value: Any) -> list[Any]:
    """What every process has, in their order; every process calls it."""
    if not several():
        return [value]
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, value)
    return box


def anywhere(flags: list[bool], device: torch.device) -> list[bool]:
    """Of each flag, whether a process has set it; every process calls it."""
    if not several():
        return flags
    tensor = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return [bool(x) for x in tensor.tolist()]


def sharded(model: nn.Module) -> bool:
    """Whether a process holds only its share of the parameters."""
    return any(hasattr(p, "placements") for p in model.parameters())

"""The processes of a distributed run: that each of them has the monitor, and sums over those that share parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from signalprop.errors import InputError

T = TypeVar("T")
PATIENCE = timedelta(seconds=20)  # from the first step of one process to the monitor of the last
_number = count()


class EveryRank:
    """A monitor that every process of the run has created, in the same order where there are several.

    A collective that some processes never reach would hold up the others for good.

    Args:
        rank, size: of this process and of the run. store: of the run; None: there is one process.
    """

    def __init__(self, rank: int, size: int, store: Any, number: int) -> None:
        self._size, self._store, self._name = size, store, f"signalprop/monitor/{number}"
        if store is not None:
            store.set(f"{self._name}/{rank}", "here")

    @classmethod
    def here(cls) -> EveryRank:
        """Of this process and its next monitor."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(0, 1, None, next(_number))
        store = dist.distributed_c10d._get_default_store()
        return cls(dist.get_rank(), dist.get_world_size(), store, next(_number))

    def check(self, patience: timedelta | None = None) -> None:
        """Wait for the monitors of all processes, once.

        Raises:
            InputError: some process has created none within `patience` (default: 20 seconds).
        """
        store, self._store = self._store, None
        if store is None:
            return
        names = [f"{self._name}/{rank}" for rank in range(self._size)]
        waited = patience or PATIENCE
        try:
            store.wait(names, waited)
        except RuntimeError:  # DistStoreError: the time is over
            missing = [str(rank) for rank, name in enumerate(names) if not store.check([name])]
            raise InputError(
                f"no SignalMonitor in process {', '.join(missing)} of {self._size} after {waited.total_seconds():g} s; "
                "make one in every process of the run, outside any `if rank == 0` (rank 0 alone logs)"
            ) from None


def is_other_rank() -> bool:
    """Whether this is a process of a distributed run that does not log."""
    there = dist.is_available() and dist.is_initialized()
    return there and dist.get_rank() != 0


def mesh_of(model: nn.Module) -> Any:
    """The processes that parameters are sharded over (FSDP2, tensor parallel), so that none of these can read them
    alone: the largest of their device meshes; None: there is none."""
    meshes = [p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")]
    return max(meshes, key=lambda mesh: mesh.size(), default=None)


def local_part(x: Any) -> Tensor:
    """What this process holds of a tensor."""
    return x.to_local() if hasattr(x, "to_local") else x  # type: ignore[no-any-return]


def distinct_shards(p: Any) -> int:
    """In how many parts a parameter is sharded; processes beyond these hold copies."""
    if not hasattr(p, "device_mesh"):
        return 1
    return math.prod(p.device_mesh.size(k) for k, where in enumerate(p.placements) if where.is_shard())


def summed(x: Tensor, mesh: Any) -> Tensor:
    """The sum over all processes of a mesh, which call together; in place."""
    for k in range(mesh.ndim):
        dist.all_reduce(x, group=mesh.get_group(k))
    return x


def together(made: Callable[[], T], mesh: Any) -> T:
    """What a function returns, if it does so in all processes of a mesh, which call together; None: in this one."""
    found: T | InputError
    try:
        found = made()
    except InputError as error:
        found = error
    if mesh is not None:
        good = summed(torch.tensor([float(not isinstance(found, InputError))], device=mesh.device_type), mesh)
        if good.item() < mesh.size() and not isinstance(found, InputError):
            found = InputError("another process could not")
    if isinstance(found, InputError):
        raise found
    return found


def gathered(x: Tensor, mesh: Any) -> Tensor:
    """(processes, ...): the tensors of all processes of a mesh, which call together with equal shapes."""
    x = x[None]
    for k in reversed(range(mesh.ndim)):
        group = mesh.get_group(k)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        x = torch.cat(parts)
    return x

"""Which processes of a distributed run have the monitor: asked of their store, which waits for none of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from signalprop.errors import InputError

T = TypeVar("T")
PATIENCE = timedelta(seconds=60)  # a process that is so far behind has no monitor
_number = count()


class RollCall:
    """One monitor's.

    A collective that some processes never reach holds up the others for good, so before the first one all agree
    whether there is to be any. Whoever has the monitor has answered before its first step, and the first one to know
    decides for all.

    Args:
        rank: of this process, in the run. store: of the run; None: there is one process.
    """

    def __init__(self, rank: int, store: Any, number: int) -> None:
        self._store, self._name = store, f"signalprop/monitor/{number}"
        if store is not None:
            store.set(f"{self._name}/{rank}", "here")

    @classmethod
    def here(cls) -> RollCall:
        """Of this process, whose monitor is the so-manieth."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(0, None, next(_number))
        return cls(dist.get_rank(), dist.distributed_c10d._get_default_store(), next(_number))

    def complete(self, ranks: Sequence[int], patience: timedelta | None = None) -> bool:
        """Whether all of these ranks have it; the same answer in each of them."""
        if self._store is None:
            return True
        try:
            self._store.wait([f"{self._name}/{rank}" for rank in ranks], patience or PATIENCE)
            found = "all"
        except RuntimeError:  # DistStoreError: the time is over
            found = "some"
        agreed: bytes = self._store.compare_set(f"{self._name}/found/{min(ranks)}", "", found)
        return agreed == b"all"


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

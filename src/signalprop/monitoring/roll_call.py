"""Which processes of a distributed run have the monitor: asked of their store, which waits for none of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from typing import Any

import torch.distributed as dist
from torch import nn

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


def is_sharded(model: nn.Module) -> bool:
    """Whether parameters are sharded over processes (FSDP2), so that none of these can read them alone."""
    return any(hasattr(p, "full_tensor") for p in model.parameters())


def ranks_of(model: nn.Module) -> list[int]:
    """Of the processes that the parameters of a model are sharded over."""
    sharded: Any = next(p for p in model.parameters() if hasattr(p, "full_tensor"))
    ranks: list[int] = sharded.device_mesh.mesh.flatten().tolist()
    return ranks

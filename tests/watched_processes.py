"""One process of measurement/test_compiled.py: `python watched_processes.py RANK N FOLDER`; rank 0 writes Profiles."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from own_model import D, OwnGPT
from signalprop.attachment import Mapping
from signalprop.measurement import Probe
from signalprop.monitoring import SignalMonitor, roll_call

IDS = torch.randint(3, 50, (4, 12), generator=torch.Generator().manual_seed(1))


class Tokenwise(OwnGPT):
    """The small GPT without attention to other tokens, which can hold a part of a sequence."""

    offset = 0

    def __init__(self, n_layers: int) -> None:
        super().__init__(n_layers)
        for block in self.blocks:
            block.attn.forward = lambda x, attn=block.attn: attn.proj(attn.qkv(x)[..., :D])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(self.offset + torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


class Stage(nn.Module):
    """One layer of the small GPT, with the embedding or the head."""

    def __init__(self, whole: OwnGPT, rank: int) -> None:
        super().__init__()
        self.whole, self.rank = whole, rank
        self.blocks = whole.blocks[rank : rank + 1]

    def forward(self, x: Tensor) -> Tensor:
        if self.rank == 0:
            x = self.whole.wte(x) + self.whole.wpe(torch.arange(x.shape[1]))
        x = self.blocks[0](x)
        return x if self.rank == 0 else self.whole.head(self.whole.ln_f(x))

    def mapping(self) -> Mapping:
        """Of this layer alone: what leaves it is its block's output."""
        found = OwnGPT(1).signalprop_mapping()
        first, last = found.sublayers
        rows = (first, replace(last, writes="blocks.0"))
        names = {"token": "whole.wte", "position": "whole.wpe"}
        return replace(
            found, sublayers=rows, final_norm=None, embedding=replace(found.embedding, **names),
            head=replace(found.head, weight="whole.head"), layers=("blocks.0",),
        )  # fmt: skip


def own(kind: type[OwnGPT] = OwnGPT) -> OwnGPT:
    torch.manual_seed(0)
    return kind(2).train()


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def profiled(model: nn.Module, called: Any, ids: Tensor, **options: Any) -> dict[str, Any]:
    """What a probe finds."""
    with Probe(model, **options) as probe:
        loss_of(called(ids), ids).backward()
        profile = probe.profile()
    assert profile is not None
    return profile.to_json()


def monitored(model: nn.Module, mapping: Mapping, ids: Tensor, has_it: bool) -> dict[str, Any]:
    """What a monitor says in a step, where this process has one; the step is made in any case."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("signalprop.monitoring").addHandler(handler)
    numbers: dict[str, float] | None = {}
    with SignalMonitor(model, mapping=mapping) if has_it else nullcontext() as monitor:
        loss = loss_of(model(ids), ids)
        loss.backward()
        if monitor is not None:
            numbers = monitor.step(loss)
    loss_of(model(ids), ids).backward()  # where a process that waits for the others would be missed
    logging.getLogger("signalprop.monitoring").removeHandler(handler)
    return {"said": said, "numbers": numbers}


def routes(rank: int, size: int) -> dict[str, Any]:
    """The Profile of every way to train."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    out: dict[str, Any] = {}
    mine, everyone = IDS.chunk(size)[rank], dist.group.WORLD

    parallel = nn.parallel.DistributedDataParallel(own())
    out["ddp"] = profiled(parallel, torch.compile(parallel, backend="eager"), mine, compiled=True, data_group=everyone)

    sharded = own()
    for block in sharded.blocks:
        block.compile(backend="eager")
        fully_shard(block)
    fully_shard(sharded)
    mapping = replace(sharded.signalprop_mapping(), layers=("blocks.0", "blocks.1"))
    out["fsdp"] = profiled(sharded, sharded, mine, mapping=mapping, data_group=everyone)

    for name, has_it in (("monitors", True), ("monitor alone", rank == 0)):
        out[name] = monitored(sharded, mapping, mine, has_it)

    split = own()
    mesh = init_device_mesh("cpu", (size,))
    for block in split.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    out["tp"] = profiled(split, torch.compile(split, backend="eager"), IDS, compiled=True)

    part = own(Tokenwise)
    part.offset = rank * IDS.shape[1] // size
    out["tokens"] = profiled(part, part, IDS.chunk(size, 1)[rank], tokens_group=everyone)

    stage = Stage(own(), rank)
    pipe = PipelineStage(stage, rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(pipe, 2, loss_of)
    with Probe(stage, mapping=stage.mapping(), compiled=True) as probe:
        schedule.step(IDS) if rank == 0 else schedule.step(target=IDS)
        profile = probe.profile(loss_scale=2.0)  # the schedule adds up the losses of its micro-batches
    assert profile is not None
    stages: list[Any] = [None] * size
    dist.all_gather_object(stages, profile.to_json())
    out["stages"] = stages
    return out


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    roll_call.PATIENCE = timedelta(seconds=5)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=size)
    found = routes(rank, size)
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))

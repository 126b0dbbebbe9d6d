"""One process of measurement/test_compiled.py: `python watched_processes.py RANK N FOLDER`; rank 0 writes Profiles."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from own_model import D, OwnGPT
from signalprop.attachment import Mapping
from signalprop.data.batches import Batch
from signalprop.errors import InputError
from signalprop.measurement import Probe
from signalprop.monitoring import SignalMonitor, processes

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
            arguments=lambda batch: {"x": torch.as_tensor(batch.tokens)},
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
    return profile.to_json()


def monitored(model: nn.Module, ids: Tensor, *, steps: int = 1, call: Any = None, **options: Any) -> dict[str, Any]:
    """What a monitor says and logs of some steps.

    Args:
        call: makes a step's gradients, and returns its loss.
    """
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("signalprop.monitoring").addHandler(handler)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    numbers: dict[str, float] | None = {}
    with SignalMonitor(model, every=1, **options) as monitor:
        for _ in range(steps):
            optimizer.zero_grad()
            if call is not None:
                loss = call()
            else:
                loss = loss_of(model(ids), ids)
                loss.backward()
            numbers = monitor.step(loss)
            optimizer.step()
        table = None if monitor._movement is None else monitor._movement._table()
    logging.getLogger("signalprop.monitoring").removeHandler(handler)
    return {"said": said, "numbers": numbers, "table": None if table is None else [part.tolist() for part in table]}


def whole_batch() -> Batch:
    """All sequences, for scores."""
    ids = IDS.numpy()
    return Batch(tokens=ids, targets=ids)


def llama() -> LlamaForCausalLM:
    """Four heads, which two processes can share; one of them prefers some keys."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 50}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4))
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[16:24] *= 1e3  # head 2
    return model.train()


def monitored_llama(model: LlamaForCausalLM) -> dict[str, Any]:
    def call() -> Tensor:
        loss = loss_of(model(input_ids=IDS).logits, IDS)
        loss.backward()
        return loss

    return monitored(model, IDS, steps=2, batch=whole_batch(), call=call)


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

    common: dict[str, Any] = {"mapping": mapping, "data_group": everyone}
    out["monitored fsdp"] = monitored(sharded, mine, steps=3, **common)
    alone = mapping

    split = own()
    mesh = init_device_mesh("cpu", (size,))
    for block in split.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    out["tp"] = profiled(split, torch.compile(split, backend="eager"), IDS, compiled=True)
    mapping = replace(split.signalprop_mapping(), layers=("blocks.0", "blocks.1"))
    out["monitored tp"] = monitored(split, IDS, steps=3, mapping=mapping, batch=whole_batch())

    shared_heads = llama()
    for layer in shared_heads.model.layers:
        columns, rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
        names = {name: ColwiseParallel() for name in columns} | {name: RowwiseParallel() for name in rows}
        plan = {f"{'mlp' if name[0] in 'gud' else 'self_attn'}.{name}": style for name, style in names.items()}
        parallelize_module(layer, mesh, plan)
    out["monitored heads"] = monitored_llama(shared_heads)

    part = own(Tokenwise)
    part.offset = rank * IDS.shape[1] // size
    out["tokens"] = profiled(part, part, IDS.chunk(size, 1)[rank], tokens_group=everyone)
    out["monitored tokens"] = monitored(part, IDS.chunk(size, 1)[rank], tokens_group=everyone)

    stage = Stage(own(), rank)
    pipe = PipelineStage(stage, rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(pipe, 2, loss_of)
    with Probe(stage, mapping=stage.mapping(), compiled=True) as probe:
        schedule.step(IDS) if rank == 0 else schedule.step(target=IDS)
        profile = probe.profile(loss_scale=2.0)  # the schedule adds up the losses of its micro-batches
    watched = monitored(
        stage, IDS, mapping=stage.mapping(), compiled=True, logs=True,
        call=lambda: schedule.step(IDS) if rank == 0 else schedule.step(target=IDS),
    )  # fmt: skip
    for name, mine_of in (("stages", profile.to_json()), ("monitored stages", watched)):
        stages: list[Any] = [None] * size
        dist.all_gather_object(stages, mine_of)
        out[name] = stages
    out["monitor alone"] = refused(sharded, alone) if rank == 0 else ""  # last: monitors are known by their number
    return out


def refused(model: nn.Module, mapping: Mapping) -> str:
    """What is said to the one process that makes a monitor."""
    try:
        with SignalMonitor(model, mapping=mapping):
            return ""
    except InputError as error:
        return str(error)


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    processes.PATIENCE = timedelta(seconds=5)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=size)
    found = routes(rank, size)
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))

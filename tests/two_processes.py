"""One process of repair/test_distributed.py: `python two_processes.py RANK N FOLDER`; rank 0 writes the numbers."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from applied import VOCABULARY, vanilla
from signalprop.monitoring import SignalMonitor
from signalprop.repair import apply, initialize, parameter_groups

# fixed and trainable multipliers, scaled norms; T5's relative positions are in no table
CASES = (
    ("bert", "deepscalelm"), ("bert", "deepnorm"), ("gpt2", "layerscale"), ("llama", "lns"), ("t5", "deepscalelm"),
)  # fmt: skip
IDS = torch.randint(3, VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(0))


def make(family: str, scheme: str, seed: int | None = 3) -> nn.Module:
    """A model with a scheme, trainable multipliers at their start."""
    model = vanilla(family, 3)
    apply(model, scheme, seed=seed)
    return model.train()


def step(model: nn.Module, ids: Tensor) -> tuple[float, float]:
    """(loss, norm of all gradients) of one step over these sequences."""
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = [q.grad for q in model.parameters() if q.grad is not None]
    whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]
    return loss.item(), sum(float(g.double().square().sum()) for g in whole) ** 0.5


def mean(value: float) -> float:
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.item() / dist.get_world_size()


LAYERS = {"bert": ["bert.encoder.layer"], "gpt2": ["transformer.h"], "llama": ["model.layers"],
          "t5": ["encoder.block", "decoder.block"]}  # fmt: skip


def sharded(model: nn.Module, family: str) -> nn.Module:
    """FSDP2, layer by layer."""
    from torch.distributed.fsdp import fully_shard

    for path in LAYERS[family]:
        for layer in model.get_submodule(path):
            fully_shard(layer)
    fully_shard(model)
    return model


def case(family: str, scheme: str) -> dict[str, Any]:
    """What every route gives."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = IDS.chunk(size)[rank]
    whole = make(family, scheme)
    results: dict[str, Any] = {}

    parallel = nn.parallel.DistributedDataParallel(copy.deepcopy(whole))
    loss, norm = step(parallel, mine)
    results["ddp"] = [mean(loss), norm]

    model = sharded(copy.deepcopy(whole), family)
    loss, norm = step(model, mine)
    results["fsdp"] = [mean(loss), norm]
    groups = parameter_groups(model, lr=0.01, weight_decay=0.1)
    results["names"] = sorted(name for group in groups for name in group["names"])
    torch.optim.AdamW(groups, lr=0.01).step()
    model.zero_grad()
    results["second"] = mean(step(model, mine)[0])

    with torch.device("meta"):
        empty = vanilla(family, 3)
    apply(empty, scheme)
    sharded(empty.train(), family).to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*empty.parameters(), *empty.buffers()):
            tensor.fill_(7)
    if rank == 0:
        results["refusal"] = refusal(empty)
    initialize(empty, seed=3)
    results["same"] = all(
        torch.equal(q.full_tensor(), whole.get_parameter(name)) for name, q in empty.named_parameters()
    ) and all(torch.equal(b, whole.get_buffer(name)) for name, b in empty.named_buffers())
    loss, norm = step(empty, mine)
    results["meta"] = [mean(loss), norm]
    return results


def refusal(model: nn.Module) -> str:
    """What is said to who gives no seed."""
    model.signalprop_record.pending, pending = False, model.signalprop_record.pending
    try:
        initialize(model)
    except ValueError as error:
        return str(error)
    finally:
        model.signalprop_record.pending = pending
    return ""


def monitored(model: nn.Module) -> dict[str, float]:
    """What a monitor logs of two steps, and how many quantities have bands; nothing on other ranks than 0."""
    numbers: dict[str, float] | None = None
    with SignalMonitor(model, every=1, skip_first=0) as monitor:
        for _ in range(2):
            step(model, IDS)
            numbers = monitor.step()
    bands = 0 if monitor._checks is None else len(monitor._checks._watch.start)
    return {} if numbers is None else {**numbers, "bands": bands}


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=size)
    results = {f"{family} {scheme}": case(family, scheme) for family, scheme in CASES}
    results["monitor"] = monitored(sharded(vanilla("llama", 2), "llama"))
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))

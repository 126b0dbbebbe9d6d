"""Devices and processes of a run, by accelerate: precision, DDP, FSDP2, what each process reads in a pass."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from signalprop.errors import InputError, require

require("accelerate", "training")

from accelerate import Accelerator, PartialState  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from accelerate.tracking import get_available_trackers  # noqa: E402
from accelerate.utils import (  # noqa: E402
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    set_seed,
)

from signalprop_lab.training.networks import Network  # noqa: E402
from signalprop_lab.training.recipe import Recipe  # noqa: E402


def passes_of(recipe: Recipe, processes: int) -> tuple[int, int]:
    """(examples of a process in a pass, passes in a step).

    Raises:
        InputError: the batch cannot be shared out so.
    """
    b = recipe.budget
    if b.batch_size % processes:
        raise InputError(
            f"budget.batch_size {b.batch_size} is not a multiple of the {processes} processes; choose another"
        )
    each = b.batch_size // processes
    micro = min(b.micro_batch or each, each)
    if each % micro:
        raise InputError(f"budget.micro_batch {micro} does not divide the {each} examples of a process")
    return micro, each // micro


def _sharding(recipe: Recipe, network: Network, processes: int) -> dict[str, Any]:
    """The settings of FSDP2 for accelerate: layers are sharded one by one."""
    if not recipe.parallel.fsdp:
        return {}
    options: dict[str, Any] = {
        "fsdp_version": 2,
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": sorted({type(layer).__name__ for layer in network.layers}),
        "cpu_ram_efficient_loading": False,
        "state_dict_type": "FULL_STATE_DICT",
    }
    found: dict[str, Any] = {"fsdp_plugin": FullyShardedDataParallelPlugin(**options | recipe.parallel.fsdp_config)}
    if (replicas := recipe.parallel.replicas) > 1:
        if processes % replicas:
            raise InputError(f"parallel.replicas {replicas} does not divide the {processes} processes")
        sizes = {"dp_replicate_size": replicas, "dp_shard_size": processes // replicas}
        found["parallelism_config"] = ParallelismConfig(**sizes)
    return found


def accelerator_of(recipe: Recipe, network: Network, folder: Path) -> Accelerator:
    """The accelerator of a recipe, in a process that may have had another one for another recipe. Random numbers begin
    with the recipe's seed.

    Raises:
        InputError: `report_to` names what is not installed.
    """
    known = [str(name) for name in get_available_trackers()]
    for name in recipe.report_to:
        if name not in known:
            raise InputError(
                f"report_to names {name!r}, which accelerate does not know or is not installed; available: "
                f"{', '.join(sorted(known)) or 'none'}"
            )
    AcceleratorState._reset_state(reset_partial_state=True)  # accelerate keeps one state per process
    GradientState._reset_state()
    on_cpu = not torch.cuda.is_available() and not torch.backends.mps.is_available()
    state = PartialState(cpu=on_cpu)
    sharding = _sharding(recipe, network, state.num_processes)
    if sharding and state.num_processes > 1 and state.device.type == "cpu":
        # accelerate would take the processes of a CPU for those of DistributedDataParallel, without a word
        state.distributed_type = DistributedType.MULTI_GPU
    set_seed(recipe.seed)
    return Accelerator(
        cpu=on_cpu,
        mixed_precision={"fp32": "no"}.get(recipe.precision, recipe.precision),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=False)],
        log_with=list(recipe.report_to) or None,
        project_dir=folder,
        **sharding,
    )


def recompute_layers(network: Network) -> None:
    """Have the layers compute their activations again in the backward pass."""
    from torch.utils.checkpoint import checkpoint

    for layer in network.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def compile_layers(network: Network) -> None:
    """Compile the layers one by one: those that are the same share a graph, so that depth costs no time to compile."""
    for layer in network.layers:
        layer.compile()

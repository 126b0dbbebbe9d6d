"""Checkpoints of a run: written whole or not at all, checked before they are used, the newest good one found.

A checkpoint is what a training needs to go on as if nothing had happened, in safetensors and JSON, nothing pickled:
weights, the optimizer's state, the schedule, random states, and where the logs stood. It is written under another name,
synced, marked with the sizes and SHA-256 sums of its files, and then given its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from signalprop.errors import InputError
from signalprop.files.storage import finite, is_below, opened, read_json, sync, written_whole
from signalprop.hooks import whole
from signalprop.repair.initialisation import fill
from signalprop.streams.wrappers import unwrapped
from signalprop_lab.training.processes import by_first, first, gathered
from signalprop_lab.training.stream_offset import StreamOffset
from signalprop_lab.training.weight_files import (
    OPTIMIZER,
    PROCESS,
    STATE,
    WEIGHTS,
    fill_weights,
    load_tensors,
    save_tensors,
)

SCHEMA, MARKER = "signalprop/checkpoint/1", "complete.json"
STREAM = "stream.json"  # where a stream was
Optimized = tuple[torch.optim.Optimizer, nn.Module]  # and the model whose parameters it has


# --- finding ----------------------------------------------------------------------------------------------------------


def last_good(folder: Path) -> Path | None:
    """The newest checkpoint in a directory of them that is whole, or None; one line on stderr for each that is not."""
    for item in sorted(folder.glob("checkpoint-*"), key=step_of, reverse=True):
        problem = problem_of(item)
        if problem is None:
            return item
        print(f"signalprop: the checkpoint {item} is not used: {problem}", file=sys.stderr)
    return None


def step_of(folder: Path) -> int:
    """The step that a checkpoint's name says; -1 for another name."""
    number = folder.name.removeprefix("checkpoint-")
    return int(number) if number.isdecimal() else -1


def problem_of(folder: Path) -> str | None:
    """What is wrong with a checkpoint; None: all its files are there, as they were written."""
    marker = folder / MARKER
    if not marker.is_file():
        return f"it has no {MARKER}, so it was not written to its end"
    try:
        data = read_json(marker)
        if not isinstance(data, dict) or data.get("schema") != SCHEMA or data.get("step") != step_of(folder):
            return f"its {MARKER} is not that of a checkpoint of this step ({SCHEMA})"
        for name, known in data["files"].items():
            if not is_below(name):
                return f"its {MARKER} names {name!r:.80}, which is not in it"
            size = (folder / name).stat().st_size
            if size != known["bytes"]:
                return f"{name} has {size} bytes; {known['bytes']} were written"
            if digest_of(folder / name) != known["sha256"]:
                return f"{name} is not what was written (its SHA-256 sum differs)"
        return None
    except OSError as error:
        return f"{Path(error.filename or folder).name} cannot be read: {error.strerror or error}"
    except InputError as error:
        return str(error)
    except (KeyError, TypeError, ValueError, AttributeError):
        return f"its {MARKER} is damaged"


def digest_of(path: Path) -> str:
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def clear_leftovers(folder: Path) -> None:
    """Remove what a process that was killed had begun to write in a directory."""
    for item in folder.glob(".*.tmp"):
        if item.is_dir():
            shutil.rmtree(item, ignore_errors=True)
        else:
            item.unlink(missing_ok=True)


# --- writing ----------------------------------------------------------------------------------------------------------


def write(
    target: Path,
    weights: dict[str, Tensor],
    optimized: Optimized,
    state: dict[str, Any],
    process: dict[str, Any],
    offset: StreamOffset | None,
    keep: int,
) -> None:
    """Write a checkpoint of the step that was just done; every process calls it, the first one writes.

    Args:
        target: its directory, checkpoint-STEP. weights: as `weights_of` gives them. process: `process_state`.
        state, offset: of the training and of its stream, JSON. keep: how many checkpoints stay, this one with them.
    """
    moments, groups = _optimizer_of(*optimized)
    processes = gathered(process)

    def fill_in(folder: Path) -> None:
        for i, one in enumerate(processes):
            _dump(folder / PROCESS.format(i), one)
        save_tensors(weights, folder / WEIGHTS)
        save_tensors(moments, folder / OPTIMIZER)
        _dump(folder / STATE, {"optimizer": groups, **state})
        if offset is not None:
            _dump(folder / STREAM, offset.to_json())

    by_first(lambda: _write(target, fill_in))
    if first():
        thin_out(target.parent, keep, step_of(target))


def _write(target: Path, fill_in: Callable[[Path], None]) -> None:
    folder = target.parent
    try:
        with written_whole(target) as beside:
            for lines in folder.parent.glob("*.jsonl"):  # what was logged up to here belongs to the checkpoint
                sync(lines)
            fill_in(beside)
            mark(beside, step_of(target))
            shutil.rmtree(target, ignore_errors=True)  # one that was found damaged
    except InputError as error:
        steps = [step_of(item) for item in folder.glob("checkpoint-*") if (item / MARKER).is_file()]
        left = f"the one of step {max(steps)} remains; " if steps else ""
        reason = str(error).removeprefix("cannot write ")
        raise InputError(f"cannot write the checkpoint {reason}; {left}fix that, and go on with --resume") from None


def _dump(path: Path, value: Any) -> None:
    """Write JSON into a directory that is synced as a whole."""
    path.write_text(json.dumps(finite(value), allow_nan=False))


def mark(folder: Path, step: int) -> None:
    """Write down what a checkpoint's files are."""
    files = {}
    for path in sorted(item for item in folder.rglob("*") if item.is_file()):
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": digest_of(path)}
    _dump(folder / MARKER, {"schema": SCHEMA, "step": step, "files": files})


def thin_out(folder: Path, keep: int, step: int) -> None:
    """Remove all checkpoints but the newest `keep` up to this step; later ones are damaged, or nobody went on from
    them."""
    found = sorted(folder.glob("checkpoint-*"), key=step_of, reverse=True)
    kept = [item for item in found if step_of(item) <= step and (item / MARKER).is_file()][:keep]
    for item in found:
        if item not in kept:
            with contextlib.suppress(OSError):
                (item / MARKER).unlink(missing_ok=True)  # half of a removed checkpoint must not look whole
            shutil.rmtree(item, ignore_errors=True)


def load_weights(model: nn.Module, checkpoint: str | Path) -> None:
    """Put a checkpoint's weights into a model: the network of the run's recipe."""
    path = Path(checkpoint) / WEIGHTS
    fill_weights(model, load_tensors(path), path)


# --- optimizer, schedule, random states -------------------------------------------------------------------------------


def _optimizer_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """The state's tensors as "parameter/field" (for the first process), and the groups with names of parameters."""
    names = _names(optimizer, model)
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    for i, fields in state["state"].items():
        for field, value in fields.items():
            if isinstance(value, Tensor):
                all_of_it = whole(value.detach())
                if first():
                    tensors[f"{names[i]}/{field}"] = all_of_it.cpu().contiguous()
    return tensors, [group | {"params": [names[i] for i in group["params"]]} for group in state["param_groups"]]


def load_optimizer(checkpoint: Path, optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    """Go on with the optimizer's state; every process calls it. The state of the training, as `write` had it."""
    kept: dict[str, Any] = read_json(checkpoint / STATE)
    names = _names(optimizer, model)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    number = {name: i for i, name in enumerate(names)}
    groups = [{key: tuple(x) if isinstance(x, list) else x for key, x in group.items()} for group in kept["optimizer"]]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if [name for group in groups for name in group["params"]] != names or [len(g["params"]) for g in groups] != sizes:
        raise InputError(f"{checkpoint / STATE} is of another model or optimizer; start the run anew")
    states: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for key, tensor in load_tensors(checkpoint / OPTIMIZER).items():
        name, _, field = key.rpartition("/")
        states[number[name]][field] = _like(parameters[number[name]], tensor)
    numbered = [group | {"params": [number[name] for name in group["params"]]} for group in groups]
    optimizer.load_state_dict({"state": dict(states), "param_groups": numbered})
    return kept


def _like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """A tensor of the optimizer, sharded as its parameter is."""
    if not hasattr(parameter, "placements") or tensor.shape != parameter.shape:
        return tensor
    out = torch.empty_like(parameter, requires_grad=False)
    fill(out, tensor)
    return out


def _names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    """Names of the optimizer's parameters, in its order."""
    names = {id(p): name for name, p in unwrapped(model).named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def process_state(loss: float) -> dict[str, Any]:
    """What differs between processes: random states, and the loss that waits to be logged."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # noqa: NPY002 - libraries draw from it
    version, numbers, gauss_next = random.getstate()
    return {
        "torch": _hex(torch.get_rng_state()),
        "cuda": _hex(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "python": [version, list(numbers), gauss_next],
        "loss": loss,
    }


def restore_random(checkpoint: Path, process: int) -> None:
    """Go on with the random numbers of this process; with those it has, where there were fewer processes."""
    path = checkpoint / PROCESS.format(process)
    if not path.is_file():
        return
    state = read_json(path)
    torch.set_rng_state(_bytes(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(state["cuda"]))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, gauss))  # noqa: NPY002
    version, numbers, gauss_next = state["python"]
    random.setstate((version, tuple(numbers), gauss_next))


def waiting_loss(checkpoint: Path, process: int, processes: int) -> float:
    """The sum of losses that were not logged yet: of this process; the mean over all of them, where there were
    others."""
    files = sorted(checkpoint.glob(PROCESS.format("*")))
    losses = {file.name: read_json(file)["loss"] for file in files}
    same = len(losses) == processes
    return float(losses[PROCESS.format(process)] if same else sum(losses.values()) / max(len(losses), 1))


def offset_of(checkpoint: Path) -> StreamOffset | None:
    """Where a run's stream was; None: it reads none."""
    if not (checkpoint / STREAM).is_file():
        return None
    try:
        return StreamOffset(**read_json(checkpoint / STREAM))
    except TypeError:
        raise InputError(f"{checkpoint} is of a version with another order of examples; start the run anew") from None


def _hex(state: Tensor) -> str:
    return state.numpy().tobytes().hex()


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

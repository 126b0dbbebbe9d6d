"""Draw the weights that a Parametrization asks for into a model that exists; every parameter once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.attachment.anatomy import Anatomy, bare
from signalprop.attachment.parameters_by_role import Assignment, assignments
from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.hooks import whole
from signalprop.models.weights import draw, tensor_seed
from signalprop.network.parametrization import Parametrization
from signalprop.repair.record import Record, attached_vanilla, the_record
from signalprop.repair.splices import TrainedMultiplier
from signalprop.repair.undoing import all_or_nothing, everything, local


@typed
def initialize(model: nn.Module | Anatomy, *, seed: int | None = None) -> None:
    """Draw all weights of an applied model anew, as its Parametrization asks for: after `to_empty`, or for a new seed.

    The same seed gives the same weights as `build(parametrization, seed=seed)`, on any device and however they are
    sharded. Parameters and buffers that a Parametrization does not cover (relative position tables, poolers, rotary
    frequencies) get the model's initialisation, from that seed too. Multipliers and gains are set to their initial
    values. Parameters that were tied and that `to_empty` untied are tied again. All or nothing, as `apply`.

    Raises:
        InputError: the model carries no scheme, a weight that the scheme sets is missing or has two roles, the model is
            sharded and there is no seed, or, after the meta device, the model's initialisation does not fill
            everything else.
    """
    model = bare(model)
    record = the_record(model)
    with all_or_nothing(model, () if record.pending else everything(model)):
        tie(model, record.ties)
        attached = attached_vanilla(model)
        if record.pending:
            _refuse_garbage(attached, record)
        draw_weights(attached, record, seed)
        if record.pending:
            _refuse(name for name, q in model.named_parameters() if bool(local(q).isnan().any()))
    record.pending = record.kept = False


def _refuse_garbage(attached: Anatomy, record: Record) -> None:
    """Buffers have to come out the same whatever they held before; parameters are to be looked at afterwards."""
    model = attached.model
    covered = {id(item.tensor) for item in assignments(attached, record.parametrization)}
    found: list[dict[str, Tensor]] = []
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
        for value in (0, 1):
            for buffer in model.buffers():
                buffer.fill_(value)
            reset_others(model, covered, 0)
            found.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    _refuse(name for name, buffer in found[0].items() if not torch.equal(buffer, found[1][name]))


def _refuse(names: Iterable[str]) -> None:
    unset = list(names)
    if unset:
        more = f" and {len(unset) - 1} more" if len(unset) > 1 else ""
        raise InputError(
            f"the model's initialisation does not fill {unset[0]}{more}, garbage after the meta device; make the "
            "model on the CPU, or with transformers 5 or newer"
        )


def draw_weights(attached: Anatomy, record: Record, seed: int | None) -> None:
    """Fill every parameter; see `initialize`."""
    model: Any = attached.model
    draw_table(attached, record.parametrization, seed)
    with torch.no_grad():
        set_multipliers(attached, record)
    if hasattr(model, "_init_weights"):
        places: list[Any] = [*model.modules(), *model.parameters()]
        for place in places:
            place._is_hf_initialized = True  # or transformers' `init_weights` would draw it anew


def draw_table(attached: Anatomy, p: Parametrization, seed: int | None) -> None:
    """Draw the weights of a Parametrization; see `initialize`."""
    model = attached.model
    if seed is None:
        if not all(plain(q) for q in model.parameters()):
            raise InputError("the model is sharded over processes, which have to draw the same weights; give a seed")
        seed = int(torch.randint(2**31 - 1, ()))
    found = assignments(attached, p)
    with torch.no_grad():
        reset_others(model, {id(item.tensor) for item in found}, seed)
        for item in found:
            fill_parameter(item, seed)
        for table in model.modules():
            if not isinstance(table, nn.Embedding) or table.padding_idx is None:
                continue
            weight = whole(table.weight)
            weight[table.padding_idx] = 0
            if weight is not table.weight:
                fill(table.weight, weight)


def fill_parameter(item: Assignment, seed: int) -> None:
    """Draw one parameter, role by role."""
    tensor = item.tensor
    only = item.parts[0]
    if only.constant is not None:
        fill(tensor, torch.full(tensor.shape, only.constant, dtype=torch.float64))
        return
    if only.rows is None and not only.transposed and plain(tensor):
        draw(tensor, only.std, only.distribution, seed, only.place, only.role)
        return
    values = tensor if plain(tensor) else torch.empty(tensor.shape, dtype=torch.float32)
    outputs_first = values.mT if only.transposed else values
    for part in item.parts:
        rows: Any = slice(None) if part.rows is None else part.rows
        rows = (slice(None), rows) if part.copies else rows
        drawn = torch.empty(outputs_first[rows].shape, dtype=torch.float32)
        draw(drawn, part.std, part.distribution, seed, part.place, part.role)
        outputs_first[rows] = drawn.to(outputs_first)
    if values is not tensor:
        fill(tensor, values)


def plain(tensor: Tensor) -> bool:
    """Whether a tensor lies whole on one device."""
    return not hasattr(tensor, "placements")


def require_whole(model: nn.Module, verb: str) -> None:
    """Raise InputError where a parameter is not there, or only a part of it; `verb`: what was to be done."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise InputError(
                f"{name} is on the meta device; {verb} needs weights: to_empty, initialize, or load them first"
            )
        if not plain(parameter):
            raise InputError(
                f"{name} is sharded over processes; gather the state dict into a whole model, and {verb} that"
            )


def fill(tensor: Tensor, values: Tensor) -> None:
    """Copy the values into a tensor, which may be sharded over processes: every one has drawn the same values."""
    if plain(tensor):
        tensor.copy_(values)
        return
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = tensor
    values = values.to(device=sharded.device_mesh.device_type, dtype=tensor.dtype)
    sharded.copy_(distribute_tensor(values, sharded.device_mesh, sharded.placements, src_data_rank=None))


def reset_others(model: nn.Module, covered: set[int], seed: int) -> None:
    """The model's initialisation of every parameter and buffer that no role speaks of.

    It draws on the CPU, into stand-ins for the model's parameters, whatever device these are on.
    """
    own: Any = getattr(model, "_init_weights", None)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(tensor_seed(seed, "model", "others"))
        for module in reversed(list(model.modules())):  # children first
            # some classes initialise what their children hold
            near = [module, *module.children()] if own is not None else [module]
            others = any(id(q) not in covered for part in near for q in part.parameters(recurse=False))
            if others or any(True for part in near for _ in part.buffers(recurse=False)):
                with _stand_ins(module, covered):
                    if own is not None:
                        own(module)
                    elif callable(reset := getattr(module, "reset_parameters", None)):
                        reset()


@contextmanager
def _stand_ins(module: nn.Module, covered: set[int]) -> Iterator[None]:
    """Plain parameters on the CPU in the place of a module's, and afterwards their values in these.

    Covered ones, which are drawn later, are on the meta device meanwhile.
    """
    kept: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    places = [(part._parameters, name, q) for part in module.modules() for name, q in part._parameters.items()]
    for buffer in module.buffers():
        if hasattr(buffer, "_is_hf_initialized"):  # a mark that would make transformers skip it
            del buffer._is_hf_initialized
    for parameters, name, q in places:
        if q is None:
            continue
        if id(q) not in kept:
            value = torch.empty(q.shape, dtype=q.dtype, device="meta") if id(q) in covered else whole(q.detach()).cpu()
            kept[id(q)] = q, nn.Parameter(value.clone(), requires_grad=False)
        parameters[name] = kept[id(q)][1]
    try:
        yield
    finally:
        for parameters, name, q in places:
            parameters[name] = q
    for q, stand_in in kept.values():
        if not stand_in.is_meta:
            fill(q, stand_in)


def ties(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The names of every parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def tie(model: nn.Module, groups: tuple[tuple[str, ...], ...]) -> None:
    """Make the parameters of a group one again, the first."""
    for first, *others in groups:
        parameter = model.get_parameter(first)
        for name in others:
            path, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(path), attribute, parameter)


def set_multipliers(attached: Anatomy, record: Record) -> None:
    """Trainable multipliers at their initial values."""
    for row, start in zip(attached.rows, record.parametrization.branch, strict=True):
        if isinstance(row.ending, TrainedMultiplier):
            multiplier = row.ending.multiplier
            fill(multiplier, torch.full(multiplier.shape, float(start), dtype=torch.float64))

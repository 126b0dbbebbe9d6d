"""Draw the weights that a Parametrization asks for into a model that exists; every parameter once."""

from __future__ import annotations

from collections.abc import Mapping as Dictionary
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.models.weights import draw
from signalprop.parametrization import Parametrization
from signalprop.probes.mapping import Mapping
from signalprop.surgery.assigning import Assignment, Part, assignments
from signalprop.surgery.multiplied import Mixing, Rewired
from signalprop.surgery.record import Record, the_record, vanilla_mapping

_NONE: Dictionary[str, float] = {}


def initialize(model: nn.Module, *, seed: int | None = None) -> None:
    """Draw all weights of an applied model anew, as its Parametrization asks for: after `to_empty`, or for a new seed.

    The same seed gives the same weights as `build(parametrization, seed=seed)`. Parameters and buffers that a
    Parametrization does not speak of (relative position tables, poolers, rotary frequencies) get the model's own
    initialisation. Multipliers and gains are set to their initial values.

    Raises:
        InputError: the model carries no scheme, or a weight that the scheme sets is missing or has two roles.
    """
    record = the_record(model)
    draw_weights(model, record, seed)
    record.pending = False


def draw_weights(model: nn.Module, record: Record, seed: int | None) -> None:
    """Fill every parameter; see `initialize`."""
    draw_table(model, vanilla_mapping(model), record.parametrization, seed, record.factors)
    with torch.no_grad():
        set_multipliers(model, record)


def draw_table(
    model: nn.Module, mapping: Mapping, p: Parametrization, seed: int | None, factors: Dictionary[str, float] = _NONE
) -> None:
    """Draw the weights of a Parametrization, times a factor by the parameter's name; see `initialize`."""
    if seed is None:
        seed = int(torch.randint(2**31 - 1, ()))
    found = assignments(model, mapping, p)
    with torch.no_grad():
        reset_others(model, {id(item.tensor) for item in found})
        for item in found:
            fill_parameter(item, seed, factors.get(item.name, 1.0))
        for table in _padded(model):
            table.weight[table.padding_idx].zero_()


def fill_parameter(item: Assignment, seed: int, factor: float = 1.0) -> None:
    """Draw one parameter, role by role, and multiply it."""
    tensor = item.tensor
    only = item.parts[0]
    if only.constant is not None:
        fill(tensor, torch.full(tensor.shape, only.constant * factor, dtype=torch.float64))
        return
    if only.rows is None and not only.transposed and factor == 1 and plain(tensor):
        draw(tensor, only.std, only.distribution, seed, only.place, only.role)
        return
    whole = torch.empty(tensor.shape, dtype=torch.float32)
    for part in item.parts:
        rows: Any = slice(None) if part.rows is None else part.rows
        target = whole[:, rows].T if part.transposed else whole[rows]
        values = torch.empty(target.shape, dtype=torch.float32)
        _draw(values, part, seed)
        if part.transposed:
            whole[:, rows] = values.T
        else:
            whole[rows] = values
    fill(tensor, whole if factor == 1 else whole * factor)


def _draw(values: Tensor, part: Part, seed: int) -> None:
    draw(values, part.std, part.distribution, seed, part.place, part.role)


def plain(tensor: Tensor) -> bool:
    """Whether a tensor lies whole on one device."""
    return not hasattr(tensor, "placements")


def fill(tensor: Tensor, values: Tensor) -> None:
    """Copy the values into a tensor, which may be sharded over processes: every one has drawn the same values."""
    if plain(tensor):
        tensor.copy_(values)
        return
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = tensor
    values = values.to(device=sharded.device_mesh.device_type, dtype=tensor.dtype)
    sharded.copy_(distribute_tensor(values, sharded.device_mesh, sharded.placements, src_data_rank=None))


def reset_others(model: nn.Module, covered: set[int]) -> None:
    """The model's own initialisation for every module that holds a parameter or buffer no role speaks of."""
    own: Any = getattr(model, "_init_weights", None)
    for module in model.modules():
        parameters = [q for q in module.parameters(recurse=False) if id(q) not in covered]
        buffers = list(module.buffers(recurse=False))
        if not parameters and not buffers:
            continue
        if own is not None:
            for tensor in (*module.parameters(recurse=False), *buffers):
                if hasattr(tensor, "_is_hf_initialized"):  # a mark that would make transformers skip it
                    del tensor._is_hf_initialized
            own(module)
            continue
        reset: Any = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()


def _padded(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, nn.Embedding) and m.padding_idx is not None]


def set_multipliers(model: nn.Module, record: Record) -> None:
    """Trainable multipliers, and the gains of norms that the scheme added, at their initial values."""
    p = record.parametrization
    mapping = vanilla_mapping(model)
    for i, path in enumerate(record.carriers):
        carrier = model.get_submodule(path)
        if isinstance(carrier, Rewired):
            for number, start in ((carrier.multiplier, p.branch[i]), (carrier.skip, p.skip[i])):
                if isinstance(number, nn.Parameter):
                    fill(number, torch.full(number.shape, float(start), dtype=torch.float64))
            if carrier.post_norm is not None:
                for name, value in carrier.post_norm.named_parameters():
                    gain = float(p.post_norm_gain[i]) if name == "weight" else 0.0
                    fill(value, torch.full(value.shape, gain, dtype=torch.float64))
        output = mapping.sublayers[i].weights.get("output")
        if not isinstance(output, str):
            continue
        mixing = model.get_submodule(output)
        if isinstance(mixing, Mixing):
            for number, start in ((mixing.value_skip, p.value_skip[i]), (mixing.attention_gain, p.attention_gain[i])):
                if isinstance(number, nn.Parameter):
                    fill(number, torch.full(number.shape, float(start), dtype=torch.float64))

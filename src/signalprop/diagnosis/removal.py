"""What layers are worth: the loss without each of them, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from signalprop.attachment.anatomy import Anatomy
from signalprop.attachment.mapping import find
from signalprop.data.batches import Batch
from signalprop.diagnosis.layers import Progress
from signalprop.diagnosis.result import Estimate, Removal, Removed
from signalprop.diagnosis.stream import LossResult, loss
from signalprop.diagnosis.temporary_changes import other_attributes
from signalprop.errors import InputError

# Lists in a config that hold one entry per layer.
_PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")
_COUNTS = ("num_hidden_layers",)
_DECODER_COUNTS = ("num_decoder_layers", "decoder_layers")


def lists_of(attached: Anatomy) -> list[tuple[nn.Module, str, list[int]]]:
    """The module lists that hold the layers: (owner, attribute, numbers of their layers), one per stack."""
    found: dict[str, list[int]] = {}
    for k, reference in enumerate(attached.mapping.layers):
        if not isinstance(reference, str) or not reference.rpartition(".")[2].isdigit():
            raise InputError("layers can be removed where Mapping.layers names them by path in a list (model.layers.0)")
        found.setdefault(reference.rpartition(".")[0], []).append(k)
    if not found:
        raise InputError("the mapping does not say where the layers are; give Mapping.layers")
    out = []
    for path, members in found.items():
        parent, _, name = path.rpartition(".")
        held = find(attached.model, path, "layers")
        if not isinstance(held, nn.ModuleList) or len(held) != len(members):
            raise InputError(f"{path} is not a list of the {len(members)} layers that the mapping names there")
        out.append((find(attached.model, parent) if parent else attached.model, name, members))
    return out


def _check(attached: Anatomy, layers: Sequence[int]) -> None:
    stacks, n = lists_of(attached), len(attached.mapping.layers)
    for layer in layers:
        if not 0 <= layer < n:
            raise InputError(f"there is no layer {layer}; this model has layers 0 to {n - 1}")
    for _, _, members in stacks:
        if set(members) <= set(layers):
            raise InputError("all layers of a stack cannot be removed; leave at least one")
        first = members[0]
        if attached.mapping.architecture.positions == "relative" and first in layers:
            raise InputError(f"layer {first} holds the position bias of all layers of its stack and cannot be removed")


@contextmanager
def without(attached: Anatomy, layers: Sequence[int]) -> Iterator[None]:
    """The model without some layers, for as long as the block runs; weights and the other layers stay as they are.

    A layer's branches go; a fixed skip multiplier that was gauged into other layers stays with them, and also what
    the other layers carry as numbers (LayerNorm Scaling). Survivors are numbered anew for key-value
    caches, unless they compute with their number (GPT-2's scale_attn_by_inverse_layer_idx); then use no cache inside.
    """
    _check(attached, layers)
    by_number = getattr(getattr(attached.model, "config", None), "scale_attn_by_inverse_layer_idx", False)
    with other_attributes(_changes(attached, layers, renumber=not by_number)):
        yield


def _changes(attached: Anatomy, layers: Sequence[int], *, renumber: bool) -> list[tuple[Any, str, Any]]:
    """What makes a model one without some layers: (owner, attribute, new value)."""
    stacks = lists_of(attached)
    config = getattr(attached.model, "config", None)
    out: list[tuple[Any, str, Any]] = []
    for stack, (owner, name, members) in enumerate(stacks):
        held = getattr(owner, name)
        kept = [i for i, k in enumerate(members) if k not in layers]
        if len(kept) == len(members):
            continue
        out.append((owner, name, nn.ModuleList(held[i] for i in kept)))
        own = getattr(owner, "config", None)  # T5 gives each of its stacks a copy
        for target in [config] if own is config else [config, own]:
            decoder = stack > 0 and target is config
            for count in _DECODER_COUNTS if decoder else _COUNTS:
                if getattr(target, count, None) == len(members):
                    out.append((target, count, len(kept)))
            for entries in _PER_LAYER if len(stacks) == 1 else ():
                value = getattr(target, entries, None)
                if isinstance(value, (list, tuple)) and len(value) == len(members):
                    out.append((target, entries, type(value)(value[i] for i in kept)))
        if renumber:
            numbered = [(i, module) for i, k in enumerate(kept) for module in held[k].modules()]
            out += [(m, "layer_idx", i) for i, m in numbered if isinstance(getattr(m, "layer_idx", None), int)]
    return out


def removal(
    attached: Anatomy,
    batches: Sequence[Batch],
    whole: LossResult,
    accuracy: Callable[[nn.Module], Estimate] | None = None,
    progress: Progress | None = None,
) -> Removal:
    """The loss without every single layer: one pass over the data per layer.

    Errors are those of the difference to the whole model, sequence by sequence.

    Args:
        whole: the loss of the whole model.
        accuracy: what else to measure of each model, e.g. `signalprop.diagnosis.tasks.harness`.
        progress: called with (models done, all).

    Raises:
        InputError: the mapping does not name the layers by their paths in a list.
    """
    lists_of(attached)
    removable = [k for k in range(len(attached.mapping.layers)) if _removable(attached, k)]
    single = []
    for k in removable:
        with without(attached, (k,)):
            found = loss(attached, batches)
            right = accuracy(attached.model) if accuracy is not None else None
        single.append(Removed(layers=(k,), loss=found.estimate, increase=found.above(whole), accuracy=right))
        if progress is not None:
            progress(len(single), len(removable))
    return Removal(single=tuple(single))


def _removable(attached: Anatomy, layer: int) -> bool:
    try:
        _check(attached, (layer,))
    except InputError:
        return False
    return True

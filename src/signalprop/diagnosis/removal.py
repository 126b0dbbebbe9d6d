"""What layers are worth: the loss without them, one at a time and in groups, and the pruned model as a checkpoint."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from signalprop.attachment.mapping import Mapping, find
from signalprop.data.batches import Batch
from signalprop.diagnosis.kept import Kept, result_of
from signalprop.diagnosis.layers import Progress
from signalprop.diagnosis.result import Estimate, Removal, Removed
from signalprop.diagnosis.stream import LossResult, loss
from signalprop.errors import InputError
from signalprop.files.storage import written_whole
from signalprop.repair.record import record_of

# Lists in a config that hold one entry per layer.
_PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")
_COUNTS = ("num_hidden_layers", "encoder_layers")  # transformers 4 has both, in BART; in 5 one stands for the other
_DECODER_COUNTS = ("num_decoder_layers", "decoder_layers")


def lists_of(model: nn.Module, mapping: Mapping) -> list[tuple[nn.Module, str, list[int]]]:
    """The module lists that hold the layers: (owner, attribute, numbers of their layers), one per stack."""
    found: dict[str, list[int]] = {}
    for k, reference in enumerate(mapping.layers):
        if not isinstance(reference, str) or not reference.rpartition(".")[2].isdigit():
            raise InputError("layers can be removed where Mapping.layers names them by path in a list (model.layers.0)")
        found.setdefault(reference.rpartition(".")[0], []).append(k)
    if not found:
        raise InputError("the mapping does not say where the layers are; give Mapping.layers")
    out = []
    for path, members in found.items():
        parent, _, name = path.rpartition(".")
        held = find(model, path, "layers")
        if not isinstance(held, nn.ModuleList) or len(held) != len(members):
            raise InputError(f"{path} is not a list of the {len(members)} layers that the mapping names there")
        out.append((find(model, parent) if parent else model, name, members))
    return out


def _check(model: nn.Module, mapping: Mapping, layers: Sequence[int]) -> None:
    stacks, n = lists_of(model, mapping), len(mapping.layers)
    for layer in layers:
        if not 0 <= layer < n:
            raise InputError(f"there is no layer {layer}; this model has layers 0 to {n - 1}")
    for _, _, members in stacks:
        if set(members) <= set(layers):
            raise InputError("all layers of a stack cannot be removed; leave at least one")
        first = members[0]
        if mapping.architecture.positions == "relative" and first in layers:
            raise InputError(f"layer {first} holds the position bias of all layers of its stack and cannot be removed")


@contextmanager
def without(model: nn.Module, mapping: Mapping, layers: Sequence[int]) -> Iterator[None]:
    """The model without some layers, for as long as the block runs; weights and the other layers stay as they are.

    A layer's branches go; a fixed skip multiplier that was gauged into other layers stays with them, and so does what
    the other layers carry as numbers of their own (LayerNorm Scaling). Survivors are numbered anew for key-value
    caches, unless they compute with their number (GPT-2's scale_attn_by_inverse_layer_idx); then use no cache inside.
    """
    _check(model, mapping, layers)
    changed: list[tuple[Any, str, Any]] = []
    try:
        for change in _changes(model, mapping, layers, renumber=not _by_number(model)):
            owner, name, value = change
            changed.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(changed):
            setattr(owner, name, value)


def _by_number(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "scale_attn_by_inverse_layer_idx", False))


def _changes(
    model: nn.Module, mapping: Mapping, layers: Sequence[int], *, renumber: bool
) -> list[tuple[Any, str, Any]]:
    """What makes a model one without some layers: (owner, attribute, new value)."""
    stacks = lists_of(model, mapping)
    config = getattr(model, "config", None)
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
    model: nn.Module,
    batches: Sequence[Batch],
    mapping: Mapping,
    *,
    greedy: int = 0,
    whole: LossResult | None = None,
    accuracy: Callable[[nn.Module], Estimate] | None = None,
    kept: Kept | None = None,
    progress: Progress | None = None,
) -> Removal:
    """The loss without every single layer, and without groups that are chosen greedily, the cheapest layer first.

    Costs one pass over the data per layer, and one per layer left for every step of the greedy choice. Errors are those
    of the difference to the whole model, sequence by sequence.

    Args:
        greedy: how many layers the largest group has. whole: the loss of the whole model, where it is known.
        accuracy: what else to measure of each model, e.g. `signalprop.diagnosis.tasks.multiple_choice`.
        kept: where what is done stays, and what an interrupted call had done is found (see `diagnose`).
        progress: called with (models done, all).
    """
    check_removal(model, mapping, greedy)
    n = len(mapping.layers)
    whole = whole or loss(model, batches, mapping=mapping)
    removable = [k for k in range(n) if _removable(model, mapping, k)]
    total = sum(len(removable) - step for step in range(max(greedy, 1)))
    done = 0

    def measured(layers: tuple[int, ...]) -> Removed:
        with without(model, mapping, layers):
            found = loss(model, batches, mapping=mapping)
            right = accuracy(model) if accuracy is not None else None
        return Removed(layers=layers, loss=found.estimate, increase=found.above(whole), accuracy=right)

    def tried(layers: tuple[int, ...]) -> Removed:
        nonlocal done
        found = result_of(kept, ("without", *layers), Removed, lambda: measured(layers))
        done += 1
        if progress is not None:
            progress(done, total)
        return found

    singles = tuple(tried((k,)) for k in removable)
    groups: list[Removed] = []
    chosen: tuple[int, ...] = ()
    for step in range(greedy):
        if step == 0:
            options = list(singles)
        else:
            options = [tried(tuple(sorted((*chosen, k)))) for k in removable if k not in chosen]
        best = min(options, key=lambda item: math.inf if item.increase.value is None else item.increase.value)
        chosen = best.layers
        groups.append(best)
    return Removal(single=singles, greedy=tuple(groups))


def check_removal(model: nn.Module, mapping: Mapping, greedy: int) -> None:
    """Raise the InputError that `removal` would raise before its first pass."""
    lists_of(model, mapping)
    n = len(mapping.layers)
    if not 0 <= greedy < n:
        raise InputError(f"greedy is {greedy}; expected a number of layers from 0 to {n - 1}")


def _removable(model: nn.Module, mapping: Mapping, layer: int) -> bool:
    try:
        _check(model, mapping, (layer,))
    except InputError:
        return False
    return True


def prune(model: nn.Module, mapping: Mapping, layers: Sequence[int]) -> nn.Module:
    """A copy of the model without some layers, numbered anew, so that caches and saved checkpoints fit.

    Weights are shared with the model. LayerNorm Scaling that was folded into norms stays with its layer.
    """
    _check_prunable(model, mapping, layers)
    memo: dict[int, Any] = {id(q): q for q in model.parameters()}
    memo |= {id(b): b for b in model.buffers()}
    pruned = copy.deepcopy(model, memo)
    for owner, name, value in _changes(pruned, mapping, layers, renumber=True):
        setattr(owner, name, value)
    return pruned


def _check_prunable(model: nn.Module, mapping: Mapping, layers: Sequence[int]) -> None:
    record = record_of(model)
    if record is not None:
        raise InputError(
            f"this model carries scheme {record.parametrization.scheme!r}, whose numbers belong to its layers; fold it "
            "first (signalprop fold), then remove layers"
        )
    _check(model, mapping, layers)
    if _by_number(model):
        raise InputError("this model divides scores by the number of the layer, which renumbering would change")


def check_save(model: nn.Module, mapping: Mapping, layers: Sequence[int], directory: str | Path) -> None:
    """Raise the InputError that `save_pruned` would raise; layers that are not chosen yet are left out."""
    _check_prunable(model, mapping, layers)
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{target} exists and is not empty; name a new directory")
    if not hasattr(model, "save_pretrained"):
        raise InputError(
            f"a {type(model).__name__} has no checkpoint form that transformers reads; save its state dict"
        )


def save_pruned(
    model: nn.Module, mapping: Mapping, layers: Sequence[int], directory: str | Path, tokenizer: Any = None
) -> None:
    """Write the pruned model as a checkpoint that plain transformers loads."""
    check_save(model, mapping, layers, directory)
    target = Path(directory)
    pruned: Any = prune(model, mapping, layers)
    with written_whole(target) as beside:
        pruned.save_pretrained(beside, safe_serialization=True)
        if tokenizer is not None and hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(beside)

"""What the sections of a diagnosis share: layers as sublayers and as modules, positions that count, passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.attachment.attached import Attached
from signalprop.attachment.mapping import Mapping, masks_of
from signalprop.data.batches import Batch
from signalprop.errors import InputError
from signalprop.network.layout import Layout, layer_starts, layout
from signalprop.watching.first_positions import later

Progress = Callable[[int, int], None]


def groups(rows: Layout) -> list[list[int]]:
    """The sublayers of every layer, the encoder's layers first."""
    starts = layer_starts(rows).tolist()
    return [list(range(a, b)) for a, b in zip(starts, [*starts[1:], len(rows.kind)], strict=True)]


def stacks_of(mapping: Mapping) -> list[int]:
    """The stack of every layer: index into `signalprop.network.layout.STACKS`."""
    rows = layout(mapping.architecture)
    return [int(rows.stack[group[0]]) for group in groups(rows)]


def has_modules(mapping: Mapping) -> bool:
    """Whether every layer is one module that the mapping names; networks of `signalprop.build` have sublayers alone."""
    return bool(mapping.layers) and not any(isinstance(item, tuple) for item in mapping.layers)


def layer_modules(attached: Attached) -> list[nn.Module]:
    """The module of every layer.

    Raises:
        InputError: the mapping does not say where the layers are, or a layer is not a module of its own.
    """
    if not has_modules(attached.mapping):
        raise InputError(
            "the mapping does not name one module per layer; give Mapping.layers, the path of every layer's module"
        )
    return [layer for layer in attached.layers if isinstance(layer, nn.Module)]


def sequences(batch: Batch) -> Iterator[Batch]:
    """The sequences of a batch, one at a time."""
    arrays = {f.name: getattr(batch, f.name) for f in fields(batch) if f.name != "source"}
    for b in range(len(batch.targets)):
        parts: dict[str, Any] = {name: None if x is None else x[b : b + 1] for name, x in arrays.items()}
        yield replace(batch, **parts)


def run(model: nn.Module, arguments: dict[str, Any]) -> None:
    """A pass whose streams alone are wanted: without a cache, and without logits where the model can leave them out."""
    known = signature(model.forward).parameters
    lean = {"use_cache": False, "logits_to_keep": 1}
    model(**{**arguments, **{name: value for name, value in lean.items() if name in known}})


class Positions:
    """Which positions of a pass count, by stack: real tokens after the first `skip_first` of their sequence.

    Args:
        arguments: the model's, with the masks that the mapping names.
    """

    def __init__(self, mapping: Mapping, arguments: dict[str, Any], skip_first: int) -> None:
        self._masks, _ = masks_of(arguments, mapping)
        self._skip_first = skip_first
        self._known: dict[tuple[int, tuple[int, ...]], tuple[Tensor, Tensor]] = {}

    def of(self, stack: int, shape: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
        """(those that count, the first ones, which are left out), each (batch, tokens); padding is in neither."""
        if (stack, shape) not in self._known:
            mask = self._masks.get(stack)
            real = torch.ones(shape, dtype=torch.bool, device=device)
            if mask is not None and mask.shape == shape:
                real = mask.to(device) != 0
            keep = later(real, self._skip_first)
            self._known[stack, shape] = (keep, real & ~keep)
        keep, first = self._known[stack, shape]
        return keep.to(device), first.to(device)

    def keep(self, stack: int, x: Tensor) -> Tensor:
        """Those that count in a stream (batch, tokens, features)."""
        return self.of(stack, (x.shape[0], x.shape[1]), x.device)[0]

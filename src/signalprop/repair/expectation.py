"""What a Parametrization wants of every parameter of a model: a list of tensors with what they should hold.

This walks over the mapping by itself and shares no code with what draws weights, so that each can find out the other.
Nothing is raised on the way: a role without a tensor, or a tensor with two roles, is an entry of the list.
"""

from __future__ import annotations

from collections.abc import Mapping as Dictionary
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from signalprop.attachment.mapping import Mapping, describe, find_any, split
from signalprop.attachment.parametrization_of import is_transposed
from signalprop.errors import InputError
from signalprop.network.kinds import kind_of
from signalprop.network.layout import PLACEMENTS, layout
from signalprop.network.parametrization import Distribution, Parametrization, fan


@dataclass(frozen=True)
class Expected:
    """A tensor in one role.

    Attributes:
        place, row: where, in words; the sublayer's index, None at the two ends.
        name, path: role, as in a Parametrization (`down`, `down bias`, `norm gain`); the parameter's name in the model.
        tensor: of a fused map only the role's rows; None where there is none (`problem` says why).
        std, distribution: what it should be drawn with; `constant`: what every entry plus `offset` should be instead.
        problem: why the tensor is missing. twice: the role that had the same numbers before.
    """

    place: str
    row: int | None
    name: str
    path: str = ""
    tensor: Tensor | None = None
    std: float = 0.0
    distribution: Distribution = "normal"
    constant: float | None = None
    offset: float = 0.0
    problem: str = ""
    twice: str = ""


def offset_of(norm: Any, family: float) -> float:
    """What is added to a norm's weight to get its gain; a norm that `apply` added is PyTorch's own."""
    return 0.0 if isinstance(norm, (nn.LayerNorm, nn.RMSNorm)) else family


class _Walk:
    """Collects entries, and remembers which numbers were taken for which role."""

    def __init__(self, model: nn.Module, factors: Dictionary[str, float]) -> None:
        self.model = model
        self.factors = factors
        self.names = {id(tensor): name for name, tensor in model.named_parameters()}
        self.taken: dict[int, list[tuple[Any, str]]] = {}
        self.found: list[Expected] = []

    def owner(self, reference: Any, entry: Expected) -> tuple[Any, Any]:
        """(module or tensor, rows) of a reference; (None, None) after an entry that says what is wrong."""
        reference, rows = split(reference)
        try:
            found = None if reference is None else find_any(self.model, reference, entry.place)
        except InputError as error:
            self.found.append(replace(entry, problem=str(error)))
            return None, None
        if found is None:
            self.found.append(replace(entry, problem=f"the mapping names no {entry.name}"))
        return found, rows

    def weight(self, reference: Any, entry: Expected, size: int | None = None, *, tied_to: Tensor | None = None) -> Any:
        """The weight of a reference, of `size` entries; its owner, for the bias. A `tied_to` weight has its entry."""
        owner, rows = self.owner(reference, entry)
        tensor = owner if isinstance(owner, Tensor) else getattr(owner, "weight", None)
        if owner is None or (tensor is not None and tensor is tied_to):
            return owner
        self.put(tensor, entry, rows, 1 if is_transposed(owner) else 0, size, getattr(owner, "padding_idx", None))
        return owner

    def bias(self, owner: Any, entry: Expected, rows: Any = None) -> None:
        """The bias of an owner: missing only where it is not to be zero."""
        tensor = None if isinstance(owner, Tensor) else getattr(owner, "bias", None)
        if isinstance(tensor, Tensor) or (owner is not None and entry.std > 0):
            self.put(tensor, entry, rows, 0)

    def norm(self, reference: Any, place: str, row: int | None, gain: float, offset: float, *, name: str = "") -> None:
        """Gain and bias of a norm, where the mapping has one; one that two branches share is looked at once."""
        if reference is None:
            return
        owner, _ = self.owner(reference, Expected(place, row, f"{name}norm gain"))
        offset = offset_of(owner, offset)
        weight, bias = getattr(owner, "weight", None), getattr(owner, "bias", None)
        if isinstance(weight, Tensor):
            if any(role.endswith("norm gain") for _, role in self.taken.get(id(weight), [])):
                return
            self.put(weight, Expected(place, row, f"{name}norm gain", constant=gain, offset=offset))
        elif owner is not None and gain != 1:
            self.put(None, Expected(place, row, f"{name}norm gain", constant=gain))
        if isinstance(bias, Tensor):
            self.put(bias, Expected(place, row, f"{name}norm bias", constant=0.0))

    def put(
        self, tensor: Any, entry: Expected, rows: Any = None, axis: int = 0, size: int | None = None,
        padding: int | None = None,
    ) -> None:  # fmt: skip
        """Add an entry for a tensor, or for some of its output features."""
        if not isinstance(tensor, Tensor):
            self.found.append(replace(entry, problem=f"the mapping's module has no {entry.name}"))
            return
        if tensor.is_meta:
            raise InputError(
                f"{entry.place} {entry.name}: the parameter is on the meta device and holds no numbers; load or "
                "initialise the model first"
            )
        path = self.names.get(id(tensor), "")
        factor = self.factors.get(path, 1.0)
        constant = None if entry.constant is None else (entry.constant - entry.offset) * factor + entry.offset
        entry = replace(entry, path=path, std=entry.std * factor, constant=constant)
        chosen = np.zeros(tensor.shape[axis] if tensor.ndim else 1, bool)
        try:
            chosen[slice(None) if rows is None else rows if isinstance(rows, slice) else np.asarray(rows)] = True
        except IndexError:
            self.found.append(replace(entry, problem=f"the mapping's rows lie outside of the {chosen.size} that exist"))
            return
        label = f"{entry.place} {entry.name}"
        before = self.taken.setdefault(id(tensor), [])
        twice = next((role for other, role in before if (other & chosen).any()), "")
        before.append((chosen, label))
        if padding is not None and chosen.size > 1:
            chosen[padding] = False  # a row that no token reads
        if not chosen.all():
            tensor = tensor.index_select(axis, torch.as_tensor(np.flatnonzero(chosen), device=tensor.device))
        if size is not None and tensor.numel() != size:
            wrong = f"it has {tensor.numel()} entries, the architecture {size}"
            self.found.append(replace(entry, problem=wrong))
            return
        self.found.append(replace(entry, tensor=tensor, twice=twice))


def expectations(
    model: nn.Module, mapping: Mapping, p: Parametrization, factors: Dictionary[str, float]
) -> tuple[list[Expected], list[str]]:
    """All entries, and the names of the parameters that no role speaks of.

    Args:
        factors: what parameters are multiplied with beyond the table, by name.

    Raises:
        InputError: parameters on the meta device.
    """
    walk = _Walk(model, factors)
    _embedding(walk, mapping, p)
    a, rows = mapping.architecture, layout(mapping.architecture)
    for i, item in enumerate(mapping.sublayers):
        place = describe(rows, i)
        for role in kind_of(rows, i).role_names(a):
            std, shape = float(p.weights[role][i]), p.distribution[role]
            entry = Expected(place, i, role, std=std, distribution=shape)
            inputs, outputs = fan(a, role)
            reference = item.weights.get(role)
            owner = walk.weight(reference, entry, inputs * outputs)
            bias = Expected(place, i, f"{role} bias", std=float(p.biases[role][i]), distribution=shape)
            walk.bias(owner, bias, split(reference)[1])
        if PLACEMENTS[p.placement[i]] != "none":
            walk.norm(item.norm, place, i, float(p.norm_gain[i]), mapping.gain_offset)
        walk.norm(item.post_norm, place, i, float(p.post_norm_gain[i]), mapping.gain_offset, name="second ")
        for norm in (item.query_norm, item.key_norm):  # their gains are part of the score scale
            walk.taken.setdefault(id(getattr(find_any(model, norm, place), "weight", None)) if norm else 0, [])
    _head(walk, mapping, p)
    others = [name for name, tensor in model.named_parameters() if id(tensor) not in walk.taken]
    return walk.found, others


def _embedding(walk: _Walk, mapping: Mapping, p: Parametrization) -> None:
    a, e, tables = mapping.architecture, p.embedding, mapping.embedding

    def entry(name: str, std: float) -> Expected:
        return Expected("embedding", None, name, std=std, distribution=e.distribution)

    if a.has_token_table or a.input == "patches":
        owner = walk.weight(tables.token, entry("patch" if a.input == "patches" else "token", e.token))
        if a.input == "patches":
            walk.bias(owner, entry("patch bias", e.patch_bias))
    positions: list[tuple[str, Any, str, float]] = [("position", tables.position, a.positions, e.position)]
    if tables.decoder_position is not None:
        kind, std = a.positions_of(decoder=True), e.position_of(decoder=True)
        positions.append(("decoder position", tables.decoder_position, kind, std))
    for name, reference, kind, std in positions:
        if kind == "learned":
            walk.weight(reference, entry(name, std))
    if a.n_segments:
        walk.weight(tables.segment, entry("segment", e.segment))
    if a.input == "frames":
        for k in range(len(a.conv_kernels)):
            inputs, outputs, kernel = a.convolution(k)
            reference = tables.convolutions[k] if k < len(tables.convolutions) else None
            std = e.convolutions[k] if k < len(e.convolutions) else 0.0
            owner = walk.weight(reference, entry(f"convolution {k}", std), inputs * outputs * kernel)
            walk.bias(owner, entry(f"convolution {k} bias", e.convolution_bias(k)))
    if a.embedding_norm:
        for reference in (tables.norm, tables.decoder_norm):
            walk.norm(reference, "embedding", None, e.norm_gain, mapping.gain_offset)


def _head(walk: _Walk, mapping: Mapping, p: Parametrization) -> None:
    a, h = mapping.architecture, p.head

    def entry(name: str, std: float) -> Expected:
        return Expected("head", None, name, std=std, distribution=h.distribution)

    if p.architecture.has_final_norm:
        for reference in (mapping.encoder_final_norm, mapping.final_norm):
            walk.norm(reference, "head", None, h.final_norm_gain, mapping.gain_offset, name="final ")
    if a.head_transform:
        walk.bias(walk.weight(mapping.head.transform, entry("transform", h.transform)), entry("transform bias", 0.0))
    if a.head == "none" or (a.has_tied_head and mapping.head.weight is None):
        return
    table = None
    if a.has_tied_head and mapping.embedding.token is not None:
        found = find_any(walk.model, mapping.embedding.token, "token embedding")
        table = found if isinstance(found, Tensor) else getattr(found, "weight", None)
    owner = walk.weight(mapping.head.weight, entry("weight", h.weight), tied_to=table)
    walk.bias(owner, entry("bias", 0.0))

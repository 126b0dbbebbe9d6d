"""The Mapping of a model that is like a family, with differences."""

from __future__ import annotations

import re
from collections.abc import Callable
from collections.abc import Mapping as Dictionary
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal

import numpy as np
from pydantic import ConfigDict
from torch import Tensor, nn

from signalprop.attachment.families import HEAD, base_of, mapping_at, missing, place_of
from signalprop.attachment.mapping import Mapping, describe, find_any, split
from signalprop.errors import InputError
from signalprop.families import find
from signalprop.families.base import ModelPaths
from signalprop.families.reading import read_as
from signalprop.files.validation import Value, typed
from signalprop.network.architecture import Architecture
from signalprop.network.kinds import KINDS, ROLE, kind_of
from signalprop.network.layout import layer_starts, layout
from signalprop.network.parametrization import fan
from signalprop.streams.parts import Seen
from signalprop.streams.wrappers import unwrapped

LAYER = "{layer}"  # in a path: the layer's own
_NOT_PATHS = ("fused_order",)
_SHOWN = 16


@typed
def mapping_like(
    model: nn.Module,
    family: str,
    *,
    names: Dictionary[str, str] | None = None,
    config: Dictionary[str, Any] | None = None,
    architecture: Dictionary[str, Any] | None = None,
    sublayers: Dictionary[str, Any] | None = None,
    gain_offset: float | None = None,
) -> Mapping:
    """The mapping of a model that is like a family of transformers, with differences.

    Args:
        model: of transformers, or a module of your own.
        family: the `model_type` of a family that is read, such as llama or gpt2.
        names: the family's name of a module or an argument -> the model's, where it is another: `{"layers": "h",
            "self_attn": "attn", "self_attn.o_proj": "attn.dense"}`; of several that fit the longest is taken.
        config: values of the family's configuration that the model has otherwise, or has no configuration for.
        architecture: fields of its Architecture that are otherwise.
        sublayers: kind (attention, cross_attention, feed_forward) -> fields of `SublayerMap` that are otherwise, in
            every layer; `{layer}` in a path stands for the layer's: `{"attention": {"multiplier": 0.22}}`.
        gain_offset: as in `Mapping`, where it is another.

    Raises:
        InputError: no such family, a module that is not where the family has it, or weights of another size than the
            architecture says; the message says what to give.
    """
    known = find(family)
    if known is None:
        raise InputError(
            f"like {family!r:.60}: no such family is known; expected a model_type such as llama, gpt2 or bert"
        )
    model, names = unwrapped(model), dict(names or {})
    own: Any = getattr(model, "config", None)
    given = {**(own.to_dict() if hasattr(own, "to_dict") else {}), **(config or {})}
    several = tuple(_renamed(one, names) for one in known.paths)
    a = read_as(known, given, type(model).__name__)
    place = place_of(model, several, a) or next(((model, one) for one in several if not missing(model, one, a)), None)
    if place is None:
        raise InputError(_misplaced(model, family, several[0], a))
    head = names.get(HEAD, HEAD)
    if not hasattr(model, "get_output_embeddings") and hasattr(model, head):
        a = a.replace(head="lm")
    mapping = mapping_at(model, known, a.replace(**(architecture or {})), place[0], place[1], head)
    if gain_offset is not None:
        mapping = replace(mapping, gain_offset=gain_offset)
    changed = _with_fields(model, mapping, sublayers or {})
    _check_sizes(model, changed, family)
    return changed


def _renamed(paths: Any, names: Dictionary[str, str]) -> Any:
    """Paths with all names in them changed."""
    if isinstance(paths, str):
        fitting = [old for old in names if paths == old or paths.startswith(f"{old}.")]
        longest = max(fitting, key=len, default="")
        return names[longest] + paths.removeprefix(longest) if longest else paths
    if is_dataclass(paths) and not isinstance(paths, type):
        kept = {f.name: getattr(paths, f.name) for f in fields(paths)}
        return replace(paths, **{k: v if k in _NOT_PATHS else _renamed(v, names) for k, v in kept.items()})
    if isinstance(paths, tuple):
        return tuple(_renamed(one, names) for one in paths)
    if isinstance(paths, dict):
        return {key: _renamed(one, names) for key, one in paths.items()}
    return paths


def _misplaced(model: nn.Module, family: str, paths: ModelPaths, a: Architecture) -> str:
    """Which module is missing, and what there is instead."""
    base = base_of(model)
    lost = missing(base, paths, a)
    lists = [stack.layers for stack in paths.stacks]
    layered = lost not in lists
    if layered:
        there = [name for name, _ in base.get_submodule(f"{lists[0]}.0").named_modules() if name]
    else:
        deeper = [name for name, one in base.named_modules() if isinstance(one, nn.ModuleList)]
        there = list(dict.fromkeys([*deeper, *(name for name, _ in base.named_children())]))
    what = f"layer 0 of {type(model).__name__}" if layered else type(model).__name__
    return (
        f"give names={{the family's name: the model's}}: {what} has no {lost!r}, where {family} has it; it has "
        f"{', '.join(there[:_SHOWN])}{', ...' if len(there) > _SHOWN else ''}"
    )


def _with_fields(model: nn.Module, mapping: Mapping, changes: Dictionary[str, Any]) -> Mapping:
    """The mapping with other fields in the sublayers of some kinds."""
    if unknown := sorted(set(changes) - set(KINDS)):
        raise InputError(f"sublayers: there is no kind {unknown[0]!r:.40}; expected {', '.join(KINDS)}")
    given = {kind: SublayerFields(**value).given for kind, value in changes.items()}
    rows = layout(mapping.architecture)
    if len(rows.kind) != len(mapping.sublayers):
        raise InputError(
            f"the model has {len(mapping.layers)} layers with {len(mapping.sublayers)} sublayers, its architecture "
            f"{len(rows.kind)}; give the number of layers with config="
        )
    number = np.searchsorted(layer_starts(rows), np.arange(len(rows.kind)), side="right") - 1
    items = [
        replace(item, **with_layer(given.get(kind_of(rows, i).name, {}), model, str(mapping.layers[number[i]])))
        for i, item in enumerate(mapping.sublayers)
    ]
    return replace(mapping, sublayers=items)


def _check_sizes(model: nn.Module, mapping: Mapping, family: str) -> None:
    """Raise InputError for a weight of another size than the architecture says."""
    a = mapping.architecture
    rows = layout(a)
    for i, item in enumerate(mapping.sublayers):
        for role, reference in item.weights.items():
            path, part = split(reference)
            held = find_any(model, path, f"{describe(rows, i)} {role}")
            weight = held if isinstance(held, Tensor) else getattr(held, "weight", None)
            inputs, outputs = fan(a, role)
            if part is None and isinstance(weight, Tensor) and weight.numel() != ROLE[role].entries(a):
                raise InputError(
                    f"{describe(rows, i)} {role}: the weight is {' x '.join(map(str, weight.shape))}, the "
                    f"architecture of a {family} like this has {inputs} inputs and {outputs} outputs; give its sizes "
                    "with config= or architecture="
                )


class _SeenFields(Value):
    """Of a `Seen`."""

    path: str
    side: Literal["input", "output"]
    call: int = 0
    calls: int = 1


class SublayerFields(Value):
    """What a file says of a sublayer: fields of a `SublayerMap`, of which those that are left out are as usual there.

    Modules are paths, in which `{layer}` stands for that of the layer. A multiplier is a number, or the path of a
    parameter; a weight a path, or a path and its rows, `"0:64"` or a list of numbers.
    """

    model_config = ConfigDict(title="sublayer")
    branch: str | None = None
    norm: str | None = None
    post_norm: str | None = None
    reads: str | None = None
    writes: str | None = None
    weights: dict[str, str | list[str | list[int]]] | None = None
    skip: float | str | None = None
    multiplier: float | str | None = None
    score_scale: float | None = None
    query_norm: str | None = None
    key_norm: str | None = None
    call: int | None = None
    calls: int | None = None
    carrier: str | None = None
    dropout: str | None = None
    scaling: str | None = None
    attention: str | None = None
    activation: str | None = None
    norm_scale: float | None = None
    stream_out: str | None = None
    enters: _SeenFields | None = None
    leaves: _SeenFields | None = None

    @property
    def given(self) -> dict[str, Any]:
        """Those that are there."""
        return {name: value for name, value in self if value is not None}


def with_layer(given: Dictionary[str, Any], model: nn.Module, layer: str) -> dict[str, Any]:
    """What a file says of a sublayer, as fields of a `SublayerMap` in that layer."""

    def own(value: Any) -> Any:
        return value.replace(LAYER, layer).removeprefix(".") if isinstance(value, str) else value

    out: dict[str, Any] = {}
    for name, value in given.items():
        if name == "weights":
            out[name] = {role: _weight(reference, own) for role, reference in value.items()}
        elif isinstance(value, _SeenFields):
            out[name] = Seen(own(value.path), value.side, value.call, value.calls)
        elif name in ("skip", "multiplier") and isinstance(value, str):
            out[name] = find_any(model, own(value), name)
        else:
            out[name] = own(value)
    return out


def _weight(reference: str | list[Any], own: Callable[[Any], Any]) -> Any:
    """A path; or a path and the rows that are taken there."""
    if isinstance(reference, str):
        return own(reference)
    if len(reference) == 2 and isinstance(reference[0], str):
        path, rows = own(reference[0]), reference[1]
        if isinstance(rows, list):
            return path, rows
        if match := re.fullmatch(r"(\d+):(\d+)", rows):
            return path, slice(int(match[1]), int(match[2]))
    raise InputError(f'a weight is {reference!r:.80}; expected a path, or [path, "0:64"], or [path, [0, 1, ...]]')

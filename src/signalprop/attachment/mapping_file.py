"""A mapping as a JSON file to edit: what differs from a family, or every sublayer, layers that are alike written once.

{"like": "llama", "names": {"self_attn": "attn"}, "sublayers": {"attention": {"multiplier": 0.22}}}
"""

from __future__ import annotations

import re
from collections.abc import Mapping as Dictionary
from dataclasses import asdict, fields
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import ConfigDict, Field
from torch import Tensor, nn

from signalprop.attachment.arguments import HELD, BatchArguments, batch_arguments
from signalprop.attachment.likeness import LAYER, SublayerFields, mapping_like, with_layer
from signalprop.attachment.mapping import EmbeddingMap, HeadMap, Mapping, SublayerMap, find_any, split
from signalprop.errors import InputError
from signalprop.files.storage import read_json, write_json
from signalprop.files.validation import Value, typed
from signalprop.network.architecture import Architecture
from signalprop.network.layout import layer_starts, layout
from signalprop.streams.parts import Seen
from signalprop.streams.wrappers import unwrapped

SCHEMA: Final = "signalprop/mapping/1"
_USUAL = SublayerMap("")
_MOST_LAYERS = 100_000


class _Likeness(Value):
    """A file that names a family."""

    model_config = ConfigDict(title="mapping")
    schema_: Literal["signalprop/mapping/1"] = Field("signalprop/mapping/1", alias="schema")
    like: str
    names: dict[str, str] = Field(default_factory=dict)
    config: dict[str, Any] = Field(default_factory=dict)
    architecture: dict[str, Any] = Field(default_factory=dict)
    sublayers: dict[str, dict[str, Any]] = Field(default_factory=dict)
    gain_offset: float | None = None


class _Row(SublayerFields):
    """A sublayer of a layer, or of layers that are alike.

    Attributes:
        layers: path of the layer, or of several whose numbers follow, `model.layers.0-31`. Rows that follow each other
            with the same `layers` are the sublayers of each. "": layers are not modules, the rows are all sublayers.
    """

    layers: str = ""


class _Ends(Value):
    """Embedding and head: paths, and factors."""

    model_config = ConfigDict(title="ends")
    token: str | None = None
    position: str | float | None = None
    segment: str | None = None
    norm: str | None = None
    scale: float = 1.0
    decoder_position: str | float | None = None
    decoder_norm: str | None = None
    class_tokens: list[str] = Field(default_factory=list)
    convolutions: list[str] = Field(default_factory=list)


class _Head(Value):
    """The head: paths, and a factor."""

    model_config = ConfigDict(title="head")
    weight: str | None = None
    scale: float = 1.0
    transform: str | None = None
    activation: str | None = None


class _Whole(Value):
    """A file that names everything."""

    model_config = ConfigDict(title="mapping")
    schema_: Literal["signalprop/mapping/1"] = Field("signalprop/mapping/1", alias="schema")
    notes: list[str] = Field(default_factory=list)
    architecture: dict[str, Any]
    sublayers: list[dict[str, Any]]
    final_norm: str | None = None
    encoder_final_norm: str | None = None
    gain_offset: float = 0.0
    embedding: _Ends = Field(default_factory=_Ends)
    head: _Head = Field(default_factory=_Head)
    inputs: dict[str, str] = Field(default_factory=dict)
    features_first: bool = False
    padding: str = "attention_mask"
    padding_stride: int = 1
    decoder_padding: str = "decoder_attention_mask"


# --- reading ---------------------------------------------------------------------------------------------


@typed
def read_mapping(path: str | Path, model: nn.Module) -> Mapping:
    """The mapping of a model that a JSON file describes, which `write_mapping` wrote or somebody made by hand.

    Args:
        path: a file with the arguments of `mapping_like` ("like" is the family), or with a whole mapping.

    Raises:
        InputError: the file cannot be read, has a field that is none, or does not fit the model; one line.
    """
    data = read_json(path)
    if not isinstance(data, dict):
        raise InputError(f"{path} holds a {type(data).__name__}; expected an object that describes a mapping")
    try:
        return mapping_of_json(data, model)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def mapping_of_json(data: Dictionary[str, Any], model: nn.Module) -> Mapping:
    """The mapping that a JSON value describes; see `read_mapping`."""
    model = unwrapped(model)
    if "like" not in data:
        return _whole(_Whole(**data), model)
    said = dict(_Likeness(**data))
    del said["schema_"]
    return mapping_like(model, said.pop("like"), **said)


def _whole(said: _Whole, model: nn.Module) -> Mapping:
    items: list[SublayerMap] = []
    layers: list[str] = []
    for named, several in groupby((_Row(**row) for row in said.sublayers), key=lambda row: row.layers):
        rows = [{k: v for k, v in row.given.items() if k != "layers"} for row in several]
        if any(not row.get("branch") for row in rows):
            raise InputError(f"{named}: a sublayer has no 'branch'; name the module whose output is added")
        for place in _paths(named):
            layers += [place] if place else []
            items += [SublayerMap(**with_layer(row, model, place)) for row in rows]
    if unknown := sorted(set(said.inputs) - set(HELD)):
        raise InputError(f"inputs: a batch holds no {unknown[0]!r:.40}; expected {', '.join(HELD)}")
    a = Architecture(**said.architecture)
    e, h = said.embedding, said.head
    token = None if e.token is None else find_any(model, e.token, "embedding token")
    arguments = batch_arguments(model, a, said.inputs, token, features_first=said.features_first)
    return Mapping(
        architecture=a,
        sublayers=items,
        final_norm=said.final_norm,
        encoder_final_norm=said.encoder_final_norm,
        embedding=EmbeddingMap(**dict(e)),
        head=HeadMap(**dict(h)),
        gain_offset=said.gain_offset,
        arguments=arguments if said.inputs else None,
        padding=said.padding,
        padding_stride=said.padding_stride,
        decoder_padding=said.decoder_padding,
        layers=layers,
        stream_only=not all(item.weights for item in items),
    )


def _paths(layers: str) -> list[str]:
    """`h.0-2` as h.0, h.1 and h.2."""
    match = re.fullmatch(r"(.*?)(\d+)-(\d+)", layers)
    if match is None:
        return [layers]
    first, last = int(match[2]), int(match[3])
    if not first <= last < first + _MOST_LAYERS:
        raise InputError(f"layers {layers!r:.80}: expected the first and the last number, as in model.layers.0-31")
    return [f"{match[1]}{i}" for i in range(first, last + 1)]


# --- writing ---------------------------------------------------------------------------------------------


@typed
def write_mapping(mapping: Mapping, model: nn.Module, path: str | Path) -> None:
    """Write a mapping of a model as a JSON file, to be edited and read by `read_mapping`.

    Args:
        mapping: of which a function of your own for `arguments` is left out. path: of the file.

    Raises:
        InputError: it names something that the model does not hold, or shapes attention, which no file can say; or
            the file cannot be written.
    """
    write_json(path, mapping_json(mapping, unwrapped(model)))


def mapping_json(mapping: Mapping, model: nn.Module) -> dict[str, Any]:
    """A mapping of a model as a JSON value; see `write_mapping`."""
    names = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
    names |= {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}

    def path(reference: Any) -> Any:
        if isinstance(reference, (nn.Module, Tensor)):
            if id(reference) not in names:
                raise InputError(f"the mapping names a {type(reference).__name__} that is not in the model")
            return names[id(reference)]
        if isinstance(reference, (list, tuple)):
            return [path(one) for one in reference]
        return reference

    rows = [_row(item, path) for item in mapping.sublayers]
    ends = [{f.name: path(getattr(end, f.name)) for f in fields(end)} for end in (mapping.embedding, mapping.head)]
    made: Any = mapping.arguments if isinstance(mapping.arguments, BatchArguments) else None
    out = _Whole(
        schema=SCHEMA,
        notes=list(mapping.notes),
        architecture=mapping.architecture.model_dump(mode="json", exclude_defaults=True),
        sublayers=_alike(rows, mapping),
        final_norm=path(mapping.final_norm),
        encoder_final_norm=path(mapping.encoder_final_norm),
        gain_offset=mapping.gain_offset,
        embedding=_Ends(**ends[0]),
        head=_Head(**ends[1]),
        inputs={} if made is None else dict(made.inputs),
        features_first=made is not None and made.features_first,
        padding=mapping.padding,
        padding_stride=mapping.padding_stride,
        decoder_padding=mapping.decoder_padding,
    )
    return {"schema": SCHEMA, **out.model_dump(mode="json", exclude_defaults=True)}


def _row(item: SublayerMap, path: Any) -> dict[str, Any]:
    """A sublayer as `SublayerFields` has it; fields that are as usual are left out."""
    out: dict[str, Any] = {}
    for f in fields(item):
        value = getattr(item, f.name)
        if isinstance(value, (nn.Module, Tensor)):
            value = path(value)
        if f.name != "branch" and value == getattr(_USUAL, f.name):
            continue
        if f.name not in SublayerFields.model_fields:
            raise InputError(f"a mapping file has no place for {f.name}; write a mapping before a scheme is applied")
        if isinstance(value, Seen):
            value = {k: v for k, v in asdict(value).items() if v != {"call": 0, "calls": 1}.get(k)}
        elif f.name == "weights":
            value = {role: _reference(*split(reference), path) for role, reference in value.items()}
        out[f.name] = value
    return out


def _reference(source: Any, rows: Any, path: Any) -> Any:
    if rows is None:
        return path(source)
    return [path(source), f"{rows.start or 0}:{rows.stop}" if isinstance(rows, slice) else list(rows)]


def _alike(rows: list[dict[str, Any]], mapping: Mapping) -> list[dict[str, Any]]:
    """The rows of layers in order; layers that follow each other and differ in their number alone are written once."""
    if not mapping.layers or any(not isinstance(layer, str) for layer in mapping.layers):
        return rows
    starts = layer_starts(layout(mapping.architecture)).tolist()
    each = [
        (str(layer), [_in_layer(row, str(layer)) for row in rows[a:b]])
        for layer, a, b in zip(mapping.layers, starts, [*starts[1:], len(rows)], strict=True)
    ]

    def likeness(numbered: tuple[int, tuple[str, list[Any]]]) -> Any:
        i, (layer, inside) = numbered
        match = re.fullmatch(r"(.*?)(\d+)", layer)
        return (match[1], int(match[2]) - i, inside) if match else (layer, i, inside)

    out = []
    for _, several in groupby(enumerate(each), key=likeness):
        members = [layer for _, (layer, _) in several]
        name = members[0] if len(members) == 1 else f"{members[0]}-{re.sub(r'.*[^0-9]', '', members[-1])}"
        inside = next(rows for layer, rows in each if layer == members[0])
        out += [{"layers": name, **row} for row in inside]
    return out


def _in_layer(value: Any, layer: str) -> Any:
    """With `{layer}` for the layer's path in all that lies in it."""
    if isinstance(value, dict):
        return {k: _in_layer(v, layer) for k, v in value.items()}
    if isinstance(value, list):
        return [_in_layer(one, layer) for one in value]
    if isinstance(value, str) and (value == layer or value.startswith(f"{layer}.")):
        return LAYER + value.removeprefix(layer)
    return value

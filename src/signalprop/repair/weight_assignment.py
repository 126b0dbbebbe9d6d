"""Which parameter of a model plays which role of a Parametrization: every one once, none twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from signalprop.attachment.mapping import Mapping, describe, find_any, split
from signalprop.attachment.parametrization_of import is_transposed
from signalprop.errors import InputError
from signalprop.network.kinds import kind_of
from signalprop.network.layout import STACKS
from signalprop.network.parametrization import Distribution, Parametrization, fan, layout

Rows = slice | Sequence[int]


@dataclass(frozen=True)
class Part:
    """A parameter, or some output features of it, in one role.

    Attributes:
        role: weight role, `<role> bias`, or a name such as `token`, `position`, `head`, `norm`.
        place: of the draw's seed: the index of the sublayer, or the name of the end.
        std: standard deviation at the start; `constant` where every entry has one value (gains) instead.
        rows: output features; None: all. transposed: they are the columns (Conv1D).
        learning_rate: factor on the learning rate.
        decays: whether weight decay is usual for it (matrices and tables, no biases, gains or multipliers).
    """

    role: str
    place: str
    std: float = 0.0
    constant: float | None = None
    distribution: Distribution = "normal"
    rows: Rows | None = None
    transposed: bool = False
    learning_rate: float = 1.0
    decays: bool = True
    where: str = ""


@dataclass
class Assignment:
    """One parameter and the roles that it plays."""

    name: str
    tensor: Tensor
    parts: list[Part]


def assignments(model: nn.Module, mapping: Mapping, p: Parametrization) -> list[Assignment]:
    """The parameters that a Parametrization speaks of, each once.

    Raises:
        InputError: a role without a parameter, or a parameter with two roles.
    """
    found: dict[int, Assignment] = {}
    names = {id(tensor): name for name, tensor in model.named_parameters()}

    def put(tensor: Any, part: Part) -> None:
        if tensor is None:
            return
        if id(tensor) not in names:
            raise InputError(f"{part.where} {part.role}: the mapping's tensor is not a parameter of the model")
        entry = found.setdefault(id(tensor), Assignment(names[id(tensor)], tensor, []))
        for other in entry.parts:
            outputs = tensor.shape[1 if part.transposed else 0]
            if part.rows is None or other.rows is None or _overlap(part.rows, other.rows, outputs):
                if part.role == "norm" and other.role == "norm":  # one norm that two parallel branches read
                    if part.constant != other.constant:
                        raise InputError(f"{part.where}: it shares its norm with {other.where}, but not its gain")
                    return
                raise InputError(
                    f"{entry.name} is matched twice: {other.where} {other.role} and {part.where} {part.role}"
                )
        entry.parts.append(part)

    rows = layout(mapping.architecture)
    for i, item in enumerate(mapping.sublayers):
        where = describe(rows, i)
        vectors = float(p.learning_rates["vectors"][i])
        for role in kind_of(rows, i).role_names(mapping.architecture):
            if role not in item.weights:
                raise InputError(f"{where} {role}: the mapping names no weight of this role; expected one in `weights`")
            source, taken = split(item.weights[role])
            owner = find_any(model, source, where)
            transposed = is_transposed(owner)
            weight, bias = _of(owner)
            expected = fan(mapping.architecture, role)
            if not isinstance(weight, Tensor):
                kind = type(owner).__module__ + "." + type(owner).__name__
                raise InputError(f"{where} {role}: {kind} has no tensor as weight (is it quantised?); expected one")
            shape = tuple(weight.shape) if taken is None else None
            if shape not in (None, expected, expected[::-1]) and weight.numel() != expected[0] * expected[1]:
                name = names.get(id(weight), "the weight")
                raise InputError(f"{where} {role}: {name} has shape {shape}; expected {expected[::-1]}")
            put(
                weight,
                Part(
                    role, str(i), float(p.weights[role][i]), None, p.distribution[role], taken, transposed,
                    float(p.learning_rates[role][i]), where=where,
                ),
            )  # fmt: skip
            bias_part = Part(
                f"{role} bias", str(i), float(p.biases[role][i]), None, p.distribution[role], taken, False, vectors,
                decays=False, where=where,
            )  # fmt: skip
            put(bias, bias_part)
        gains = [(item.norm, float(p.norm_gain[i]))] if item.norm is not None else []
        gains += [(item.post_norm, float(p.post_norm_gain[i]))] if item.post_norm is not None else []
        for reference, gain in gains:
            _norm(model, mapping, put, reference, gain, where, vectors)
    _ends(model, mapping, p, put)
    for entry in found.values():
        _check_covered(entry)
    return list(found.values())


def _of(owner: Any) -> tuple[Any, Any]:
    return (owner, None) if isinstance(owner, Tensor) else (owner.weight, getattr(owner, "bias", None))


def _norm(model: nn.Module, mapping: Mapping, put: Any, reference: Any, gain: float, where: str, rate: float) -> None:
    owner = find_any(model, reference, where)
    part = Part("norm", where, constant=gain - mapping.gain_offset, learning_rate=rate, decays=False, where=where)
    put(getattr(owner, "weight", None), part)
    bias = getattr(owner, "bias", None)
    if isinstance(bias, Tensor):
        put(bias, Part("norm", where, constant=0.0, learning_rate=rate, decays=False, where=where))


def _ends(model: nn.Module, mapping: Mapping, p: Parametrization, put: Any) -> None:
    """Embedding and head."""
    a, e, h = mapping.architecture, p.embedding, p.head
    stacks = STACKS if a.kind == "encoder-decoder" else (a.kind,)
    rate = e.learning_rate
    tables = mapping.embedding
    first = f"{stacks[0]} embedding"
    token = None
    if tables.token is not None:
        token, bias = _of(find_any(model, tables.token, "embedding"))
        if a.input == "patches":
            put(token, Part("patch", first, e.token, None, e.distribution, learning_rate=rate, where="embedding"))
            bias_part = Part("patch bias", first, e.patch_bias, None, e.distribution, learning_rate=rate, decays=False,
                             where="embedding")  # fmt: skip
            put(bias, bias_part)
        else:
            part = Part("token", "embedding", e.token, None, e.distribution, learning_rate=rate, where="embedding")
            put(token, part)
    for i, reference in enumerate(tables.convolutions):
        name = f"convolution {i}"
        weight, bias = _of(find_any(model, reference, name))
        put(weight, Part(name, first, e.convolutions[i], None, e.distribution, learning_rate=rate, where="embedding"))
        name = f"convolution bias {i}"
        std = e.convolution_bias(i)
        put(bias, Part(name, first, std, None, e.distribution, learning_rate=rate, decays=False, where="embedding"))
    last = f"{stacks[-1]} embedding"
    positions = [
        ("position", first, tables.position, e.position),
        ("position", last, tables.decoder_position, e.position_of(decoder=True)),
        ("segment", first, tables.segment, e.segment),
    ]
    positions += [
        (name, first, reference, e.position)
        for name, reference in zip(("class token", "distillation token"), tables.class_tokens, strict=False)
    ]
    for name, place, table, std in positions:
        if table is None or isinstance(table, (int, float)):
            continue
        tensor, _ = _of(find_any(model, table, name))
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad:  # not a table of sines and cosines
            put(tensor, Part(name, place, std, None, e.distribution, learning_rate=rate, where=place))
    for norm in (tables.norm, tables.decoder_norm):
        if norm is not None:
            _norm(model, mapping, put, norm, e.norm_gain, "embedding", rate)
    for final in (mapping.encoder_final_norm, mapping.final_norm):
        if final is not None:
            _norm(model, mapping, put, final, h.final_norm_gain if a.has_final_norm else 1.0, "final norm", 1.0)
    if mapping.head.transform is not None:
        weight, bias = _of(find_any(model, mapping.head.transform, "head transform"))
        rate = h.transform_learning_rate
        put(weight, Part("transform", "head", h.transform, None, h.distribution, learning_rate=rate, where="head"))
        put(bias, Part("transform bias", "head", 0.0, decays=False, where="head"))
    if mapping.head.weight is not None and a.head != "none":
        weight, bias = _of(find_any(model, mapping.head.weight, "head"))
        if weight is not token:
            part = Part("weight", "head", h.weight, None, h.distribution, learning_rate=h.learning_rate, where="head")
            put(weight, part)
        put(bias, Part("head bias", "head", 0.0, decays=False, where="head"))


def _overlap(one: Rows, other: Rows, length: int) -> bool:
    return bool(np.intersect1d(np.arange(length)[_index(one)], np.arange(length)[_index(other)]).size)


def _index(rows: Rows) -> Any:
    return rows if isinstance(rows, slice) else np.asarray(rows)


def _check_covered(entry: Assignment) -> None:
    """Raise InputError where the rows of a fused map leave some output features without a role."""
    parts = [part for part in entry.parts if part.rows is not None]
    if not parts:
        return
    total = entry.tensor.shape[1 if parts[0].transposed else 0]
    got = sum(len(np.arange(total)[_index(part.rows)]) for part in parts if part.rows is not None)
    if got != total:
        raise InputError(
            f"{entry.name} has {total} output features, of which {got} have a role; mend the rows in the mapping"
        )

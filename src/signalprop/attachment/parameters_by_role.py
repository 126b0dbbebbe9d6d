"""Which parameter of a model plays which role of a Parametrization, and with what it should start: one walk.

`walk` raises nothing on its way: a role without a parameter is a `Part` that says why. `assignments` is the same walk
for what draws weights, which refuses such parts and parameters with two roles; `check` puts them into its table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from signalprop.attachment.anatomy import Anatomy
from signalprop.attachment.rows import PACKED, AttachedRow, Held
from signalprop.errors import InputError
from signalprop.network.embedding_and_head import Distribution
from signalprop.network.kinds import ROLE
from signalprop.network.layout import PLACEMENTS, STACKS
from signalprop.network.parametrization import Parametrization
from signalprop.streams.proof import gain_and_bias

Rows = slice | Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A parameter, or some output features of it, in one role.

    Attributes:
        where: `layer 3 attention`, `embedding` or `head`. row: index of the sublayer; None at the two ends.
        name: role in words (`down`, `down bias`, `norm gain`).
        role, place: of the draw's seed: `down`, `token`, `norm`, and the index of the sublayer or the name of the end.
        tensor: the whole parameter; None if there is none. problem: why, or what is wrong with it.
        std: standard deviation at the start; `constant`: the one value of every entry (gains) instead.
        offset: what is added to the parameter to get a gain.
        rows: output features; None: all. transposed: they are the columns (Conv1D). copies: of several maps, which the
            first axis counts. padding: row that no token reads.
        learning_rate: factor on the learning rate.
        decays: whether weight decay is usual for it (matrices and tables, no biases, gains or multipliers).
        drawn: whether a scheme fills it. checked: whether it is part of the table that a scheme is checked by.
    """

    where: str
    row: int | None = None
    name: str
    role: str
    place: str
    tensor: Any = None
    problem: str = ""
    std: float = 0.0
    constant: float | None = None
    offset: float = 0.0
    distribution: Distribution = "normal"
    rows: Rows | None = None
    transposed: bool = False
    copies: bool = False
    padding: int | None = None
    learning_rate: float = 1.0
    decays: bool = True
    drawn: bool = True
    checked: bool = True

    @property
    def axis(self) -> int:
        """The axis of the output features."""
        return (1 if self.transposed else 0) + self.copies

    @property
    def outputs(self) -> Any:
        """Which output features it takes, as booleans."""
        chosen = np.zeros(self.tensor.shape[self.axis] if self.tensor.ndim else 1, bool)
        chosen[slice(None) if self.rows is None else self.rows if isinstance(self.rows, slice) else [*self.rows]] = True
        return chosen

    def of(self, tensor: Tensor, outputs: Any) -> Tensor:
        """The numbers of some output features, as booleans, of a whole tensor of the parameter's shape."""
        return tensor.index_select(self.axis, torch.as_tensor(np.flatnonzero(outputs), device=tensor.device))


@dataclass
class Assignment:
    """One parameter and the roles that it plays."""

    name: str
    tensor: Tensor
    parts: list[Part]


def assignments(attached: Anatomy, p: Parametrization) -> list[Assignment]:
    """The parameters that a Parametrization speaks of, each once."""
    found: dict[int, Assignment] = {}
    names = {id(tensor): name for name, tensor in attached.model.named_parameters()}
    for part in walk(attached, p):
        if part.problem and part.drawn:
            raise InputError(f"{part.where} {part.name}: {part.problem}")
        if part.drawn and part.tensor is not None:
            if id(part.tensor) not in names:
                raise InputError(f"{part.where} {part.name}: the mapping's tensor is not a parameter of the model")
            name = names[id(part.tensor)]
            _add(found.setdefault(id(part.tensor), Assignment(name, part.tensor, [])), part)
    for entry in found.values():
        _check_covered(entry)
    return list(found.values())


def _add(entry: Assignment, part: Part) -> None:
    for other in entry.parts:
        if not (part.outputs & other.outputs).any():
            continue
        if part.role == "norm" and other.role == "norm":  # one norm that two parallel branches read
            if part.constant != other.constant:
                raise InputError(f"{part.where}: it shares its norm with {other.where}, but not its gain")
            return
        if (part.where, other.role) == ("head", "token"):  # tied, whatever the architecture says
            return
        raise InputError(f"{entry.name} is matched twice: {other.where} {other.name} and {part.where} {part.name}")
    entry.parts.append(part)


def _check_covered(entry: Assignment) -> None:
    """Raise InputError where the rows of a fused map leave some output features without a role."""
    if any(part.rows is None for part in entry.parts):
        return
    covered = np.any([part.outputs for part in entry.parts], axis=0)
    if not covered.all():
        raise InputError(
            f"{entry.name} has {covered.size} output features, of which {covered.sum()} have a role; fix the rows in "
            "the mapping"
        )


def walk(attached: Anatomy, p: Parametrization) -> Iterator[Part]:
    """Every role of a Parametrization, with the parameter that plays it: embedding, sublayers, head."""
    yield from _embedding(attached, p)
    a, kinds = attached.mapping.architecture, {row.kind for row in attached.rows}
    sizes = {kind: {role: ROLE[role].entries(a) for role in kind.role_names(a)} for kind in kinds}
    for i, row in enumerate(attached.rows):
        for role, size in sizes[row.kind].items():
            yield from _map(attached, p, i, row, role, size)
        rate, offset = float(p.learning_rates["vectors"][i]), attached.mapping.gain_offset
        for norm, gain, name in ((row.norm, p.norm_gain[i], ""), (row.post_norm, p.post_norm_gain[i], "second ")):
            for part in _norm(norm, name, row.label, i, float(gain), offset, rate):
                yield replace(part, checked=bool(name) or PLACEMENTS[p.placement[i]] != "none")
    yield from _head(attached, p)


def _map(attached: Anatomy, p: Parametrization, i: int, row: AttachedRow, role: str, size: int) -> Iterator[Part]:
    """The weight, of so many entries, and the bias of a sublayer's role."""
    common: dict[str, Any] = {"where": row.label, "row": i, "place": str(i), "distribution": p.distribution[role]}
    held = row.weights.get(role)
    own = attached.mapping.architecture.role_scale.get(role, 1.0)
    weight = _weight(
        held, std=float(p.weights[role][i]) / own, role=role, learning_rate=float(p.learning_rates[role][i]), **common
    )
    yield _sized(weight, size)
    rate = float(p.learning_rates["vectors"][i])
    yield from _bias(held, std=float(p.biases[role][i]) / own, role=f"{role} bias", learning_rate=rate, **common)


def _weight(held: Held | None, *, role: str, name: str = "", **given: Any) -> Part:
    part = Part(name=name or role, role=role, **given)
    if held is None:
        return replace(part, problem=f"the mapping names no {part.name}")
    if held.problem:
        return replace(part, problem=held.problem)
    weight, holder = held.weight, held.holder
    if callable(weight):
        kind = f"{type(holder).__module__}.{type(holder).__name__}"
        return replace(part, problem=f"{kind} has no tensor as weight (is it quantised?); expected one")
    if not isinstance(weight, Tensor):
        return replace(part, problem=f"the mapping's module has no {part.name}")
    if not weight.is_floating_point():
        return replace(part, problem=PACKED.format(f"a {type(holder).__name__}"))
    padding = getattr(holder, "padding_idx", None)
    here: dict[str, Any] = {"rows": held.rows, "transposed": held.transposed, "copies": held.copies}
    return _inside(replace(part, tensor=weight, padding=padding, **here))


def _inside(part: Part) -> Part:
    """The part, with a problem where its rows do not exist."""
    try:
        _ = part.outputs
    except IndexError:
        size = part.tensor.shape[part.axis]
        return replace(part, tensor=None, problem=f"the mapping's rows are outside of the {size} that exist")
    return part


def _bias(held: Held | None, *, role: str, name: str = "", **given: Any) -> Iterator[Part]:
    """The bias: missing only where it is not to be zero, and then not what a scheme refuses to fill."""
    if held is None or held.problem:
        return
    part, bias = Part(name=name or role, role=role, decays=False, **given), held.bias
    if isinstance(bias, Tensor):
        yield _inside(replace(part, tensor=bias, rows=held.rows, copies=held.copies))
    elif part.std > 0 and not isinstance(held.holder, Tensor):
        yield replace(part, problem=f"the mapping's module has no {part.name}", drawn=False)


def _sized(part: Part, size: int) -> Part:
    """The part, with a problem where it does not have as many entries as the architecture says."""
    if part.tensor is None:
        return part
    got = part.tensor.numel() // part.outputs.size * int(part.outputs.sum())
    if got == size:
        return part
    return replace(part, tensor=None, problem=f"it has {got} entries, the architecture {size}")


def _norm(
    norm: nn.Module | None, name: str, where: str, row: int | None, gain: float, offset: float, rate: float
) -> Iterator[Part]:
    """Gain and bias of a norm, if there is one."""
    if norm is None:
        return
    common: dict[str, Any] = {"where": where, "row": row, "place": where, "role": "norm", "learning_rate": rate}
    common["decays"] = False
    weight, bias = gain_and_bias(norm)
    if isinstance(weight, Tensor):
        yield Part(name=f"{name}norm gain", tensor=weight, constant=gain - offset, offset=offset, **common)
    elif gain != 1:
        problem = f"the mapping's module has no {name}norm gain"
        yield Part(name=f"{name}norm gain", constant=gain, problem=problem, drawn=False, **common)
    if isinstance(bias, Tensor):
        yield Part(name=f"{name}norm bias", tensor=bias, constant=0.0, **common)


def _embedding(attached: Anatomy, p: Parametrization) -> Iterator[Part]:
    a, e, ends = attached.mapping.architecture, p.embedding, attached.ends
    stacks = STACKS if a.kind == "encoder-decoder" else (a.kind,)
    first, last = f"{stacks[0]} embedding", f"{stacks[-1]} embedding"
    common: dict[str, Any] = {"where": "embedding", "distribution": e.distribution, "learning_rate": e.learning_rate}
    if a.input == "patches":
        yield _wanted(_weight(ends.token, role="patch", place=first, std=e.token, **common), ends.token)
        yield from _bias(ends.token, role="patch bias", place=first, std=e.patch_bias, **common)
    elif a.has_token_table or ends.token is not None:
        part = _weight(ends.token, role="token", place="embedding", std=e.token, **common)
        yield replace(_wanted(part, ends.token), checked=a.has_token_table)
    for k in range(max(len(ends.convolutions), len(a.conv_kernels) if a.input == "frames" else 0)):
        held = ends.convolutions[k] if k < len(ends.convolutions) else None
        std = e.convolutions[k] if k < len(e.convolutions) else 0.0
        inputs, outputs, kernel = a.convolution(k)
        part = _weight(held, role=f"convolution {k}", place=first, std=std, **common)
        yield _wanted(_sized(part, inputs * outputs * kernel), held)
        name, bias = f"convolution {k} bias", f"convolution bias {k}"
        yield from _bias(held, role=bias, name=name, place=first, std=e.convolution_bias(k), **common)
    learned = a.positions == "learned"
    tables: list[tuple[str, str, str, Any, float, bool]] = [
        ("position", "position", first, ends.position, e.position, learned),
        ("segment", "segment", first, ends.segment, e.segment, a.n_segments > 0),
    ]
    if ends.decoder_position is not None:
        std, also = e.position_of(decoder=True), a.positions_of(decoder=True) == "learned"
        tables.append(("position", "decoder position", last, ends.decoder_position, std, also))
    for role, name, place, held, std, checked in tables:
        if isinstance(held, Held) or (checked and held is None):
            part = _weight(held, role=role, name=name, place=place, std=std, checked=checked, **common)
            yield replace(part, drawn=_trains(part.tensor))  # no table of sines and cosines
    for name, held in zip(("class token", "distillation token"), ends.class_tokens, strict=False):
        part = _weight(held, role=name, place=first, std=e.position, checked=False, **common)
        yield replace(part, drawn=_trains(part.tensor))
    for norm in (ends.norm, ends.decoder_norm):
        rate, offset = e.learning_rate, attached.mapping.gain_offset
        for part in _norm(norm, "", "embedding", None, e.norm_gain, offset, rate):
            yield replace(part, checked=a.embedding_norm)


def _wanted(part: Part, held: Held | None) -> Part:
    """What a mapping leaves out at its two ends is not refused when weights are drawn."""
    return part if held is not None else replace(part, drawn=False)


def _trains(tensor: Any) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _head(attached: Anatomy, p: Parametrization) -> Iterator[Part]:
    a, h, ends, offset = attached.mapping.architecture, p.head, attached.ends, attached.mapping.gain_offset
    gain = h.final_norm_gain if a.has_final_norm else 1.0
    for norm in ends.final_norms:
        for part in _norm(norm, "final ", "head", None, gain, offset, 1.0):
            yield replace(part, place="final norm", checked=p.architecture.has_final_norm)
    common: dict[str, Any] = {"where": "head", "place": "head", "distribution": h.distribution}
    if a.head_transform or ends.transform is not None:
        rate = h.transform_learning_rate
        part = _weight(ends.transform, role="transform", std=h.transform, learning_rate=rate, **common)
        yield replace(_wanted(part, ends.transform), checked=a.head_transform)
        yield from _bias(ends.transform, role="transform bias", checked=a.head_transform, **common)
    if a.head == "none" or (a.has_tied_head and ends.head is None):
        return
    part = _weight(ends.head, role="weight", std=h.weight, learning_rate=h.learning_rate, **common)
    tied = a.has_tied_head and ends.token is not None and part.tensor is ends.token.weight
    if not tied:
        yield _wanted(part, ends.head)
    yield from _bias(ends.head, role="head bias", name="bias", **common)

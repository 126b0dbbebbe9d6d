"""The rows and ends of an attached model: what a mapping names, as modules and parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn

from signalprop.attachment.mapping import Mapping, SublayerMap, Weight, describe, find, find_any, number, split
from signalprop.errors import InputError
from signalprop.network.kinds import ROLE, Kind, Role, kind_of
from signalprop.network.layout import PLACEMENTS, ROLES, STACKS, Layout
from signalprop.streams.multi_head import bias_beside
from signalprop.streams.wrappers import without_adapters

PACKED = "{} holds packed integers; take the model before it is quantised"


@dataclass(frozen=True)
class Held:
    """A weight: what holds it, and its output features there (None: all); or another part that few things need.

    Attributes:
        copies: it holds several maps, (copies, outputs, inputs), or `turned`: (copies, inputs, outputs).
        beside: the bias that stands beside a bare parameter, (copies, outputs).
        found: the module, or a bare parameter. problem: why there is none, if there is none.
    """

    found: Any
    rows: slice | Sequence[int] | None = None
    problem: str = ""
    copies: bool = False
    turned: bool = False
    beside: Tensor | None = None

    @property
    def holder(self) -> Any:
        """The module that holds it, or a bare parameter."""
        if self.problem:
            raise InputError(self.problem)
        return self.found

    @property
    def weight(self) -> Any:
        """The whole tensor; None if there is none, and of a module that PyTorch has quantised a function."""
        return self.holder if isinstance(self.holder, Tensor) else getattr(self.holder, "weight", None)

    @property
    def bias(self) -> Any:
        """The whole bias; None if there is none."""
        return self.beside if isinstance(self.holder, Tensor) else getattr(self.holder, "bias", None)

    @cached_property
    def transposed(self) -> bool:
        """Whether the weight is stored as (inputs, outputs), as transformers' Conv1D does."""
        return self.turned or is_transposed(self.holder)

    @property
    def axis(self) -> int:
        """The axis of the weight's output features."""
        return self.copies + self.transposed

    @property
    def tensors(self) -> list[tuple[Tensor, int]]:
        """The weight and the bias, where they are tensors, each with the axis of its output features."""
        found = ((self.weight, self.axis), (self.bias, int(self.copies)))
        return [(tensor, axis) for tensor, axis in found if isinstance(tensor, Tensor)]

    def of(self, tensor: Tensor, axis: int) -> Tensor:
        """The output features that belong to it, of a tensor that has all along an axis."""
        if self.rows is None:
            return tensor
        return tensor[(*(slice(None),) * axis, self.rows if isinstance(self.rows, slice) else [*self.rows])]

    def module(self, where: str) -> nn.Module:
        """The module that holds it."""
        if not isinstance(self.holder, nn.Module):
            raise InputError(f"{where}: the mapping names a bare parameter; expected the module that holds it")
        return self.holder


@dataclass(frozen=True, kw_only=True)
class AttachedRow(SublayerMap):
    """One sublayer: a SublayerMap whose references are modules, beside what the layout says of it.

    Attributes:
        label: `layer 3 attention`. kind: what sort of sublayer it is. stack, placement: words of
            `signalprop.network.layout`. layer: in its stack.
        weights (by role), activation: one that is not there is an error where it is needed.
        dropout: (owner, attribute) of the probability with which the branch is dropped out. scaling: likewise of the
            factor on scores. score_scale: that factor, without the gains of QK-norm.
    """

    label: str
    kind: Kind
    stack: str
    layer: int
    placement: str
    parallel: bool
    score_scale: float
    branch: nn.Module
    norm: nn.Module | None
    post_norm: nn.Module | None
    reads: nn.Module | None
    writes: nn.Module | None
    stream_out: nn.Module | None
    query_norm: nn.Module | None
    key_norm: nn.Module | None
    weights: dict[str, Held]  # type: ignore[assignment]
    activation: Held | None  # type: ignore[assignment]
    dropout: tuple[nn.Module, str] | None  # type: ignore[assignment]
    scaling: tuple[nn.Module, str] | None  # type: ignore[assignment]

    @property
    def own_multipliers(self) -> tuple[float, float]:
        """(skip, branch) that the model's code multiplies with, as they are now."""
        return number(self.skip), number(self.multiplier)

    @property
    def tensors(self) -> list[Tensor]:
        """The weights that are there as tensors, one for each role: of a fused map the whole one again."""
        found = [held.weight for held in self.weights.values() if not held.problem]
        return [weight for weight in found if isinstance(weight, Tensor)]

    @cached_property
    def ending(self) -> Any:
        """What a multiplier goes on: the carrier that the mapping names, or the default that it explains."""
        if self.carrier is not None:
            return self.carrier
        if self.placement == "sandwich" and self.post_norm is not None:
            return self.post_norm
        if self.placement == "res-post":
            return self.norm
        if self.kind.has_copies:  # no one map ends it
            return self.branch
        last = [self.weights[role.name] for role in self.kind.roles if role.writes and role.name in self.weights]
        return last[0].holder if last else None

    def holders(self, chosen: Callable[[Role], bool]) -> list[Any]:
        """What holds the weights of the roles that pass a test, each once."""
        found = [
            self.weights[role.name].holder for role in self.kind.roles if chosen(role) and role.name in self.weights
        ]
        return list({id(holder): holder for holder in found}.values())

    @cached_property
    def readers(self) -> list[Any]:
        """The modules (or bare parameters) that read what enters the branch, each once.

        Of cross-attention the query's alone: its keys and values read the encoder's output. Of experts, of which every
        one reads some tokens, the branch, or what else reads in it where it ends in a norm.
        """
        if self.kind.has_copies:  # of a norm on the branch, what is before it
            if self.branch is self.post_norm:
                return self.holders(lambda role: role.reads and role.copies is None)
            return [self.reads if self.branch is self.norm and self.reads is not None else self.branch]
        across = self.kind.reads_memory
        return self.holders(lambda role: role.name == "query" if across else role.reads)


@dataclass(frozen=True)
class AttachedEnds:
    """The tables and maps before the first sublayer and after the last; see `EmbeddingMap` and `HeadMap`.

    `position`, `decoder_position` and `segment` are numbers where the model computes them.
    """

    token: Held | None
    position: Held | float | None
    decoder_position: Held | float | None
    segment: Held | float | None
    norm: nn.Module | None
    decoder_norm: nn.Module | None
    class_tokens: tuple[Held, ...]
    convolutions: tuple[Held, ...]
    head: Held | None
    transform: Held | None
    activation: Held | None
    encoder_final_norm: nn.Module | None
    final_norm: nn.Module | None

    @property
    def final_norms(self) -> list[nn.Module]:
        """Those that there are, the encoder's first."""
        return [norm for norm in (self.encoder_final_norm, self.final_norm) if norm is not None]

    @property
    def tables(self) -> list[Held]:
        """The tables that are added: tokens, positions, segments."""
        found = (self.token, self.position, self.decoder_position, self.segment)
        return [table for table in found if isinstance(table, Held)]


def is_transposed(module: Any) -> bool:
    """Whether a map stores its weight as (inputs, outputs), as transformers' Conv1D does."""
    return any(cls.__name__ == "Conv1D" for cls in type(without_adapters(module)).__mro__)


def _held(model: nn.Module, reference: Weight, where: str, role: str = "") -> Held:
    source, rows = split(reference)
    copies = role in ROLE and ROLE[role].copies is not None
    try:
        found = find_any(model, source, where)
        if not (isinstance(found, Tensor) and isinstance(source, str)):
            return Held(found, rows, copies=copies)
        place, _, name = source.rpartition(".")
        owner = find_any(model, place, where)
        if not copies:
            return Held(found, rows, beside=bias_beside(owner, name))
        turned = getattr(owner, "is_transposed", False) is True  # so transformers says how experts are stored
        return Held(found, rows, copies=True, turned=turned, beside=getattr(owner, f"{name}_bias", None))
    except InputError as error:  # said where the weight is needed
        return Held(None, rows, str(error), copies)


def row_of(model: nn.Module, table: Layout, i: int, item: SublayerMap, score_scale: float) -> AttachedRow:
    """Sublayer `i` of a layout, with the modules that a mapping names; `score_scale`: where that says none."""
    label = describe(table, i)
    if unknown := set(item.weights) - set(ROLES):
        raise InputError(f"{label}: unknown weight roles {sorted(unknown)}; expected {', '.join(ROLES)}")
    found: dict[str, Any] = {name: _module(model, getattr(item, name), label) for name in _MODULES}
    found |= {
        "carrier": None if item.carrier is None else find_any(model, item.carrier, label),
        "activation": _held_or_none(model, item.activation, label),
        "weights": {role: _held(model, one, f"{label} {role}", role) for role, one in item.weights.items()},
        "dropout": _dropout(model, item, label),
        "scaling": None if item.scaling is None else _attribute(model, item.scaling, label),
        "score_scale": score_scale if item.score_scale is None else item.score_scale,
    }
    return AttachedRow(
        **{**vars(item), **found},
        label=label,
        kind=kind_of(table, i),
        stack=STACKS[table.stack[i]],
        layer=int(table.layer[i]),
        placement=PLACEMENTS[table.placement[i]],
        parallel=bool(table.parallel[i]),
    )


_MODULES = ("branch", "reads", "writes", "stream_out", "norm", "post_norm", "query_norm", "key_norm")


def _held_or_none(model: nn.Module, reference: Any, where: str) -> Held | None:
    return None if reference is None else _held(model, reference, where)


def _module(model: nn.Module, reference: Any, where: str) -> nn.Module | None:
    return None if reference is None else find(model, reference, where)


def _attribute(model: nn.Module, path: str, where: str) -> tuple[nn.Module, str]:
    """(owner, name) of the number of that path."""
    find_any(model, path, where)
    parent, _, name = path.rpartition(".")
    return find(model, parent, where), name


def _dropout(model: nn.Module, item: SublayerMap, where: str) -> tuple[nn.Module, str] | None:
    path = item.dropout if item.dropout is not None else item.branch
    found = find_any(model, path, where)
    if isinstance(found, nn.Dropout):
        return found, "p"
    return _attribute(model, path, where) if isinstance(path, str) and isinstance(found, (int, float)) else None


def ends_of(model: nn.Module, mapping: Mapping) -> AttachedEnds:
    """What a mapping names before the first sublayer and after the last."""
    e, h, norm, held = mapping.embedding, mapping.head, partial(_module, model), partial(_held_or_none, model)

    def position(reference: Any, where: str) -> Held | float | None:
        return float(reference) if isinstance(reference, (int, float)) else held(reference, where)

    return AttachedEnds(
        token=held(e.token, "token embedding"),
        position=position(e.position, "position embedding"),
        decoder_position=position(e.decoder_position, "decoder position embedding"),
        segment=position(e.segment, "segment embedding"),
        norm=norm(e.norm, "embedding norm"),
        decoder_norm=norm(e.decoder_norm, "embedding norm"),
        class_tokens=tuple(_held(model, token, "class token") for token in e.class_tokens),
        convolutions=tuple(_held(model, one, "convolution") for one in e.convolutions),
        head=held(h.weight, "head"),
        transform=held(h.transform, "head transform"),
        activation=held(h.activation, "head"),
        encoder_final_norm=norm(mapping.encoder_final_norm, "final norm"),
        final_norm=norm(mapping.final_norm, "final norm"),
    )

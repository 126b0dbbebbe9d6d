"""A model with its mapping resolved, once: rows that hold modules, for all that measures, changes or checks a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Mapping as Dictionary
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn

from signalprop.attachment.families import mapping_for
from signalprop.attachment.found import UNKNOWN
from signalprop.attachment.found_roles import mapping_with_roles, roles_of, with_proved_weights
from signalprop.attachment.live_model import without_adapters
from signalprop.attachment.mapping import Mapping, Plan, SublayerMap, Weight, describe, find, find_any, split
from signalprop.attachment.probe_points import plan_of
from signalprop.errors import InputError
from signalprop.network.kinds import ROLE, Kind, Role, kind_of
from signalprop.network.layout import PLACEMENTS, ROLES, STACKS, Layout, layout
from signalprop.streams.multi_head import bias_beside
from signalprop.streams.wrappers import unwrapped


@dataclass(frozen=True)
class Held:
    """A weight: what holds it, and its output features there (None: all); or another part that few things need.

    Attributes:
        copies: it holds several maps, (copies, outputs, inputs), or `turned`: (copies, inputs, outputs).
        beside: the bias that stands beside a bare parameter, (copies, outputs).
        found: the module, or a bare parameter. problem: why there is none, where there is none.
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
        """The whole tensor; None where there is none, and of a module that PyTorch has quantised a function."""
        return self.holder if isinstance(self.holder, Tensor) else getattr(self.holder, "weight", None)

    @property
    def bias(self) -> Any:
        """The whole bias; None where there is none."""
        return self.beside if isinstance(self.holder, Tensor) else getattr(self.holder, "bias", None)

    @property
    def transposed(self) -> bool:
        """Whether the weight is stored as (inputs, outputs), as transformers' Conv1D does."""
        return self.turned or is_transposed(self.holder)

    def module(self, where: str) -> nn.Module:
        """The module that holds it."""
        if not isinstance(self.holder, nn.Module):
            raise InputError(f"{where}: the mapping names a bare parameter; expected the module that holds it")
        return self.holder


@dataclass(frozen=True)
class AttachedRow:
    """One sublayer with its modules.

    Attributes:
        label: `layer 3 attention`. kind: what sort of sublayer it is. stack, placement: words of
            `signalprop.network.layout`. layer: in its stack.
        item: the numbers of the sublayer (skip, multiplier, units, ...), as the mapping has them.
        branch, reads, writes, stream_out, norm, post_norm, query_norm, key_norm: the modules that `SublayerMap` names;
            None where it names none.
        activation, weights (by role): likewise; one that is not there is an error where it is needed.
        carrier: what a multiplier goes on (see `SublayerMap.carrier`).
        dropout: (owner, attribute) of the probability with which the branch is dropped out. scaling: likewise of the
            factor on scores.
    """

    label: str
    kind: Kind
    stack: str
    layer: int
    placement: str
    parallel: bool
    item: SublayerMap
    branch: nn.Module
    reads: nn.Module | None
    writes: nn.Module | None
    stream_out: nn.Module | None
    norm: nn.Module | None
    post_norm: nn.Module | None
    query_norm: nn.Module | None
    key_norm: nn.Module | None
    activation: Held | None
    weights: dict[str, Held]
    own_carrier: Any
    dropout: tuple[nn.Module, str] | None
    scaling: tuple[nn.Module, str] | None

    def carrier(self) -> Any:
        """What a multiplier goes on."""
        if self.own_carrier is not None:
            return self.own_carrier
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

    @property
    def reader(self) -> Any:
        """What reads the stream within the sublayer's own layer: its norm before the branch, or the first map."""
        if self.placement in ("pre", "sandwich"):
            return self.norm
        maps = [self.weights[role.name] for role in self.kind.roles if role.reads and role.name in self.weights]
        first = self.weights.get("up", maps[0] if maps else None)  # not every feed-forward has a gate
        return None if first is None else first.holder

    @property
    def readers(self) -> list[Any]:
        """The modules (or bare parameters) that read what enters the branch, each once.

        Of cross-attention the query's alone: its keys and values read the encoder's output. Of experts, of which every
        one reads some tokens, the branch, or what else reads in it where it ends in a norm.
        """
        if self.kind.has_copies and self.branch is self.post_norm:
            return self.holders(lambda role: role.reads and role.copies is None)
        if self.kind.has_copies:  # of a norm on the branch, what is before it
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


@dataclass(frozen=True)
class Attached:
    """A model whose mapping has been resolved; `attach` makes it.

    Attributes:
        outer: the model as it was given. model: without its wrappers. mapping, layout: of the model.
        rows: one per sublayer. ends: embedding and head. arguments: of the forward, that the mapping was found with.
    """

    outer: nn.Module
    model: nn.Module
    mapping: Mapping
    layout: Layout
    rows: tuple[AttachedRow, ...]
    ends: AttachedEnds
    arguments: Dictionary[str, Any] | None = None

    @cached_property
    def plan(self) -> Plan:
        """Where the probe points are, each tensor once."""
        return plan_of(self)

    @cached_property
    def layers(self) -> tuple[nn.Module | tuple[nn.Module, ...], ...]:
        """The module of every layer, or its modules where it is not one; empty where the mapping does not say."""
        return tuple(
            tuple(find(self.model, one, "layer") for one in item)
            if isinstance(item, tuple)
            else find(self.model, item, "layer")
            for item in self.mapping.layers
        )

    @cached_property
    def norms(self) -> tuple[nn.Module, ...]:
        """The norms on the stream, on branches, queries and keys, each once."""
        rows, ends = self.rows, self.ends
        named = [norm for row in rows for norm in (row.norm, row.post_norm, row.query_norm, row.key_norm)]
        named += [ends.norm, ends.decoder_norm, *ends.final_norms]
        return tuple({id(norm): norm for norm in named if norm is not None}.values())

    def path_of(self, module: Any, what: str) -> str:
        """The path of a module in the model."""
        for name, other in self.model.named_modules(remove_duplicate=False):
            if other is module:
                return str(name)
        got = "nothing" if module is None else f"a {type(module).__name__}"
        raise InputError(f"{what}: the mapping names {got}; expected a module of {type(self.model).__name__}")


def attach(model: nn.Module, mapping: Mapping | None = None, arguments: Dictionary[str, Any] | None = None) -> Attached:
    """Resolve every module that a mapping names, once.

    Args:
        model: a supported Hugging Face model, one with `signalprop_mapping()`, or any with `mapping`; wrappers (see
            `live_model.unwrapped`) are taken off. Of any other the stream is found by `signalprop.streams`.
        arguments: keyword arguments of its forward, to find the stream with; default: random ones.
    """
    outer, model = model, unwrapped(model)
    mapping = mapping_for(model, mapping, arguments)
    table = layout(mapping.architecture)
    items = list(mapping.sublayers)
    if len(items) != len(table.kind):
        raise InputError(
            f"the mapping has {len(items)} sublayers, its architecture {len(table.kind)}; give one each, in order"
        )
    rows = tuple(_row(model, table, i, item) for i, item in enumerate(items))
    return Attached(outer, model, mapping, table, rows, _ends(model, mapping), arguments)


def require_roles(attached: Attached) -> Attached:
    """The same, where it is known what the weights are; of a mapping that was found, this is proved now."""
    if not attached.mapping.stream_only:
        return attached
    mapping = mapping_with_roles(attached.model, attached.arguments)
    return attach(attached.outer, mapping, attached.arguments)


def reading_batches(attached: Attached) -> Attached:
    """The same, able to read a Batch: of a mapping that was found, which argument holds the ids is proved now.

    So is how many words there are, where no configuration says it.
    """
    mapping = attached.mapping
    if mapping.arguments is not None and not (mapping.stream_only and mapping.architecture.vocab_size == UNKNOWN):
        return attached
    try:
        return require_roles(attached)
    except InputError as error:
        if mapping.arguments is not None:
            return attached
        raise InputError(f"the model cannot read a Batch (measure also takes the model's arguments): {error}") from None


def with_known_weights(attached: Attached) -> Attached:
    """The same; of branches that end in no one weight (experts) with the weights that are proved, for `fold`."""
    known = not attached.mapping.stream_only
    if known or all(getattr(row.carrier(), "weight", None) is not None for row in attached.rows):
        return attached
    try:
        roles = roles_of(attached.model, attached.arguments)
    except InputError:  # no numbers, or half precision: fold says what it lacks
        return attached
    return attach(attached.outer, with_proved_weights(attached.mapping, roles), attached.arguments)


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


def _row(model: nn.Module, table: Layout, i: int, item: SublayerMap) -> AttachedRow:
    label = describe(table, i)
    modules: dict[str, Any] = {name: _module(model, getattr(item, name), label) for name in _MODULES}
    unknown = set(item.weights) - set(ROLES)
    if unknown:
        raise InputError(f"{label}: unknown weight roles {sorted(unknown)}; expected {', '.join(ROLES)}")

    return AttachedRow(
        label=label,
        kind=kind_of(table, i),
        stack=STACKS[table.stack[i]],
        layer=int(table.layer[i]),
        placement=PLACEMENTS[table.placement[i]],
        parallel=bool(table.parallel[i]),
        item=item,
        branch=find(model, item.branch, label),
        **modules,
        activation=_held_or_none(model, item.activation, label),
        weights={role: _held(model, reference, f"{label} {role}", role) for role, reference in item.weights.items()},
        own_carrier=None if item.carrier is None else find_any(model, item.carrier, label),
        dropout=_dropout(model, item, label),
        scaling=None if item.scaling is None else _attribute(model, item.scaling, label),
    )


_MODULES = ("reads", "writes", "stream_out", "norm", "post_norm", "query_norm", "key_norm")


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


def _ends(model: nn.Module, mapping: Mapping) -> AttachedEnds:
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

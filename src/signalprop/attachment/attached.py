"""A model with its mapping resolved, once: rows that hold modules, for all that measures, changes or checks a model."""

from __future__ import annotations

from collections.abc import Mapping as Dictionary
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from signalprop.attachment.families import mapping_for
from signalprop.attachment.found import UNKNOWN
from signalprop.attachment.found_roles import mapping_with_roles, roles_of, with_proved_weights
from signalprop.attachment.mapping import Mapping, find
from signalprop.attachment.probe_points import Plan, plan_of
from signalprop.attachment.rows import AttachedEnds, AttachedRow, ends_of, row_of
from signalprop.errors import InputError
from signalprop.network.layout import Layout, layout
from signalprop.streams.wrappers import unwrapped


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
        return plan_of(self.model, self.layout, self.rows, self.ends)

    @cached_property
    def proved(self) -> Attached | InputError:
        """The same, where it is known what the weights are: of a mapping that was found by a proof, or why there is
        none."""
        if not self.mapping.stream_only:
            return self
        try:
            mapping = mapping_with_roles(self.model, self.arguments, self.mapping.anatomy)
        except InputError as error:
            return error
        return attach(self.outer, mapping, self.arguments)

    @property
    def as_known(self) -> Attached:
        """The same with what its weights are, where that is proved."""
        return self if isinstance(self.proved, InputError) else self.proved

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
            `wrappers.unwrapped`) are taken off. Of any other the stream is found by `signalprop.streams`.
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
    scale = mapping.architecture.score_scale
    rows = tuple(row_of(model, table, i, item, scale) for i, item in enumerate(items))
    return Attached(outer, model, mapping, table, rows, ends_of(model, mapping), arguments)


def require_roles(attached: Attached) -> Attached:
    """The same, where it is known what the weights are; of a mapping that was found, this is proved now."""
    known = attached.proved
    if isinstance(known, InputError):
        raise known
    return known


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
    if known or all(getattr(row.ending, "weight", None) is not None for row in attached.rows):
        return attached
    try:
        roles = roles_of(attached.model, attached.arguments, attached.mapping.anatomy)
    except InputError:  # no numbers, or half precision: fold says what it lacks
        return attached
    return attach(attached.outer, with_proved_weights(attached.mapping, roles), attached.arguments)

"""A model, understood once: rows that hold modules, for all that measures, changes or checks a model; its streams."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from signalprop.attachment.families import checked, mapping_for
from signalprop.attachment.found import UNKNOWN
from signalprop.attachment.found_roles import mapping_with_roles, roles_of, with_proved_weights, without_replay
from signalprop.attachment.mapping import Mapping, find
from signalprop.attachment.probe_points import Plan, plan_of
from signalprop.attachment.rows import AttachedEnds, AttachedRow, ends_of, row_of
from signalprop.attachment.twin import mapping_by_twin
from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.network.layout import Layout, layout
from signalprop.network.shown import Shown
from signalprop.streams.calls import remember
from signalprop.streams.found import streams_of
from signalprop.streams.parts import Stack
from signalprop.streams.proof import Norm
from signalprop.streams.streams import Streams
from signalprop.streams.wrappers import unwrapped


@typed
@dataclass(frozen=True, repr=False, eq=False)
class Anatomy(Shown):
    """A model with its parts, as `anatomy` gives it.

    `measure`, `predict`, `compare`, `check`, `diagnose`, `apply`, `initialize`, `fold`, `save`, `parameter_groups`,
    `fit`, `read_parametrization`, `Probe` and `SignalMonitor` take it in place of the model, and then skip the search
    for its parts. An Anatomy belongs to the model's current modules: make a new one after you replace some. It notices
    when a scheme is applied or folded.

    Attributes:
        outer: the given model. model: without its wrappers. arguments: what it is called with, by name, if given.
        described: the mapping, if it was given or proved; otherwise it is found when first needed.
        scheme: the record of the scheme that the model carries. changed: the rows in that scheme's units.
        by_hand: the mapping that the user gave; it is used again after a scheme is applied or folded.
    """

    outer: nn.Module
    model: nn.Module
    arguments: dict[str, Any] | None = None
    described: Mapping | None = None
    scheme: Any = None
    changed: tuple[AttachedRow, ...] | None = None
    by_hand: Mapping | None = None

    @cached_property
    def streams(self) -> Streams:
        """The residual stream, found from the model's additions in small forward passes."""
        known = None if self.described is None else self.described.found
        return streams_of(self.model, self.arguments) if known is None else known

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The stacks of the streams, the largest first."""
        return self.streams.stacks

    @property
    def norms(self) -> tuple[Norm, ...]:
        """What the norms of stream and branches compute."""
        return self.streams.norms

    @property
    def proved(self) -> bool:
        """Whether every layer of every stack was understood and every sum proved."""
        return self.streams.proved

    @property
    def error(self) -> float | None:
        """The largest error among the sums that were checked."""
        return self.streams.error

    def to_json(self) -> dict[str, Any]:
        """The streams as a JSON value."""
        return self.streams.to_json()

    def __str__(self) -> str:
        return str(self.streams)

    def __repr__(self) -> str:
        return f"<Anatomy of {type(self.model).__name__}>"

    def _rows(self) -> list[dict[str, Any]]:
        return self.streams.rows()

    @cached_property
    def mapping(self) -> Mapping:
        """Where the signal runs, as module names: from the user, the model, its family, or the search."""
        return mapping_for(self.model, self.described, lambda: self.streams)

    @cached_property
    def layout(self) -> Layout:
        """The table of sublayers of the mapping's architecture."""
        return layout(self.mapping.architecture)

    @cached_property
    def rows(self) -> tuple[AttachedRow, ...]:
        """One per sublayer, with its modules."""
        if self.changed is not None:
            return self.changed
        items, n = self.mapping.sublayers, len(self.layout.kind)
        if len(items) != n:
            raise InputError(f"the mapping has {len(items)} sublayers, its architecture {n}; give one each, in order")
        scale = self.mapping.architecture.score_scale
        return tuple(row_of(self.model, self.layout, i, item, scale) for i, item in enumerate(items))

    @cached_property
    def ends(self) -> AttachedEnds:
        """Embedding and head."""
        return ends_of(self.model, self.mapping)

    @cached_property
    def plan(self) -> Plan:
        """Where the probe points are, each tensor once."""
        return plan_of(self.model, self.layout, self.rows, self.ends)

    @cached_property
    def with_roles(self) -> Anatomy | InputError:
        """The same with the roles of its weights, from a proof, or with the reason why there is none.

        If the model itself cannot be replayed, its twin is.
        """
        if not self.mapping.stream_only:
            return self
        found, by_twin = self.mapping.found, None
        try:
            if found is not None and without_replay(self.model, found):
                by_twin = mapping_by_twin(self.model, self.mapping)
            return self.by(by_twin or mapping_with_roles(self.model, self.arguments, found))
        except InputError as error:
            return error

    @property
    def as_known(self) -> Anatomy:
        """The same with the roles of its weights, if they are proved."""
        return self if isinstance(self.with_roles, InputError) else self.with_roles

    def by(self, mapping: Mapping) -> Anatomy:
        """The same model with another mapping."""
        found = replace(self, described=mapping, changed=None)
        _ = found.rows, found.ends
        return found

    def but(self, **changes: Any) -> Anatomy:
        """A copy with some fields changed; its modules are not looked up again."""
        found = replace(self, **{"described": self.mapping, "changed": self.rows, **changes})
        vars(found)["ends"] = self.ends
        return found

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
    def norm_modules(self) -> tuple[nn.Module, ...]:
        """The norms on the stream, on branches, queries and keys, each once."""
        rows, ends = self.rows, self.ends
        named = [norm for row in rows for norm in (row.norm, row.post_norm, row.query_norm, row.key_norm)]
        named += [ends.norm, ends.decoder_norm, *ends.final_norms]
        return tuple({id(norm): norm for norm in named if norm is not None}.values())

    def path_of(self, module: Any, what: str) -> str:
        """The path of a module in the model.

        Raises:
            InputError: the module is not part of the model; the message begins with `what`.
        """
        for name, other in self.model.named_modules(remove_duplicate=False):
            if other is module:
                return str(name)
        got = "nothing" if module is None else f"a {type(module).__name__}"
        raise InputError(f"{what}: the mapping names {got}; expected a module of {type(self.model).__name__}")


@typed
def anatomy(model: nn.Module, inputs: Any = None) -> Anatomy:
    """Find the residual stream of any model by following the additions of one small forward pass, and prove it.

    It runs two forward passes in evaluation mode without gradients: the first follows every tensor operation, in the
    second plain hooks check whether stream_out = skip * stream_in + multiplier * branch, in float64. The model's mode
    and random states are restored. On the meta device there is one pass, and nothing is proved.

    Args:
        model: any module in which additions carry a stream through layers, which are the members of a ModuleList, of a
            Sequential, or siblings whose names end in numbers.
        inputs: what the model is called with; its first sequence is used: a tensor, a tuple, a dictionary of arguments,
            or a function that calls it; default: what it was called with last, else a few random tokens, an image or
            frames of random numbers, by what the model reads.

    Raises:
        InputError: the model does not run on them, or no residual stream was found.
    """
    inner = unwrapped(model)
    found = Anatomy(model, inner, remember(inner, inputs))
    _ = found.streams
    return found


def attach(model: nn.Module | Anatomy, mapping: Mapping | None = None, inputs: Any = None) -> Anatomy:
    """A model with its rows and ends, each module looked up once; an Anatomy is taken as it is.

    Args:
        model: a supported Hugging Face model, one with `signalprop_mapping()`, or any with `mapping`; wrappers (see
            `wrappers.unwrapped`) are taken off. Of any other the stream is found by `signalprop.streams`.
        inputs: what it is called with, as `measure` takes it, to find the stream with; default: random ones.
    """
    by_hand = mapping
    if isinstance(model, Anatomy):
        if mapping is None and model.scheme is getattr(model.model, "signalprop_record", None):
            arguments = remember(model.model, inputs)
            return model if arguments is None else model.but(arguments=arguments)
        by_hand, model = by_hand or model.by_hand, model.outer
    inner = unwrapped(model)
    arguments = remember(inner, inputs)
    carried = getattr(inner, "signalprop_anatomy", None)
    if mapping is None and carried is not None:
        found: Anatomy = carried().but(outer=model, arguments=arguments, by_hand=by_hand)
        return found
    given = None if by_hand is None else checked(inner, by_hand)
    found = Anatomy(model, inner, arguments, given, getattr(inner, "signalprop_record", None), by_hand=given)
    _ = found.rows, found.ends
    return found


def bare(model: nn.Module | Anatomy) -> nn.Module:
    """The model without its wrappers."""
    return model.model if isinstance(model, Anatomy) else unwrapped(model)


def require_roles(attached: Anatomy) -> Anatomy:
    """The same, where it is known what the weights are; of a mapping that was found, this is proved now."""
    known = attached.with_roles
    if isinstance(known, InputError):
        raise known
    return known


def reading_batches(attached: Anatomy) -> Anatomy:
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
        raise InputError(f"what the model reads is not known: {error}") from None


def with_known_weights(attached: Anatomy) -> Anatomy:
    """The same; of branches that end in no one weight (experts) with the weights that are proved, for `fold`."""
    known = not attached.mapping.stream_only
    if known or all(getattr(row.ending, "weight", None) is not None for row in attached.rows):
        return attached
    try:
        roles = roles_of(attached.model, attached.arguments, attached.mapping.found)
    except InputError:  # no numbers, or half precision: fold says what it lacks
        return attached
    return attached.by(with_proved_weights(attached.mapping, roles))

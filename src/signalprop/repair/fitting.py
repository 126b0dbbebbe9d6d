"""`fit`: the same function with activations that float16 holds. docs/theory/gauge.md has the rules.

The stream is divided by one power of two, values and gated activations by one per layer, in weights, biases and gains.
All is planned before anything is changed, so that a model that cannot be fitted stays as it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping as Dictionary
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.attachment.anatomy import Anatomy, attach, require_roles
from signalprop.attachment.mapping import Mapping
from signalprop.attachment.rows import AttachedEnds, AttachedRow, Held
from signalprop.data.batches import Batch, default_batch, shortened
from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.measurement.measuring import arguments_of
from signalprop.network.kinds import ROLE
from signalprop.repair.epsilons import Epsilon
from signalprop.repair.initialisation import require_whole
from signalprop.repair.largest_activations import Place, inner_maps, largest, places_of, reads_bare
from signalprop.repair.record import record_of
from signalprop.repair.tiny_pass import norm_before
from signalprop.repair.undoing import all_or_nothing
from signalprop.repair.weight_changes import Factors

LARGEST = 65504.0  # number of float16
_SAME, _SAME_IN_HALF = 1e-3, 0.1  # relative differences of outputs that rounding may make


@dataclass(frozen=True)
class Activation:
    """The largest |activation| at a place, before and after."""

    where: str
    what: str
    before: float
    after: float


@dataclass(frozen=True)
class Fit:
    """What `fit` did.

    Attributes:
        margin: powers of two that were to stay free below 65504.
        stream: what the residual stream was divided by. inner: likewise what is inside of a branch, by its label.
        held: why no weight can divide the stream of this model, so that only what is inside of branches was moved; "".
        epsilon: what became of the norms' epsilon, in words. matched: whether that keeps the function exactly;
            otherwise outputs differ by 1e-3 of the largest at most (0.1 in half precision).
        activations: one per place.
    """

    margin: int
    stream: float
    inner: dict[str, float]
    epsilon: str
    held: str
    matched: bool
    activations: tuple[Activation, ...]

    def __repr__(self) -> str:
        inner = f", {len(self.inner)} branches inside" if self.inner else ""
        places = f"{len(self.over)} of {len(self.activations)} places beyond {LARGEST:g}"
        return f"<Fit: stream divided by {self.stream:g}{inner}; {places}>"

    @property
    def changed(self) -> bool:
        """Whether anything was multiplied; otherwise the model fitted, or nothing that could be moved was too large."""
        return self.stream != 1 or bool(self.inner)

    @property
    def over(self) -> tuple[Activation, ...]:
        """Where activations are still beyond 65504."""
        return tuple(one for one in self.activations if one.after > LARGEST)

    @property
    def within(self) -> bool:
        """Whether every activation fits with the margin."""
        return all(one.after <= LARGEST / 2**self.margin for one in self.activations)

    def to_json(self) -> dict[str, Any]:
        """As plain numbers and lists."""
        return {**asdict(self), "over": [asdict(one) for one in self.over], "within": self.within}


@typed
def fit(
    model: nn.Module | Anatomy,
    inputs: Any = None,
    *,
    margin: int = 2,
    mapping: Mapping | None = None,
) -> Fit:
    """Rescale a model in place so that its activations fit float16: the same function, in other units.

    The residual stream is divided by one power of two (in embeddings, in what writes to the stream, and in the second
    norms of a sandwich), the epsilon of the norms by its square; the norm before a tied head compensates it.
    Values and outputs, up and down of a gated or ReLU feed-forward, get a power of two per layer. What no weight can
    move (queries, keys, gates, outputs of norms, logits, what a curved activation makes) is measured and reported, and
    so is the stream where norms reset it (post-norm), or its input is computed. Maps that read the stream without a
    norm (norms on branches alone, ModernBERT's first layer) are multiplied instead.

    Args:
        model: in a type that holds its activations (float32).
        inputs: what it is called with, as `measure` takes it, or a Batch; the factors hold for activations as large as
            on these.
        margin: powers of two that are to stay free above the largest.
        mapping: where the signal runs, of a model of no known family.

    Raises:
        InputError: weights that are quantised, sharded, not known or shared between sublayers; outputs that would be
            others. The model is then as it was.
    """
    if not 0 <= margin <= 8:
        raise InputError(f"margin is {margin}; expected powers of two from 0 to 8")
    attached = require_roles(attach(model, mapping, inputs))
    model = attached.model
    if record_of(model) is not None:
        raise InputError("the model carries a scheme; signalprop.fold(model) first")
    require_whole(model, "fit")
    held = _held_stream(attached)
    batch = inputs if isinstance(inputs, Batch) else attached.arguments
    arguments = arguments_of(attached, batch or default_batch(shortened(attached.mapping.architecture)))
    epsilon = Epsilon.of(attached)
    movable, ends = not epsilon.problem, attached.ends
    unnormed = ends.norm is None and ends.decoder_norm is None and not attached.mapping.embedding.normed
    tied = _norm_of_tied_head(attached, arguments) if movable or unnormed else None  # of tables that are divided
    places = [replace(one, stream=one.stream and not held) for one in places_of(attached, along=movable, tied=tied)]
    before, output = largest(attached, places, arguments)
    stream, inner = _factors(places, before, LARGEST / 2**margin)
    factors = Factors(attached, "{} cannot be rescaled: {}", "fit", every_holder=False)
    for i, row in enumerate(attached.rows if stream != 1 or inner else ()):
        _scale_row(factors, row, stream, inner.get(i, 1.0), along=movable)
    if stream != 1:
        _scale_ends(factors, ends, stream, along=movable)
        if tied is not None:
            factors.scale(Held(tied), stream, stream, "the norm before the head")
    changes, after = factors.changes(), before
    if changes:
        with torch.no_grad(), all_or_nothing(attached.model, [change.tensor for change in changes]):
            for change in changes:
                change.tensor.copy_(change.value())
            epsilon.divide(stream**2)
            after, now = largest(attached, places, arguments)
            _require_same(output, now, "" if epsilon.exact else epsilon.in_words(stream))
    return Fit(
        margin=margin,
        stream=stream,
        inner={attached.rows[i].label: factor for i, factor in inner.items()},
        epsilon=epsilon.in_words(stream),
        held=held,
        matched=stream == 1 or epsilon.exact,
        activations=tuple(
            Activation(place.where, place.what, *numbers) for place, *numbers in zip(places, before, after, strict=True)
        ),
    )


def _held_stream(attached: Anatomy) -> str:
    """Why no weight can divide the stream; "" where weights can."""
    for row in attached.rows:
        if row.placement == "post":
            return (
                f"{row.label} is post-norm: its norm resets the stream's scale, so a factor before it changes nothing"
            )
    ends = attached.ends
    if ends.final_norm is None:
        return "no norm follows the last layer, so the readers of the stream there would see the factor"
    if ends.convolutions:
        return "convolutions with an activation make the stream's input; no weight can divide it exactly"
    if any(isinstance(one, float) for one in (ends.position, ends.decoder_position, ends.segment)):
        return "the model computes its positions and adds them to the stream; no weight can divide them"
    return ""


def _norm_of_tied_head(attached: Anatomy, arguments: Dictionary[str, Any]) -> nn.Module | None:
    """The norm whose output a head reads that shares its weight with the embedding; else None."""
    ends = attached.ends
    own: Any = getattr(attached.model, "get_output_embeddings", lambda: None)()
    head = own if ends.head is None else ends.head.holder
    if not any(getattr(head, "weight", head) is table.weight for table in ends.tables):
        return None
    found = norm_before(attached, head, arguments) if isinstance(head, nn.Module) else None
    return ends.final_norm if found is None else found


def _require_same(before: Tensor, after: Tensor, epsilon: str) -> None:
    """Refuse an output that has become another than rounding explains; `epsilon`: why, where one stays, or ""."""
    apart = float((after - before).abs().max() / before.abs().max().clamp_min(1e-30))
    if apart > (_SAME if before.dtype in (torch.float32, torch.float64) else _SAME_IN_HALF):
        why = f"the epsilon of the norms, {epsilon}; a smaller margin divides by less"
        why = why if epsilon else "something reads the stream or the embedding that the mapping does not name"
        raise InputError(f"fitted, the outputs would differ by {apart:.1e} of the largest: {why}; nothing was changed")


def _factors(places: Sequence[Place], values: Sequence[float], limit: float) -> tuple[float, dict[int, float]]:
    """The stream's factor, and that of every sublayer that needs one: the smallest powers of two that fit."""
    stream = 1.0
    inner: dict[int, float] = {}
    for place, value in zip(places, values, strict=True):
        needed = 2.0 ** max(0, math.ceil(math.log2(value / limit))) if value > 0 else 1.0
        if place.stream:
            stream = max(stream, needed)
        if place.inner is not None and needed > inner.get(place.inner, 1.0):
            inner[place.inner] = needed
    return stream, inner


def _scale_row(factors: Factors, row: AttachedRow, stream: float, inner: float, *, along: bool) -> None:
    """Divide what a branch adds by the stream's factor, and what is inside by its factor."""
    down = 1 / stream if along or row.placement in ("pre", "none") else 1.0
    for first, _ in inner_maps(row):
        factors.scale(first, 1 / inner, 1 / inner, row.label)
    last = [held for role, held in row.weights.items() if ROLE[role].writes]
    if not last:
        raise InputError(f"{row.label}: the mapping names no map that ends the branch; fit needs it")
    for held in last:
        factors.scale(held, inner * down, down, row.label)
    if stream != 1 and row.placement in ("sandwich", "res-post"):
        norm = row.post_norm if row.placement == "sandwich" else row.norm
        factors.scale(Held(norm), 1 / stream, 1 / stream, row.label)
    up = stream if reads_bare(row) else 1.0
    reading = ["query"] if row.kind.reads_memory else [role for role in row.weights if ROLE[role].reads]
    for role in reading if up != 1 else ():
        factors.scale(row.weights[role], up, 1.0, row.label)
    if along:
        for role, norm in (("query", row.query_norm), ("key", row.key_norm)):
            if norm is not None:
                factors.scale(row.weights[role], 1 / stream, 1 / stream, row.label)


def _scale_ends(factors: Factors, ends: AttachedEnds, stream: float, *, along: bool) -> None:
    """Divide what enters the stream by its factor."""
    down = 1 / stream
    norms = {id(norm): norm for norm in (ends.norm, ends.decoder_norm) if norm is not None}
    for norm in norms.values():
        factors.scale(Held(norm), down, down, "the embedding norm")
    if not norms or along:
        for held in {id(held.holder): held for held in (*ends.tables, *ends.class_tokens)}.values():
            factors.scale(held, down, down, "the embedding")

"""`apply`: make a model that exists compute what a scheme asks for, in place, without touching its forward code."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping as Dictionary
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from signalprop.attachment.anatomy import Anatomy, attach, bare, require_roles, with_known_weights
from signalprop.attachment.arguments import statistics_in
from signalprop.attachment.mapping import Mapping
from signalprop.attachment.parametrization_of import rms, tensors_of
from signalprop.data.batches import Batch
from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.measurement.measuring import measure
from signalprop.network.parametrization import Embedding, Parametrization
from signalprop.repair.freshness import difference_in_words, first_outputs, learnt
from signalprop.repair.initialisation import draw_table, draw_weights
from signalprop.repair.installation import install
from signalprop.repair.record import record_of
from signalprop.repair.sites import confirm
from signalprop.repair.tiny_pass import on_meta
from signalprop.repair.undoing import Saved, all_or_nothing, everything
from signalprop.schemes import Scheme
from signalprop.schemes import scheme as scheme_of
from signalprop.streams.wrappers import adapters_in


@typed
def apply(
    model: nn.Module | Anatomy,
    scheme: str | Scheme | Parametrization,
    *,
    data: Batch | Dictionary[str, Any] | None = None,
    inputs: Any = None,
    initialize: bool = True,
    redraw: bool = False,
    change_function: bool = False,
    match_eps: bool = False,
    seed: int | None = None,
    mapping: Mapping | None = None,
    **options: Any,
) -> Parametrization:
    """Give a model the weights and multipliers of a scheme, in place; its forward code stays as it is.

    Trained weights stay. Fresh weights (`signalprop.repair.freshness` recognises them) are drawn anew;
    others stay, with a UserWarning, and a scheme that would change their function is refused.

    Skip and branch multipliers become numbers on the last map of each branch (docs/theory/gauge.md): exact up to the
    epsilon of norms, neutral to every optimizer, no new state-dict keys except trainable multipliers and added norms.
    `fold` multiplies them into the weights again. On the meta device the multipliers are installed and
    `signalprop.initialize(model)` draws the weights after `to_empty`.

    Args:
        model: a supported Hugging Face model, one with `signalprop_mapping()`, or any with `mapping`.
        scheme: a name, a Scheme, or a Parametrization. options: of a scheme given by name.
        data: a batch (or the model's arguments) for schemes that profile the model (ADMIN); a `Batch` also gives the
            statistics of the input. inputs: what the model is called with, as `measure` takes it; or InputStatistics
            (default: those of its tokens or of the batch, else Zipf's law).
        initialize: draw the weights anew, if they are fresh; the model's trainable multipliers (LayerScale,
            ReZero) become 1. False keeps them and only installs multipliers: those of a scheme times the model's. A
            Parametrization says all numbers, the model's multipliers included.
        redraw: draw the weights anew even if they are trained.
        change_function: install the multipliers even if the trained weights then compute something else.
        match_eps: rescale the epsilons of norms with the stream, in memory, which makes the gauge exact; a folded
            checkpoint cannot keep that, since a config has one epsilon.
        seed: of the draws; the same seed gives the weights of `build(parametrization, seed=seed)`.

    Returns:
        The Parametrization that the model now has.

    If an error or an interrupt ends it midway, the model is restored bit by bit: weights that are overwritten are
    copied to memory meanwhile (a warning says if there is not enough).

    Raises:
        InputError: a scheme was applied before, an unknown family, a sublayer that is not what the mapping says, a
            parametrization of another shape, something that the model's forward code cannot be made to compute, or a
            scheme that changes the function of trained weights (the message says by how much).
    """
    given, model = model, bare(model)
    if (record := record_of(model)) is not None:
        raise InputError(
            f"this model already carries scheme {record.parametrization.scheme!r}; fold(model) first, or load it again"
        )
    if adapted := adapters_in(model):
        raise InputError(
            f"the model has PEFT's adapters ({adapted[0]} and {len(adapted) - 1} more), whose start no scheme "
            "sets; apply the scheme to the plain model and add the adapters afterwards, or merge_and_unload() first"
        )
    if redraw and not initialize:
        raise InputError("redraw=True draws new weights and initialize=False keeps the present ones; give one of them")
    attached = attach(given, mapping, inputs if inputs is not None else data)
    called = arguments = attached.arguments
    data = called if data is None else data
    without_numbers = on_meta(model)
    trained = "" if redraw or without_numbers else learnt(attached)
    wanted, initialize = initialize, initialize and not trained
    other = isinstance(scheme, Parametrization) and scheme.architecture != attached.mapping.architecture
    as_it_is = isinstance(scheme, Parametrization) and not (initialize or other)
    try:  # which check and predict ask for afterwards, too, when multipliers stand in the way of proving them
        attached = with_known_weights(attached) if as_it_is else require_roles(attached)
    except InputError:
        if initialize or other:
            raise
        attached = with_known_weights(attached)
    if torch.backends.mha.get_fastpath_enabled() and any(
        isinstance(module, nn.TransformerEncoderLayer) for module in model.modules()
    ):
        raise InputError(
            "call torch.backends.mha.set_fastpath_enabled(False) first: in evaluation PyTorch computes an "
            "nn.TransformerEncoderLayer from its weights, past its modules, which carry the multipliers"
        )
    architecture = attached.mapping.architecture
    if architecture is not None and architecture.streams is not None:
        raise InputError(
            "a scheme is put on one residual stream, and this model has several; build it with the scheme instead:"
            " sp.build(sp.scheme(NAME)(architecture))"
        )
    draws = initialize and not without_numbers
    own = own_trained(attached) if draws else []
    _refuse_multipliers(attached, neutral=draws)
    if not without_numbers:
        confirm(attached, arguments)
    chosen = scheme_of(scheme, **options) if isinstance(scheme, str) else scheme
    statistics = statistics_in(attached.mapping, data if isinstance(data, Batch) and inputs is None else inputs, called)
    if data is not None and hasattr(chosen, "profiled"):
        chosen = _profiled(attached, chosen, data, seed)
    table = chosen if isinstance(chosen, Parametrization) else chosen(architecture, statistics)
    if not (initialize or isinstance(chosen, Parametrization)):
        table = _with_own(attached, table)
    table = with_fixed_positions(attached, table)
    before = first_outputs(attached, arguments) if trained else ""
    with all_or_nothing(model, own):
        _to_one(own)
        record = install(attached, table, match_eps=match_eps)
        record.pending = without_numbers and initialize
        record.kept = not initialize
        if draws:
            with all_or_nothing(model, everything(model)):
                draw_weights(attached, record, seed)
                _to_one(own)  # which modules that reset themselves have set again
        if trained:
            record.function_changed = difference_in_words(attached, before, first_outputs(attached, arguments))
            if record.function_changed and not change_function:
                raise InputError(
                    f"the weights look trained ({trained}), and scheme {table.scheme!r} changes what they compute: "
                    f"{record.function_changed}; give change_function=True (--change-function) to accept that, or "
                    "redraw=True (--redraw) to draw new weights"
                )
    if wanted and trained:
        warnings.warn(
            f"the weights stay, because they look trained: {trained}; redraw=True draws new ones",
            UserWarning,
            stacklevel=3,
        )
    return table


def with_fixed_positions(attached: Anatomy, table: Parametrization) -> Parametrization:
    """The table with the root mean square of positions that the model computes or keeps, and no scheme can draw."""
    ends, mapping, e = attached.ends, attached.mapping, table.embedding
    fixed: dict[str, float] = {}
    for name, held in (("position", ends.position), ("decoder_position", ends.decoder_position)):
        if isinstance(held, float):
            fixed[name] = held
        elif held is not None:
            values, _ = tensors_of(held, "positions")
            if not values.requires_grad:  # sines and cosines, whose squares add up to 1
                fixed[name] = math.sqrt(0.5) / mapping.embedding.scale if values.is_meta else rms(values, "positions")
    if not fixed:
        return table
    if mapping.architecture.kind == "encoder-decoder":
        fixed.setdefault("decoder_position", e.position_of(decoder=True))
    return replace(table, embedding=Embedding(**e.model_dump() | fixed))


def own_trained(attached: Anatomy) -> list[Tensor]:
    """A model's multipliers that train (LayerScale, ReZero), each once."""
    found = (value for row in attached.rows for value in (row.skip, row.multiplier))
    return list({id(value): value for value in found if isinstance(value, Tensor)}.values())


def _to_one(multipliers: Sequence[Tensor]) -> None:
    """A scheme's numbers stand beside them."""
    with torch.no_grad():
        for multiplier in multipliers:
            multiplier.fill_(1.0)


def _refuse_multipliers(attached: Anatomy, *, neutral: bool) -> None:
    """Raise InputError for those that no factor makes up for; `neutral`: what trains becomes 1."""
    for row in attached.rows:
        skip, branch = row.own_multipliers
        stay = [own for own, held in ((skip, row.skip), (branch, row.multiplier))
                if not (neutral and isinstance(held, Tensor))]  # fmt: skip
        if row.norm_scale != 1 or 0 in stay:
            raise InputError(
                f"{row.label} already has multipliers that are 0 or act on a norm (skip {skip:.3g}, branch "
                f"{branch:.3g}); apply needs a model without"
            )


def _with_own(attached: Anatomy, table: Parametrization) -> Parametrization:
    """The table with a model's multipliers as factors on the scheme's, where the model stays as it is."""
    own = np.array([row.own_multipliers for row in attached.rows])
    factor = attached.mapping.architecture.head_scale
    if (own == 1).all() and factor == 1:
        return table
    head = table.head.model_copy(update={"scale": table.head.scale * factor})
    return replace(table, skip=table.skip * own[:, 0], branch=table.branch * own[:, 1], head=head)


def _profiled(attached: Anatomy, chosen: Any, data: Any, seed: int | None) -> Any:
    """A scheme with the branch variances that its profiling pass measures on the model.

    The pass runs the model as the scheme initialises it, every multiplier 1; weights are put back afterwards.
    """
    model = attached.model
    if on_meta(model):
        raise InputError(f"scheme {chosen.name!r} profiles the model, which is on the meta device; leave out data=")
    table = chosen.profiling(attached.mapping.architecture)
    if not (table.placement == attached.layout.placement).all():
        raise InputError(f"scheme {chosen.name!r} profiles a model in its norm placement; leave out data=")
    before = Saved(model, everything(model))
    try:
        draw_table(attached, table, 0 if seed is None else seed)
        model.eval()
        profile = measure(attached, data, backward=False)
    finally:
        before.restore()
    return chosen.profiled(profile)

"""The main job: predict a network, measure networks like it or a live model, and say how well the two agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np

from signalprop.data.batches import Batch, default_batch, default_statistics, shortened
from signalprop.errors import InputError, require, unknown
from signalprop.files.validation import typed
from signalprop.network.architecture import Architecture, Config, architecture_of
from signalprop.network.inputs import InputStatistics
from signalprop.network.parametrization import Parametrization
from signalprop.prediction import Fidelity, predict
from signalprop.results.comparison import Comparison
from signalprop.results.comparison import compare as agreement
from signalprop.results.cost import count_parameters
from signalprop.results.profile import Profile, average
from signalprop.results.series import SEQUENCES
from signalprop.schemes.base import parametrized

if TYPE_CHECKING:
    from torch import nn

    from signalprop.attachment.anatomy import Anatomy
    from signalprop.attachment.mapping import Mapping

# Above this many weights in one network, networks are drawn layer by layer instead of built whole (4 bytes each).
LARGE = 1_000_000_000
AS_RANDOM = "the prediction takes the weights as random, with the standard deviations that they have"
Progress = Callable[[int, int], None]


@typed
def study(
    subject: str | Architecture | Config | Parametrization | nn.Module | Anatomy,
    scheme: str | None = None,
    *,
    batches: Batch | Sequence[Batch] | None = None,
    seeds: int = 8,
    seed: int = 0,
    batch_size: int = 2,
    fidelity: Fidelity = "auto",
    backward: bool = True,
    device: str = "cpu",
    skip_first: int | None = None,
    mapping: Any = None,
    inputs: Any = None,
    loss: Callable[[Any], Any] | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Predict and measure, and say how well the two agree.

    Networks with fresh weights are built for every seed and read one batch. A live model is measured as it is, in its
    current mode, on several batches, and predicted from the sizes of its weights.

    Args:
        subject: a preset's name, an Architecture or a configuration of Hugging Face (which are initialised by
            `scheme`), a Parametrization, or a model that `measure` can read.
        scheme: name of the initialisation of a preset or an Architecture; default: that of `signalprop compare`.
        batches: what is read: a Batch, or `seeds` of them for a live model; default: the embedded text, of which a
            preset or a model reads at most 128 tokens per sequence.
        seeds: networks, or batches of a live model. seed: of the first. batch_size: sequences of a default batch.
        fidelity: of the prediction. backward: also the gradient, where the model has a loss.
        device: where networks with fresh weights run; a live model runs where it is. skip_first: as in `measure`.
        mapping: a Mapping of a live model that no family knows. inputs, loss: of a live model, as `measure` takes them,
            in place of batches.
        progress: called with the measurements that are done, and all of them.

    Returns:
        A Comparison of the prediction with the mean of the measurements and its standard errors.

    Raises:
        InputError: an unknown preset or scheme, no seed, fidelity `simulate`, or as `predict` and `measure`.
        MissingExtra: PyTorch is not installed.
    """
    if isinstance(seeds, bool) or not isinstance(seeds, int) or seeds < 1:
        raise InputError(f"seeds is {seeds!r:.40}; expected a whole number from 1 on")
    if fidelity == "simulate":
        raise InputError("a study measures networks already; choose fidelity auto, moments or kernel")
    require("torch", "models")
    draw: Callable[[int], Profile]
    if isinstance(subject, (str, Config)):
        subject = architecture_of(subject)
        subject = shortened(subject) if batches is None else subject
    if isinstance(subject, (Architecture, Parametrization)):
        if inputs is not None or loss is not None:
            raise InputError("inputs= and loss= are of a live model; give batches= to networks that are built")
        table = parametrized(subject, scheme)
        batch = _one(batches) or default_batch(table.architecture, batch_size=batch_size, seed=seed)
        backward, notes = with_gradient(table.architecture, backward)
        draw = partial(_fresh, table, batch, seed=seed, backward=backward, device=device, skip_first=skip_first)
        statistics = batch.statistics(table.architecture)
        measured = _measured(draw, seeds, progress)
    else:
        table, statistics, measured, notes = _live(
            subject, batches, seeds, seed, batch_size, backward, progress, skip_first, mapping, inputs, loss
        )
        backward = measured.gradient is not None
    predicted = predict(table, statistics, fidelity=fidelity, backward=backward)
    return agreement(replace(predicted, notes=(*predicted.notes, *notes)), measured)


@typed
def compare(
    predicted: str | Architecture | Config | Parametrization | nn.Module | Anatomy | Profile,
    measured: Any = None,
    **options: Any,
) -> Comparison:
    """Agreement of a prediction with a measurement; `compare("gpt2")` makes both.

    Args:
        predicted: a Profile; or whatever `study` predicts and measures: a preset, an Architecture or configuration, a
            Parametrization, a model.
        measured: the other Profile, of the same sublayers, if `predicted` is one; else what the model is called with
            (`inputs` of `study`).
        options: of `study` (scheme, batches, seeds, ...).

    Raises:
        InputError: one Profile alone, profiles of different sublayers, sweeps, or as `study`.
    """
    if not isinstance(predicted, Profile):
        if isinstance(measured, Profile):
            raise InputError("compare was given a network and a Profile; predict the network first, or leave it out")
        if measured is not None:
            options["inputs"] = measured
        known = [name for name, item in signature(study).parameters.items() if item.kind is item.KEYWORD_ONLY]
        if other := next((name for name in options if name not in ("scheme", *known)), None):
            raise unknown("option", other, ["scheme", *known])
        return study(predicted, **options)
    if not isinstance(measured, Profile) or options:
        raise InputError("compare takes two profiles without options; to measure a network, give its preset or model")
    return agreement(predicted, measured)


def _one(batches: Batch | Sequence[Batch] | None) -> Batch | None:
    if batches is None or isinstance(batches, Batch):
        return batches
    if len(batches) != 1:
        raise InputError(f"{len(batches)} batches given; expected one, which all fresh networks read")
    return batches[0]


def _live(
    model: nn.Module | Anatomy,
    batches: Batch | Sequence[Batch] | None,
    seeds: int,
    seed: int,
    batch_size: int,
    backward: bool,
    progress: Progress | None,
    skip_first: int | None,
    mapping: Mapping | None,
    inputs: Any,
    loss: Callable[[Any], Any] | None,
) -> tuple[Parametrization, InputStatistics, Profile, tuple[str, ...]]:
    """(table of its weights, statistics of all batches, mean profile, notes) of a live model."""
    from signalprop.attachment.anatomy import attach, require_roles
    from signalprop.attachment.parametrization_of import not_alike, parametrization_of
    from signalprop.measurement import measure
    from signalprop.streams.live_model import in_its_mode

    given = [batches] if isinstance(batches, Batch) else batches
    if given is not None and inputs is not None:
        raise InputError("batches and inputs= are both what the model reads; give one of them")
    attached = require_roles(attach(model, mapping, inputs))
    a = attached.mapping.architecture
    if attached.arguments is not None:
        return _called(attached, inputs, attached.arguments, backward, skip_first, loss)
    given = [inputs] if isinstance(inputs, Batch) else given
    if given is None:
        given = [default_batch(shortened(a), batch_size=batch_size, seed=seed + k) for k in range(seeds)]
    a = in_its_mode(fitted(a, given[0]), attached.model)
    backward, notes = with_gradient(a, backward)

    def draw(k: int) -> Profile:
        return measure(
            attached, given[k], backward=backward, loss=loss, scheme="as is", architecture=a, skip_first=skip_first
        )  # fmt: skip

    measured = _measured(draw, len(given), progress)
    read = {SEQUENCES: len(given) * measured.statistics[SEQUENCES], "networks": 1}
    measured = replace(measured, statistics={**measured.statistics, **read})
    notes = (AS_RANDOM, *notes, not_alike(attached))
    return parametrization_of(attached, a), pooled(given).statistics(a), measured, tuple(filter(None, notes))


def _called(
    attached: Anatomy,
    inputs: Any,
    arguments: dict[str, Any],
    backward: bool,
    skip_first: int | None,
    loss: Callable[[Any], Any] | None,
) -> tuple[Parametrization, InputStatistics, Profile, tuple[str, ...]]:
    """As `_live`, of a model that is called as its user calls it, once."""
    from signalprop.attachment.arguments import batch_in
    from signalprop.attachment.parametrization_of import not_alike, parametrization_of
    from signalprop.measurement import measure
    from signalprop.streams.live_model import in_its_mode

    a = attached.mapping.architecture
    batch = batch_in(attached.mapping, arguments)
    a = in_its_mode(a if batch is None else fitted(a, batch), attached.model)
    measured = measure(
        attached, inputs, backward=backward, loss=loss, scheme="as is", architecture=a, skip_first=skip_first
    )  # fmt: skip
    measured = replace(measured, statistics={**measured.statistics, "networks": 1})
    statistics = default_statistics(a) if batch is None else batch.statistics(a)
    notes = (AS_RANDOM, not_alike(attached))
    return parametrization_of(attached, a), statistics, measured, tuple(filter(None, notes))


def fitted(architecture: Architecture, batch: Batch) -> Architecture:
    """The architecture for sequences as long as a batch's."""
    lengths: dict[str, int] = {}
    if batch.tokens is not None:
        lengths["seq_len"] = batch.tokens.shape[-1]
    if batch.decoder_tokens is not None:
        lengths["target_len"] = batch.decoder_tokens.shape[-1]
    return architecture.replace(**lengths)


def _fresh(
    p: Parametrization, batch: Batch, k: int, *, seed: int, backward: bool, device: str, skip_first: int | None
) -> Profile:
    """The k-th network with fresh weights, measured."""
    import torch

    from signalprop.measurement import measure
    from signalprop.measurement.simulation import simulate
    from signalprop.models import build

    if count_parameters(p.architecture)["total"] > LARGE:
        return simulate(p, batch=batch, n_seeds=1, seed=seed + k, backward=backward, device=device)
    model = build(p, seed=seed + k).to(device)
    torch.manual_seed((seed + k) % 2**63)  # of the dropout masks
    return measure(model, batch, backward=backward, scheme=p.scheme, skip_first=skip_first)


def _measured(draw: Callable[[int], Profile], n: int, progress: Progress | None) -> Profile:
    profiles = []
    for k in range(n):
        profiles.append(draw(k))
        if progress is not None:
            progress(k + 1, n)
    return average(profiles)


def with_gradient(architecture: Architecture, wanted: bool) -> tuple[bool, tuple[str, ...]]:
    """Whether to take the backward pass, and a note where a model without a head has no loss to start it from."""
    if wanted and architecture.head == "none":
        return False, ("the model has no head, so there is no loss: forward pass only",)
    return wanted, ()


def pooled(batches: Sequence[Batch]) -> Batch:
    """Several batches of one shape as a single one."""

    def joined(name: str) -> Any:
        parts = [getattr(batch, name) for batch in batches]
        return None if parts[0] is None else np.concatenate(parts)

    names = [item.name for item in fields(Batch) if item.name != "source"]
    return replace(batches[0], **{name: joined(name) for name in names})

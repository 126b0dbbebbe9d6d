"""`diagnose`: all sections of a diagnosis, one after the other, on one model and one text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Mapping as Dictionary
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from signalprop.attachment.anatomy import Anatomy, attach, reading_batches
from signalprop.attachment.arguments import BatchArguments, batch_in, read_by
from signalprop.attachment.found import UNKNOWN
from signalprop.attachment.mapping import Mapping
from signalprop.data.batches import Batch, beyond_positions, default_batch, shortened
from signalprop.diagnosis.casts import Of, casts
from signalprop.diagnosis.ends import bad_tensors, ends_of
from signalprop.diagnosis.fresh import fresh_of
from signalprop.diagnosis.identity import identity
from signalprop.diagnosis.layers import first_sequences, has_modules
from signalprop.diagnosis.loss_scale import GradientExponents
from signalprop.diagnosis.not_finite import layer_paths, why_not_finite
from signalprop.diagnosis.number_formats import FORMATS
from signalprop.diagnosis.parts import epsilons_of, parts_of
from signalprop.diagnosis.removal import lists_of, removal
from signalprop.diagnosis.result import Data, Diagnosis, Estimate, number
from signalprop.diagnosis.signal import observe
from signalprop.diagnosis.stream import loss
from signalprop.diagnosis.trials import try_all
from signalprop.diagnosis.weights import live_weights
from signalprop.diagnosis.wired_models import concluded, not_understood, of_stream, wired_here
from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.measurement.measuring import arguments_of
from signalprop.network.architecture import Architecture
from signalprop.repair.freshness import learnt
from signalprop.repair.record import record_of
from signalprop.results.findings import Finding
from signalprop.streams.live_model import evaluating, weights_here, without_gradient

Stage = Callable[[str, int, int], None]
_TRIAL_TOKENS = 64  # of a sequence that all trials read
_TRIAL_ASKED = 48  # of them that are asked for, at the least: encoders are asked for few, and read several sequences
_TRIAL_SEQUENCES, _TRIAL_TEXT = 8, 4096  # sequences, and tokens, that the promising ones read at the least
_BACKWARD_SEQUENCES = 4  # sequences of which the gradient profile is the mean


@typed
def diagnose(
    model: nn.Module | Anatomy,
    batches: Any = None,
    *,
    inputs: Any = None,
    name: str = "",
    mapping: Mapping | None = None,
    skip_first: int = 4,
    remove: bool = False,
    cast: Sequence[str] = (),
    cast_of: Sequence[Of] = ("weights", "activations", "both"),
    loss_scale: float | None = None,
    jacobian_sequences: int = 2,
    accuracy: Callable[[nn.Module], Estimate] | None = None,
    expected: str = "",
    trials: bool = True,
    progress: Stage | None = None,
) -> Diagnosis:
    """What the layers of a model do on real data, and what is wrong with them.

    The model stays as it is. The signal is streamed; only token ids stay in memory, for what needs several passes.

    Args:
        batches: sequences of one length (see `signalprop.diagnosis.stream.token_batches`), or inputs; default: 4
            sequences of at most 128 tokens of the embedded text, numbered by frequency.
        inputs: tokens, images or frames as the model is called with them (as `measure` takes them); in place of
            batches. Of a model whose weights are not identified, only the stream is looked at.
        name: of the model, in the result. mapping: where its family is not known (docs/measuring.md).
        skip_first: positions at the start of every sequence that statistics of the signal leave out.
        remove: also the loss without every single layer.
        cast: formats of `signalprop.diagnosis.number_formats.FORMATS` to cast to. cast_of: what is cast.
        loss_scale: count what float16 loses of the gradients of the loss times this number.
        jacobian_sequences: sequences on which |J - I| and angular distances are measured (0: neither).
        accuracy: a score beside the loss, of the whole model and for removals (see `signalprop.diagnosis.tasks`).
        expected: scheme that the model is meant to carry (default: the one that `signalprop.apply` put on it).
        trials: try other conventions of trained weights on a short text: some 20 forward passes of it.
        progress: called with (section, done, all).

    Raises:
        InputError: an unknown family, weights that are sharded, data that does not fit, or as the sections.
    """
    _check_counts(jacobian_sequences=jacobian_sequences, skip_first=skip_first)
    if batches is not None and inputs is not None:
        raise InputError("batches and inputs= are both what the model reads; give one of them")
    if not (batches is None or _are_batches(batches)):
        if isinstance(batches, (list, tuple)) and any(isinstance(one, (int, float, str)) for one in batches):
            raise InputError(f"batches is {batches!s:.40}; expected Batches, or tensors as the model reads them")
        batches, inputs = None, batches
    attached = _understood(model, batches, name, mapping, inputs, skip_first)
    if isinstance(attached, Diagnosis):
        return attached
    model, mapping, arguments = attached.model, attached.mapping, attached.arguments
    if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        raise InputError(
            "its weights are sharded over processes (FSDP2); diagnose a checkpoint of it, or before sharding"
        )
    if arguments is not None:
        held = [batch_of(mapping, arguments)]
    elif isinstance(inputs, Batch):
        held = [inputs]
    else:
        held = [default_batch(shortened(mapping.architecture))] if batches is None else list(batches)
    held = [read_by(mapping.arguments, batch) for batch in held]
    check(attached, held, remove, cast)
    n = sum(len(batch.inputs) for batch in held)

    def step(section: str) -> Callable[[int, int], None] | None:
        return None if progress is None else lambda done, total: progress(section, done, total)

    notes = [line for line in (beyond_positions(mapping.architecture, _length(held)),) if line]
    if blocked := without_gradient(model):
        notes.append(f"no gradients and no distances from the identity: {blocked}")
        jacobian_sequences = 0
    found: dict[str, Any] = {}
    exponents = None if loss_scale is None else GradientExponents(attached, loss_scale)
    with evaluating(model):
        found["signal"], _ = observe(
            attached, held, skip_first=skip_first, gradient_sequences=0 if blocked else _BACKWARD_SEQUENCES,
            exponents=exponents, progress=step("signal"),
        )  # fmt: skip
        signal = found["signal"]
        finite = all(item.finite for item in signal)
        whole = None
        if finite and mapping.architecture.head == "lm" and any((b.targets >= 0).any() for b in held):
            tell = step("loss")
            whole = loss(attached, held, None if tell is None else lambda done: tell(done, n))
            found |= {"loss": whole.estimate, "perplexity": number(whole.perplexity)}
        short = _short(held[0])
        with weights_here(model):
            bad = found["bad_tensors"] = bad_tensors(model)
            ends = found["ends"] = ends_of(attached, short, held) if whole is not None else None
        worth = whole is not None and math.isfinite(whole.mean) and ends is not None and ends.learnt
        if trials and worth and _reads_one_text(mapping.architecture):
            found["trials"] = try_all(attached, short, _text(held), step("trials"))
        new = not (learnt(attached) if ends is None else ends.learnt)
        wired: tuple[Finding, ...] = (*parts_of(attached, short), *epsilons_of(attached, signal))
        if not finite and not bad:
            calls = (arguments_of(attached, batch) for batch in held)
            wired += why_not_finite(model, calls, layer_paths(model, attached.layers))
        if (new or mapping.architecture.family is None) and finite:
            wired += wired_here(attached, short)
        if ends is not None and new:
            found["fresh"] = fresh_of(attached, short, backward=not blocked)
        with weights_here(model):
            found["weights"], said = live_weights(attached, held[0].statistics(mapping.architecture), _length(held))
        notes += [f"prediction: {line}" for line in said]
        found["accuracy"] = accuracy(model) if accuracy is not None and finite else None
        if jacobian_sequences and finite and has_modules(mapping):
            found["identity"] = identity(
                attached, held, skip_first=skip_first, limit=jacobian_sequences, progress=step("identity")
            )
        elif jacobian_sequences and finite:
            notes.append("no distances from the identity: the mapping does not name one module per layer")
        if whole is None and (remove or cast):
            notes.append("no removals and no casts: there is no finite loss to compare")
        if whole is not None and remove:
            found["removal"] = removal(attached, held, whole, accuracy, step("removal"))
        if whole is not None and cast:
            found["casts"] = casts(attached, held, cast, cast_of, whole, skip_first, step("casts"))
    found["gradients"] = None if exponents is None else exponents.found()
    record = record_of(model)
    data = Data(
        source=held[0].source,
        sequences=n,
        tokens=sum(len(b.inputs) * _length([b]) for b in held),
        length=_length(held),
        skip_first=skip_first,
    )
    scheme = expected or (record.parametrization.scheme if record is not None else "")
    found |= {"family": mapping.architecture.family or "", "wired": wired, "notes": tuple(notes)}
    return concluded(model, name, data, scheme, **found)


def _understood(
    model: nn.Module | Anatomy, batches: Any, name: str, mapping: Mapping | None, inputs: Any, skip_first: int
) -> Anatomy | Diagnosis:
    """The model with its parts; if they are not found, a diagnosis of its wiring or of its stream alone."""
    found = None
    try:
        found = attach(model, mapping, inputs)
        attached = _with_words(reading_batches(found))
        if not attached.mapping.tokens_first:
            return attached
        raise InputError(
            "diagnose reads streams (batch, tokens, features), and this model's is (tokens, batch, features)"
        )
    except InputError as error:
        try:
            return not_understood(model.outer if isinstance(model, Anatomy) else model, batches, name, error)
        except InputError:
            if found is None or found.arguments is None or found.mapping.tokens_first:
                raise
            return of_stream(found, name, error, skip_first)


def _are_batches(batches: Any) -> bool:
    """Whether these are Batches, or an iterable that is to give them, as a loader; else they are inputs."""
    if isinstance(batches, (list, tuple)):
        return all(isinstance(batch, Batch) for batch in batches)
    return isinstance(batches, Iterable) and not isinstance(batches, (Tensor, np.ndarray, Dictionary, str))


def batch_of(mapping: Mapping, arguments: Dictionary[str, Any]) -> Batch:
    """What a model is called with."""
    batch = batch_in(mapping, arguments)
    if batch is None:
        raise InputError(
            f"diagnose reads tokens, square images or frames; {', '.join(arguments)} hold none that fits; "
            "measure and Probe take any inputs="
        )
    return batch


def check(attached: Anatomy, batches: Sequence[Batch], remove: bool, cast: Sequence[str]) -> None:
    """Raise the InputError that `diagnose` would raise before its first pass."""
    unknown = [item for item in cast if item not in FORMATS]
    if unknown:
        raise InputError(f"unknown format {unknown[0]!r}; formats: {', '.join(FORMATS)}")
    if remove:
        lists_of(attached)
    first_sequences(batches, 1)


def _with_words(attached: Anatomy) -> Anatomy:
    """The same; where how many words there are could not be proved, as many as the first table of the model has."""
    mapping, model = attached.mapping, attached.model
    if mapping.architecture.input != "tokens" or mapping.architecture.vocab_size != UNKNOWN:
        return attached
    rows = next((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), UNKNOWN)
    a = mapping.architecture.model_copy(update={"vocab_size": rows})
    make = mapping.arguments
    if isinstance(make, BatchArguments):
        make = replace(make, architecture=a)
    return attached.but(described=replace(mapping, architecture=a, arguments=make))


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if value < 0:
            raise InputError(f"{name} is {value}; expected a number from 0 on")


def _reads_one_text(a: Architecture) -> bool:
    return a.kind != "encoder-decoder" and a.input == "tokens"


def _text(held: Sequence[Batch]) -> Sequence[Batch]:
    """What the second look reads: errors of a few short sequences hide what a change is worth."""
    n = max(_TRIAL_SEQUENCES, -(-_TRIAL_TEXT // _length(held)))
    return held[: -(-n // len(held[0].inputs))]


def _short(batch: Batch) -> Batch:
    """The first sequence, as much of it as trials read; the first few where little of one is asked for."""
    if batch.tokens is None or batch.decoder_tokens is not None:
        return batch
    shape, n = batch.tokens.shape, 1
    if batch.targets.shape == shape:
        asked = (batch.targets[:, :_TRIAL_TOKENS] >= 0).sum(1).cumsum()
        n = 1 + int(np.searchsorted(asked, min(_TRIAL_ASKED, asked[-1])))
    parts = {k: v[:n, :_TRIAL_TOKENS] for k, v in vars(batch).items() if getattr(v, "shape", None) == shape}
    return replace(batch, **parts)


def _length(batches: Sequence[Batch]) -> int:
    """Tokens of a sequence, of the decoder if there is one."""
    first = batches[0]
    return int((first.inputs if first.decoder_tokens is None else first.decoder_tokens).shape[1])

"""The wiring of an attached model, and of one whose blocks could not be understood, which may be why."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from signalprop.attachment.arguments import read_by
from signalprop.attachment.attached import Attached
from signalprop.attachment.live_model import evaluating
from signalprop.data.batches import Batch
from signalprop.diagnosis.ends import bad_tensors
from signalprop.diagnosis.not_finite import layer_paths, why_not_finite
from signalprop.diagnosis.result import SCHEMA, Data, Diagnosis
from signalprop.diagnosis.verdict import verdicts
from signalprop.diagnosis.whole_model_values import Wired
from signalprop.diagnosis.wiring import blocks_of, wiring_of
from signalprop.errors import InputError
from signalprop.measurement.measuring import arguments_of
from signalprop.repair.freshness import unlike_draws
from signalprop.streams.arguments import tiny_arguments

_TOKENS = 64


def asks_for_the_next(batch: Batch) -> bool:
    """Whether a batch asks for the next token everywhere, so that no later one may be read."""
    tokens, targets = batch.tokens, batch.targets
    if tokens is None or targets.shape != tokens.shape or tokens.shape[1] < 2:
        return False
    asked = targets[:, :-1]
    return bool((asked >= 0).mean() > 0.5 and (asked == tokens[:, 1:])[asked >= 0].all())


def wired_here(attached: Attached, short: Batch) -> tuple[Wired, ...]:
    """Of a fresh model on a short text."""
    model, mapping = attached.model, attached.mapping
    own = mapping.architecture.family is None
    causal = asks_for_the_next(short) if own else mapping.architecture.kind == "decoder"
    arguments = arguments_of(model, mapping, read_by(mapping.arguments, short))
    return wiring_of(model, arguments, own=own, causal=causal)


def not_understood(model: nn.Module, batches: Iterable[Batch] | None, name: str, error: InputError) -> Diagnosis:
    """A diagnosis of the wiring alone, where that explains why no skips were found.

    Raises:
        InputError: the given one, where it does not.
    """
    weights = [p for p in model.parameters() if p.ndim == 2 and p.is_floating_point() and not p.is_meta]
    if len(blocks_of(model)) < 3 or not weights or bad_tensors(model):
        raise error
    fresh = not any(unlike_draws(p.detach()) for p in weights[:8])
    try:
        arguments = tiny_arguments(model)
    except InputError:
        raise error from None
    first = None if batches is None else next(iter(batches), None)
    for key, value in arguments.items():
        if value.ndim == 2 and not value.is_floating_point():  # a longer text than the tiny one
            if first is not None and first.tokens is not None:
                arguments[key] = torch.as_tensor(first.tokens[:1, :_TOKENS]).long()
            else:
                arguments[key] = value.repeat(1, -(-_TOKENS // value.shape[1]))[:, :_TOKENS]
    try:
        with evaluating(model):
            found = why_not_finite(model, [arguments], layer_paths(model, blocks_of(model)))
            if not found and fresh:
                found = wiring_of(model, arguments, own=True, causal=first is not None and asks_for_the_next(first))
    except Exception:  # whatever a stranger's model raises: the first refusal says more
        raise error from None
    if not found:
        raise error
    length = next((v.shape[1] for v in arguments.values() if v.ndim > 1), 0)
    data = Data(source="made up" if first is None else first.source, sequences=1, tokens=length, length=length,
                skip_first=0)  # fmt: skip
    notes = (f"the wiring alone was looked at: {error}",)
    result = Diagnosis(
        schema=SCHEMA, model=name or type(model).__name__, family="", data=data, wired=found, notes=notes,
        n_parameters=sum(p.numel() for p in model.parameters()),
    )  # fmt: skip
    return result.model_copy(update={"verdicts": verdicts(result)})

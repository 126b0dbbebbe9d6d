"""The wiring of an attached model, and of one whose blocks could not be understood, which may be why."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from signalprop.attachment.anatomy import Anatomy
from signalprop.data.batches import Batch
from signalprop.diagnosis import sentences
from signalprop.diagnosis.ends import asks_for_the_next, bad_tensors
from signalprop.diagnosis.identity import identity
from signalprop.diagnosis.layers import has_modules
from signalprop.diagnosis.not_finite import layer_paths, why_not_finite
from signalprop.diagnosis.result import SCHEMA, Data, Diagnosis
from signalprop.diagnosis.signal import observe
from signalprop.diagnosis.verdict import verdicts
from signalprop.diagnosis.wiring import blocks_of, wiring_of
from signalprop.errors import InputError
from signalprop.measurement.measuring import arguments_of
from signalprop.repair.freshness import unlike_draws
from signalprop.results.findings import Finding
from signalprop.streams.arguments import tiny_arguments
from signalprop.streams.live_model import evaluating

_TOKENS = 64


def wired_here(attached: Anatomy, short: Batch) -> tuple[Finding, ...]:
    """Of a fresh model on a short text."""
    model, mapping = attached.model, attached.mapping
    own = mapping.architecture.family is None
    causal = asks_for_the_next(short) if own else mapping.architecture.kind == "decoder"
    return wiring_of(model, arguments_of(attached, short), own=own, causal=causal)


def not_understood(model: nn.Module, batches: Iterable[Batch] | None, name: str, error: InputError) -> Diagnosis:
    """A diagnosis of the wiring alone, where that explains why no skips were found.

    Raises:
        InputError: the given one, where it does not.
    """
    weights = [p for p in model.parameters() if p.ndim == 2 and p.is_floating_point() and not p.is_meta]
    if len(blocks_of(model)) < 3 or not weights:
        raise error
    bad = bad_tensors(model)
    if bad:
        return _in_part(model, name, error, bad_tensors=bad)
    fresh = not any(unlike_draws(p.detach()) for p in weights[:8])
    try:
        arguments = tiny_arguments(model)
    except InputError:
        raise error from None
    first = None if batches is None else next(iter(batches), None)
    first = first if isinstance(first, Batch) else None
    for key, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.ndim == 2 and not value.is_floating_point():  # a longer text
            if first is not None and first.tokens is not None:
                arguments[key] = torch.as_tensor(first.tokens[:1, :_TOKENS]).long()
            else:
                arguments[key] = value.repeat(1, -(-_TOKENS // value.shape[1]))[:, :_TOKENS]
    try:
        with evaluating(model):
            found = why_not_finite(model, [arguments], layer_paths(model, blocks_of(model)))
            if not found and fresh:
                found = mute_norms(model) or wiring_of(
                    model, arguments, own=True, causal=first is not None and asks_for_the_next(first)
                )
    except Exception:  # whatever a stranger's model raises: the first refusal says more
        raise error from None
    if not found:
        raise error
    length = next((v.shape[1] for v in arguments.values() if isinstance(v, torch.Tensor) and v.ndim > 1), 0)
    return _in_part(model, name, error, length, "made up" if first is None else first.source, wired=found)


def of_stream(attached: Anatomy, name: str, error: InputError, skip_first: int) -> Diagnosis:
    """A diagnosis of the stream alone, of a model whose weights are not identified, on what it is called with."""
    arguments = arguments_of(attached, attached.arguments or {})
    with evaluating(attached.model):
        signal, (sequences, length) = observe(attached, [arguments], skip_first=skip_first, gradient_sequences=0)
        finite = all(item.finite for item in signal)
        near = (
            identity(attached, [arguments], skip_first=skip_first) if finite and has_modules(attached.mapping) else None
        )
    return _in_part(
        attached.model, name, error, length, "inputs", sequences, skip_first,
        part="stream", signal=signal, identity=near, bad_tensors=bad_tensors(attached.model),
    )  # fmt: skip


def _in_part(
    model: nn.Module, name: str, error: InputError, length: int = 0, source: str = "nothing was read",
    sequences: int = 1, skip_first: int = 0, part: str = "wiring", **found: Any,
) -> Diagnosis:  # fmt: skip
    """A diagnosis of what was found, and of what could not be checked."""
    data = Data(source=source, sequences=sequences, tokens=sequences * length, length=length, skip_first=skip_first)
    return concluded(model, name, data, notes=(f"only the {part} was looked at: {error}",), family="", **found)


def concluded(model: nn.Module, name: str, data: Data, expected: str = "", **found: Any) -> Diagnosis:
    """A diagnosis with its findings.

    Args:
        expected: as of `verdicts`. found: fields of the Diagnosis.
    """
    n = sum(p.numel() for p in model.parameters())
    result = Diagnosis(schema=SCHEMA, model=name or type(model).__name__, n_parameters=n, data=data, **found)
    return result.model_copy(update={"findings": verdicts(result, expected)})


def mute_norms(model: nn.Module) -> tuple[Finding, ...]:
    """Norms in blocks whose gains are all 0, by the names of their modules."""
    paths = {module: path for path, module in model.named_modules()}
    dead = [
        (i, f"{paths[module]}.weight")
        for i, block in enumerate(blocks_of(model)) for module in block.modules()
        if "norm" in type(module).__name__.lower()
        and isinstance(gain := getattr(module, "weight", None), nn.Parameter) and not bool(gain.any())
    ]  # fmt: skip
    if len({i for i, _ in dead}) == len(blocks_of(model)):  # all of them: gains to which 1 is added
        return ()
    return tuple(sentences.norms_of_zeros(dead, "tested: the gains were read"))

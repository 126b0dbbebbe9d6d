"""Which dimension of the stream holds tokens: the one along which one entry's noise reaches the others."""

from __future__ import annotations

from collections.abc import Mapping as Dictionary
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.hooks import Hooks, Site, rows_of
from signalprop.streams.calls import call
from signalprop.streams.parts import Seen, Stack

_CHANGED = 1e-5  # of the largest entry


def with_token_axis(model: nn.Module, arguments: Dictionary[str, Any], stacks: tuple[Stack, ...]) -> tuple[Stack, ...]:
    """The stacks, with whether tokens stand before sequences in their streams; three passes of a model that evaluates.

    Two sequences are run, which every argument is made to hold. Where these do not run, or nothing mixes, a stream of
    one sequence says by its shape where tokens are, and any other is taken as (batch, tokens, features).
    """
    for given in (_twice(arguments), arguments):
        try:
            plain = [_pass(model, given, stack, None) for stack in stacks]
        except Exception:  # a model for one sequence
            continue
        return tuple(_told(model, given, stack, *seen) for stack, seen in zip(stacks, plain, strict=True))
    return stacks


def _told(
    model: nn.Module, given: Dictionary[str, Any], stack: Stack, entry: Tensor | None, seen: list[Tensor]
) -> Stack:
    """The stack with what noise in the first, else in the last entry of its stream tells."""
    if entry is None or entry.ndim != 3 or not _only_first(model, given, stack, entry, seen):
        return stack
    return replace(stack, tokens_first=True, reads_tokens_first=rows_of(given.values()) == entry.shape[:2])


def _only_first(model: nn.Module, given: Dictionary[str, Any], stack: Stack, entry: Tensor, seen: list[Tensor]) -> bool:
    """Whether noise reaches others of the first dimension alone."""
    if 1 in entry.shape[:2]:
        return entry.shape[1] == 1 and entry.shape[0] > 1
    for at in (0, -1):
        _, noisy = _pass(model, given, stack, at)
        reached = torch.zeros(entry.shape[:2], dtype=torch.bool)
        for one, other in zip(seen, noisy, strict=True):
            if one.shape[:2] == entry.shape[:2] and one.ndim == 3:
                limit = _CHANGED * float(one.abs().max())
                reached |= ((one - other).abs().amax(-1) > limit).cpu()
        others = reached.roll((-at, -at), (0, 1))
        along_second, along_first = bool(others[0, 1:].any()), bool(others[1:, 0].any())
        if along_second or along_first:
            return along_first and not along_second
    return False


def _twice(arguments: Dictionary[str, Any]) -> dict[str, Any]:
    """Two sequences of one: the second one's words stand in another order."""
    tensors = [v for v in arguments.values() if isinstance(v, Tensor) and v.ndim]
    if not all(len(v) == 1 for v in tensors):
        return dict(arguments)

    def both(value: Tensor) -> Tensor:
        words = value.ndim > 1 and not value.is_floating_point() and value.dtype != torch.bool
        return torch.cat([value, value.roll(1, -1) if words else value])

    return {k: both(v) if isinstance(v, Tensor) and v.ndim else v for k, v in arguments.items()}


def _pass(
    model: nn.Module, given: Dictionary[str, Any], stack: Stack, noise_at: int | None
) -> tuple[Tensor | None, list[Tensor]]:
    """(stream that enters the stack, what its branches output) in a pass, with noise in one entry of the stream."""
    first = next((b.stream_in for b in stack.branches if b.stream_in is not None), None)
    outputs = list(dict.fromkeys(b.output for b in stack.branches if b.output is not None))
    entered: list[Tensor] = []
    found: dict[int, Tensor] = {}

    def enters(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or entered:
            return None
        entered.append(tensor.detach().clone())
        if noise_at is None or tensor.ndim != 3:
            return None
        noisy = tensor.clone()
        draw = torch.randn(tensor.shape[-1], generator=torch.Generator().manual_seed(0))
        noisy[noise_at, noise_at] += (draw * float(tensor.double().std() or 1.0)).to(tensor)
        return noisy

    def leaves(index: int, tensor: Tensor | None) -> None:
        if tensor is not None:
            found.setdefault(index, tensor.detach().clone())

    hooks = Hooks(model)
    if first is not None:
        module = model.get_submodule(first.path)
        (hooks.reads if first.side == "input" else hooks.outputs)(module, enters)
    hooks.sites([_site(model, one) for one in outputs], leaves)
    with hooks, torch.no_grad():
        call(model, given)
    return (entered[0] if entered else None), [found[i] for i in sorted(found)]


def _site(model: nn.Module, seen: Seen) -> Site:
    return Site(model.get_submodule(seen.path), seen.side, seen.call, seen.calls)

"""What noise in one token of a stream reaches: which axis holds tokens, whether earlier ones, whether another stack."""

from __future__ import annotations

from collections.abc import Mapping as Dictionary
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from signalprop.hooks import Hooks, Site, rows_of
from signalprop.streams.calls import Enough, call_until_enough, can_end
from signalprop.streams.parts import Place, Stack

_CHANGED = 1e-5  # of the largest entry
_LARGEST = 2  # stacks, of which one may read the other's stream


class _Stream(NamedTuple):
    """Of a stack in a pass: the stream that enters it, what its branches output, and which stacks had ended before."""

    entry: Tensor | None
    outputs: dict[int, Tensor]
    before: tuple[int, ...]


def with_token_axis(model: nn.Module, arguments: Dictionary[str, Any], stacks: tuple[Stack, ...]) -> tuple[Stack, ...]:
    """The stacks, with what noise in one token of each shows; passes of a model that evaluates.

    Two sequences are run, which every argument is made to hold. Where these do not run, or nothing mixes, a stream of
    one sequence says by its shape where tokens are, and any other is taken as (batch, tokens, features).
    """
    for given in (_twice(arguments), arguments):
        try:
            noise = _Noise(model, given, stacks)
        except Exception:  # a model for one sequence
            continue
        return tuple(noise.told(i) for i in range(len(stacks)))
    return stacks


class _Noise:
    """Passes with noise in one token of one stack's stream, beside a plain one."""

    def __init__(self, model: nn.Module, given: Dictionary[str, Any], stacks: tuple[Stack, ...]) -> None:
        self.model, self.given, self.stacks = model, given, stacks
        self.plain = self.streams()
        entries = [stream.entry for stream in self.plain]
        self._seen: dict[int, list[_Stream]] = {}
        self.middles = [(0, 0) if x is None or x.ndim < 2 else (x.shape[0] // 2, x.shape[1] // 2) for x in entries]

    def told(self, i: int) -> Stack:
        """A stack, with where its tokens stand, whether they reach earlier ones, and whose stream it reads."""
        entry = self.plain[i].entry
        axis = {} if entry is None or entry.ndim != 3 else self.axis(i, entry)
        return replace(self.stacks[i], **axis, memory=self.memory(i))

    def axis(self, i: int, entry: Tensor) -> dict[str, Any]:
        """The fields of a stack that say which axis of its stream holds tokens, and whether they reach earlier ones."""
        n, length = entry.shape[:2]
        turned = {"tokens_first": True, "reads_tokens_first": rows_of(self.given.values()) == (n, length)}
        middle, last = self.middles[i], (n - 1, length - 1)
        for at in (middle, (0, 0), last):
            reached = self.reached(i, at)
            first, second = reached[:, at[1]], reached[at[0]]
            if first.any() and second.any():
                return {}
            if not (first.any() or second.any()):
                continue
            found, line, place = (turned, first, at[0]) if first.any() else ({}, second, at[1])
            if at != middle or not place:
                return found
            # of a prefix (PaliGemma) some tokens reach earlier ones, of windows (Swin) all but the first of each
            late = self.reached(i, (last[0], at[1]) if found else (at[0], last[1]))
            ways = {bool(line[:place].any()), bool(late.any())}
            return {**found, "causal": not ways.pop() if len(ways) == 1 else None}
        rows = {len(v) for v in self.given.values() if isinstance(v, Tensor) and v.ndim}
        return turned if length == 1 < n and n not in rows else {}

    def reached(self, i: int, at: tuple[int, int]) -> Tensor:
        """Which other places of a stack's stream noise at one of them reaches: its first two axes."""
        plain, noisy = self.plain[i], (self.in_the_middle(i) if at == self.middles[i] else self.streams(i, at))[i]
        assert plain.entry is not None
        reached = torch.zeros(plain.entry.shape[:2], dtype=torch.bool)
        for k in plain.outputs.keys() & noisy.outputs.keys():
            if plain.outputs[k].shape[:2] == reached.shape and plain.outputs[k].ndim == 3:
                reached |= _changed(plain.outputs[k], noisy.outputs[k])
        reached[at] = False
        return reached

    def memory(self, i: int) -> str:
        """The path of a stack before it whose stream it reads, which enters it in no other way; '' for none."""
        for j, other in enumerate(self.stacks[:_LARGEST] if i < _LARGEST else ()):
            entry = self.plain[j].entry
            if j not in self.plain[i].before or entry is None or entry.ndim != 3 or other.width != self.stacks[i].width:
                continue
            plain, noisy = self.plain[i], self.in_the_middle(j)[i]
            if plain.entry is None or noisy.entry is None or _changed(plain.entry, noisy.entry).any():
                continue
            if any(_changed(plain.outputs[k], noisy.outputs[k]).any() for k in plain.outputs.keys() & noisy.outputs):
                return other.path
        return ""

    def in_the_middle(self, i: int) -> list[_Stream]:
        """As `streams`, with noise in the middle of a stack's stream."""
        if i not in self._seen:
            self._seen[i] = self.streams(i, self.middles[i])
        return self._seen[i]

    def streams(self, noisy: int | None = None, at: tuple[int, int] = (0, 0)) -> list[_Stream]:
        """Of every stack what a pass shows, with noise at a place of the stream that enters one of them."""
        entries: dict[int, Tensor] = {}
        before: dict[int, tuple[int, ...]] = {}
        outputs: list[dict[int, Tensor]] = [{} for _ in self.stacks]

        def enters(index: int, tensor: Tensor | None) -> Tensor | None:
            if tensor is None or index in entries:
                return None
            entries[index] = tensor.detach().clone()
            before[index] = tuple(j for j, found in enumerate(outputs) if len(found) == len(wanted[j]))
            if index != noisy or tensor.ndim != 3:
                return None
            changed = tensor.clone()
            draw = torch.randn(tensor.shape[-1], generator=torch.Generator().manual_seed(0))
            changed[at] += (draw * float(tensor.double().std() or 1.0)).to(tensor)
            return changed

        hooks = Hooks()
        wanted: list[list[Place]] = []
        for index, stack in enumerate(self.stacks):
            first = next((b.stream_in for b in stack.branches if b.stream_in is not None), None)
            if first is not None:
                module = self.model.get_submodule(first.path)
                watch = hooks.reads if first.side == "input" else hooks.outputs
                watch(module, partial(enters, index))
            wanted.append([place for place in dict.fromkeys(b.output for b in stack.branches) if place is not None])
        sites = [(index, place) for index, of_one in enumerate(wanted) for place in of_one]

        def leaves(k: int, tensor: Tensor | None) -> None:
            if tensor is not None:
                outputs[sites[k][0]].setdefault(k, tensor.detach().clone())
            if ends and sum(map(len, outputs)) == len(sites):
                raise Enough

        ends = can_end(self.model)

        hooks.sites(
            [Site(self.model.get_submodule(place.path), place.side, place.call, place.calls) for _, place in sites],
            leaves,
        )
        with hooks, torch.no_grad():
            call_until_enough(self.model, self.given)
        return [_Stream(entries.get(i), found, before.get(i, ())) for i, found in enumerate(outputs)]


def _changed(plain: Tensor, noisy: Tensor) -> Tensor:
    """Which places differ by more than rounding, all axes but the last; all, where there are more or fewer now."""
    if plain.shape != noisy.shape:
        return torch.ones(plain.shape[:-1], dtype=torch.bool)
    limit = _CHANGED * float(plain.abs().max())
    return ((plain - noisy).abs().amax(-1) > limit).cpu()


def _twice(arguments: Dictionary[str, Any]) -> dict[str, Any]:
    """Two sequences of one: the second one's words stand in another order."""
    tensors = [v for v in arguments.values() if isinstance(v, Tensor) and v.ndim]
    if not all(len(v) == 1 for v in tensors):
        return dict(arguments)

    def both(value: Tensor) -> Tensor:
        words = value.ndim > 1 and not value.is_floating_point() and value.dtype != torch.bool
        return torch.cat([value, value.roll(1, -1) if words else value])

    return {k: both(v) if isinstance(v, Tensor) and v.ndim else v for k, v in arguments.items()}

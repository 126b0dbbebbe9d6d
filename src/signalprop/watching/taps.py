"""Taps: the sums of every probe point, computed inside a compiled graph, forward and backward.

A tap is an autograd.Function of pure tensor operations that hands its input on. Its sums, of the tensor and of its
gradient, leave the graph as the gradient of a small leaf tensor, so that nothing in the graph is changed in place,
nothing breaks it, and the compiler merges the sums with whatever reads the tensor anyway. Dynamo does not look for
hooks once it has compiled a module: `Taps.place` has it forget what it compiled before.

The hooks are the same functions for all modules, and what differs is an attribute of the module: an index in a closure
would be a constant, and one graph for every layer where layers are compiled one by one.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.attachment.anatomy import Anatomy
from signalprop.errors import InputError
from signalprop.hooks import Handle, first_tensor, plainly_after, plainly_before, read_by, replaced, whole
from signalprop.watching.first_positions import DECODER
from signalprop.watching.kept import kept, told
from signalprop.watching.passes import Pass
from signalprop.watching.reduction import Sums, single_is_enough

# What a tap adds up, over passes and processes: the sum of squares, of |S_b|^2, of all, of n_b times sequence b's sum,
# of the numbers n_b of real tokens and of their squares (see `Sums`); tokens of a sequence, features; 1.
_SUMS = 9
# Tokens that are added up at a time: a loop over all of a sequence's, for a few features, would leave the cache.
_ROWS = 8


@dataclass(frozen=True)
class Groups:
    """Over which processes statistics are taken.

    Attributes:
        data: a process group whose members read other sequences (data parallel, FSDP2). tokens: one whose members hold
            other tokens of the same sequences (context parallel), in equal parts. None: this process alone.
    """

    data: Any = None
    tokens: Any = None

    def __bool__(self) -> bool:
        return self.data is not None or self.tokens is not None

    @property
    def size(self) -> int:
        """Over how many processes the loss is averaged."""
        groups = [group for group in (self.data, self.tokens) if group is not None]
        return int(torch.tensor([torch.distributed.get_world_size(group) for group in groups]).prod())


class Read:
    """Arguments of the pass, as attributes."""


class Seen:
    """What the taps of one stack share: whether they are on, and which tokens count."""

    def __init__(self, skip_first: int, group: Any) -> None:
        self.on = False
        self.skip_first = skip_first
        self.group = group
        self.mask: Tensor | None = None
        self.read = Read()


class _Tap(torch.autograd.Function):
    """x, and the sums of x and of its gradient as the gradient of `leaf` (2, 9). between: x is between layers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, leaf: Tensor, keep: Tensor | None, skip: int, group: Any, between: bool) -> Tensor:
        ctx.skip, ctx.group, ctx.masked = skip, group, keep is not None
        if between:
            x = kept(x)
        found = _sums(x, keep, skip, group)
        if not between:
            x, found = told(x, found)
        ctx.save_for_backward(found, *([] if keep is None else [keep]))
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        found, *mask = ctx.saved_tensors
        own = _sums(gradient, mask[0] if ctx.masked else None, ctx.skip, ctx.group)
        return gradient, torch.stack([found, own]), None, None, None, None


def _sums(x: Tensor, keep: Tensor | None, skip: int, group: Any) -> Tensor:
    """The sums of a tensor (batch, tokens, features), in float32: first over few entries, which keeps them exact."""
    x = x.detach()[:, skip:].float()
    if keep is not None:
        x = torch.where(keep[:, skip:, None], x, 0.0)
    parts = x.shape[1] // _ROWS
    rest = x[:, parts * _ROWS :].sum(1)
    sums = x[:, : parts * _ROWS].reshape(x.shape[0], parts, _ROWS, x.shape[2]).sum(2).sum(1) + rest
    squares = (x * x).sum(2)
    tokens = x.new_full((), x.shape[1])
    counts = tokens.expand(x.shape[0]) if keep is None else keep[:, skip:].sum(1).to(x.dtype)
    if group is not None:  # |S_b|^2 is of whole sequences
        from torch.distributed._functional_collectives import all_reduce

        reduced = all_reduce(torch.cat([sums, squares.sum(1)[:, None], counts[:, None]], 1), "sum", group)
        sums, squares, counts = reduced[:, :-2], reduced[:, -2], reduced[:, -1]
        tokens = tokens * torch.distributed.get_world_size(group)
    totals = sums.sum(1)
    one = torch.ones_like(tokens)
    found = [squares.sum(), (sums * sums).sum(), totals.sum(), (totals * counts).sum(), counts.sum()]
    whole_parts = [whole(part) for part in (*found, (counts * counts).sum(), tokens, one * x.shape[2], one)]
    return torch.stack(whole_parts)


# --- hooks: traced into the graph -----------------------------------------------------------------------------------


def _tapped(x: Tensor | None, leaf: Tensor, seen: Seen, between: bool = False) -> Tensor | None:
    """The tensor after its tap; None where there is nothing to see."""
    if x is None or not seen.on or not torch.is_grad_enabled() or x.ndim != 3 or not x.requires_grad:
        return None
    keep, skip = None, seen.skip_first if x.shape[1] > 2 * seen.skip_first else 0
    if seen.mask is not None:
        keep, skip = seen.mask != 0, 0
        if x.shape[1] > 2 * seen.skip_first > 0:
            keep = keep & (keep.cumsum(1) > seen.skip_first)
    out: Tensor = _Tap.apply(x, leaf, keep, skip, seen.group, between)  # type: ignore[no-untyped-call]
    return out


def _argument(module: Any, args: Any, kwargs: Any) -> Any:
    """A layer's first argument, which all inside it read."""
    return replaced(
        args, kwargs, _tapped(read_by(args, kwargs), module._signalprop_in, module._signalprop_seen, between=True)
    )


def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    """A layer's forward after the tap of its first argument; by its name pickle finds the class's.

    A hook of a layer that is compiled by itself would be a separate graph, which reads the stream once more.
    """
    args, kwargs = _argument(module, args, kwargs) or (args, kwargs)
    return type(module).forward(module, *args, **kwargs)


def _rebound(module: Any, args: Any, kwargs: Any) -> None:
    """A stream that others read too: all who read it from here on read the tap (a compiled graph has no copy)."""
    x = read_by(args, kwargs)
    tapped = _tapped(x, module._signalprop_in, module._signalprop_seen)
    if x is not None and tapped is not None:
        x.copy_(tapped)


def _output(module: Any, _: Any, __: Any, output: Any) -> Any:
    """What a module outputs."""
    x = output if isinstance(output, Tensor) else first_tensor(output)
    tapped = _tapped(x, module._signalprop_out, module._signalprop_seen)
    return None if tapped is None else tapped if isinstance(output, Tensor) else (tapped, *output[1:])


def _begins(model: Any, args: Any, kwargs: Any) -> None:
    """The masks of a pass, and what it reads."""
    found = kwargs
    if args:
        found = {**dict(zip(model._signalprop_names, args, strict=False)), **kwargs}
    for seen, mask, stride in model._signalprop_masks:
        if seen.on and torch.is_grad_enabled():
            given = found.get(mask)
            two = isinstance(given, Tensor) and given.ndim == 2
            seen.mask = None if not two else given if stride == 1 else given[:, ::stride]
            for name in model._signalprop_reads:
                setattr(seen.read, name, found.get(name))


# --- on a model -----------------------------------------------------------------------------------------------------


class Taps:
    """Taps on every probe point of a model, from `place` to `remove`; they add up from `begin` to `end`.

    Args:
        groups: over which processes. skip_first: positions of a decoder's sequences that do not count.
        reads: arguments of the model's forward that `read` has after a pass.
    """

    def __init__(
        self, attached: Anatomy, *, groups: Groups | None = None, skip_first: int = 0, reads: tuple[str, ...] = ()
    ) -> None:
        problem = refused(attached)
        if problem:
            raise InputError(problem)
        self.attached = attached
        self.groups = Groups() if groups is None else groups
        self._handles: list[Handle] = []
        self._forwards: list[nn.Module] = []
        skip = 0 if self.groups.tokens is not None else skip_first
        stacks = {site.stack for site in attached.plan.sites}
        self._seen = {stack: Seen(skip if stack == DECODER else 0, self.groups.tokens) for stack in sorted(stacks)}
        self._reads = reads
        self._sums: dict[torch.device, Tensor] = {}
        self._places: list[tuple[torch.device, int]] = []
        self._leaves: list[Tensor] = []
        self._settings = ExitStack()

    @property
    def placed(self) -> bool:
        """Whether they are on the model."""
        return bool(self._handles)

    def place(self) -> None:
        """Put them on the model. What was compiled before is compiled again when it is next called."""
        if self.placed:
            return
        attached = self.attached
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        self._settings = _guarding_hooks()
        devices = [_device(site.module, attached.model) for site in attached.plan.sites]
        self._places = [(device, devices[:i].count(device)) for i, device in enumerate(devices)]
        self._sums = {device: torch.zeros(devices.count(device), 2, _SUMS, device=device) for device in devices}
        for (device, place), (module, side, stack) in zip(self._places, _spots(attached), strict=True):
            leaf = torch.zeros(2, _SUMS, device=device, requires_grad=True)
            leaf.grad = self._sums[device][place]  # what autograd adds to, in place
            self._leaves.append(leaf)
            vars(module)["_signalprop_seen"] = self._seen[stack]
            vars(module)[f"_signalprop_{'out' if side == 'output' else 'in'}"] = leaf
            if side == "argument" and "forward" not in vars(module):
                module.forward = MethodType(forward, module)
                self._forwards.append(module)
            else:
                hook = {"argument": _argument, "input": _rebound}.get(side)
                self._handles.append(plainly_after(module, _output) if hook is None else plainly_before(module, hook))
        mapping, model = attached.mapping, attached.model
        first = min(self._seen)
        masks = [(self._seen[first], mapping.padding, mapping.padding_stride)]
        masks += [(self._seen[1], mapping.decoder_padding, 1)] if first != 1 and 1 in self._seen else []
        vars(model)["_signalprop_masks"] = tuple(masks)
        vars(model)["_signalprop_names"] = tuple(inspect.signature(model.forward).parameters)
        vars(model)["_signalprop_reads"] = self._reads
        self._handles.append(plainly_before(model, _begins))

    def remove(self) -> None:
        """Take them off, for good; harmless if there are none."""
        self.end()
        for handle in self._handles:
            handle.remove()
        for module in self._forwards:
            del module.forward
        self._handles.clear()
        self._forwards.clear()
        self._leaves.clear()
        self._settings.close()
        for module in self.attached.model.modules():
            for name in [name for name in vars(module) if name.startswith("_signalprop_")]:
                del vars(module)[name]

    def begin(self) -> None:
        """From here on passes with gradients add up, from zero."""
        for sums in self._sums.values():
            sums.zero_()
        for leaf, (device, place) in zip(self._leaves, self._places, strict=True):
            if leaf.grad is None or leaf.grad.data_ptr() != self._sums[device][place].data_ptr():
                leaf.grad = self._sums[device][place]
        for seen in self._seen.values():
            seen.on, seen.mask, seen.read = True, None, Read()

    def end(self) -> None:
        """Passes do not add up any more."""
        for seen in self._seen.values():
            seen.on, seen.mask = False, None

    def read(self) -> dict[str, Any]:
        """Arguments of the last pass, by name."""
        return vars(self._seen[min(self._seen)].read)

    def sums(self) -> Tensor:
        """(sites, 2, 9) on the host, over all processes of the data group: they have to ask together."""
        data = self.groups.data
        parts = {device: sums.clone() for device, sums in self._sums.items()}
        for part in parts.values():
            if data is not None:
                torch.distributed.all_reduce(part, group=data)
        host = {device: part.cpu() for device, part in parts.items()}
        return torch.stack([host[device][place] for device, place in self._places])


class TapRecorder(Pass):
    """The passes from `attach` to `detach`, as taps saw them: one, or all micro-batches of a step together."""

    recorded = "all passes together were"

    def __init__(self, taps: Taps) -> None:
        super().__init__(taps.attached, backward=True)
        self._taps = taps
        self._imprecise: list[int] = []

    def attach(self) -> None:
        """Let the taps add up."""
        self._taps.begin()

    def detach(self) -> None:
        """Let them stop."""
        self._taps.end()

    def read(self) -> dict[str, Any]:
        """Arguments of the last pass, by name."""
        return self._taps.read()

    def finish(self) -> None:
        """Bring the sums to the host; all processes of the groups together."""
        groups, sites = self._taps.groups, self.plan.sites
        members = 1 if groups.data is None else torch.distributed.get_world_size(groups.data)
        for index, values in enumerate(self._taps.sums().double().tolist()):
            for found, row, scale in ((self.forward, values[0], 1.0), (self.gradient, values[1], 1.0 / groups.size)):
                squares, norms, total, weighted, count, count2, tokens, features, passes = row
                if not passes:
                    continue
                entries = count * features / passes or 1.0
                if squares and not single_is_enough(squares / entries, total / entries):
                    self._imprecise.append(index)
                self.calls = max(self.calls, round(passes / members))
                self.shapes.setdefault(sites[index].stack, (round(count / tokens), round(tokens / passes)))
                five = [0.0, squares * scale * scale, norms * scale * scale, total * scale, weighted * scale]
                found[index] = Sums(torch.tensor(five, dtype=torch.float64), count, count2, round(features / passes))

    def notes(self) -> list[str]:
        """As of any pass; and where sums in float32, which is all that a graph has, lost digits or range."""
        said = [f"float32 sums inside the graph lost digits at {self.plan.where(i)}; measure() has them"
                for i in self._imprecise[:1]]  # fmt: skip
        return [*super().notes(), *said]


def refused(attached: Anatomy) -> str:
    """Why taps cannot see all points of a model, in a line; empty where they can."""
    plan = attached.plan
    if attached.mapping.tokens_first:
        return "its stream is (tokens, batch, features)"
    for row, leave in zip(attached.rows, plan.stream_out, strict=True):
        if leave < 0:
            return f"no module forms the sum of {row.label} with the stream"
    for site in plan.sites:
        if site.calls > 1:
            return f"{type(site.module).__name__} runs {site.calls} times in a pass, as several sublayers"
    return ""


def _spots(attached: Anatomy) -> Iterator[tuple[nn.Module, str, int]]:
    """(module, "argument", "input" or "output", stack) of every site.

    The stream at the norm that begins a layer is the layer's first argument, and at a final norm the last layer's
    output: there nothing is written in place, which sharding (FSDP2) and layers that are compiled one by one want.
    """
    rows, layers = attached.rows, attached.layers
    held = [layer for layer in layers if isinstance(layer, nn.Module)] if layers else []
    argument = {id(layer): layer for layer in held}  # where a mapping that was found sees the stream
    last: dict[int, nn.Module] = {}
    for layer in held:
        inside = set(map(id, layer.modules()))
        own = [row for row in rows if id(row.branch) in inside]
        if own and own[0].norm is not None and own[0].placement in ("pre", "sandwich"):
            argument[id(own[0].norm)] = layer
    final = attached.ends.final_norm
    if final is not None and held and rows[-1].placement in ("pre", "sandwich"):
        last[id(final)] = held[-1]
    taken = {id(site.module) for site in attached.plan.sites if site.side == "output"}
    for site in attached.plan.sites:
        key = id(site.module)
        if site.side == "input" and key in argument:
            yield argument[key], "argument", site.stack
        elif site.side == "input" and key in last and id(last[key]) not in taken:
            yield last[key], "output", site.stack
        else:
            yield site.module, site.side, site.stack


def _guarding_hooks() -> ExitStack:
    """Until it is closed Dynamo distinguishes a module with taps from one without, if both are of one class."""
    import torch._dynamo.config as settings

    stack = ExitStack()
    if hasattr(settings, "skip_nnmodule_hook_guards"):
        stack.callback(setattr, settings, "skip_nnmodule_hook_guards", settings.skip_nnmodule_hook_guards)
        settings.skip_nnmodule_hook_guards = False
    return stack


def _device(module: nn.Module, model: nn.Module) -> torch.device:
    """Where a module's tensors are."""
    for owner in (module, model):
        for parameter in owner.parameters():
            return parameter.device
    return torch.device("cpu")

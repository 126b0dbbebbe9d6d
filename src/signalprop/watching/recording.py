"""The Recorder: hooks that reduce every probe point to three numbers while a model runs forward and backward."""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.attachment.attached import Attached
from signalprop.attachment.live_model import is_compiled
from signalprop.attachment.mapping import describe, number
from signalprop.errors import InputError
from signalprop.watching.reduction import Padding, Rows, Sums, moments

Result = Rows | Sums
_LOCK = threading.RLock()  # held for the few instructions that decide whose pass is recorded, never while one runs


class Recorder:
    """One measured pass: attach, run the model forward (and backward), read `forward` and `gradient`, detach.

    Of several forward passes the first is recorded, of passes in several threads the first that began. Under gradient
    checkpointing a module runs twice: the first run is recorded, and gradient hooks go to the first tensor that has a
    gradient, which is the second one's with `use_reentrant=True`. Nothing but `reduction.Rows` or `Sums` per point is
    kept, save the input of a parallel layer until its attention branch is known.

    Attributes:
        forward, gradient: moments by site index; of the sums of parallel layers by -1 - sublayer index.
        calls: how often the model ran.
        shapes: (batch, tokens) of the stream by stack.
    """

    def __init__(self, attached: Attached, *, backward: bool) -> None:
        self.attached = attached
        self.model, self._outer = attached.model, attached.outer
        self.mapping = mapping = attached.mapping
        self.plan = plan = attached.plan
        self.backward = backward
        self.forward: dict[int, Result] = {}
        self.gradient: dict[int, Result] = {}
        self.shapes: dict[int, tuple[int, int]] = {}
        self.calls = 0
        self.mask_ignored = False
        self._given_padding: dict[int, dict[int, Tensor | None]] = {}
        self._padding: dict[int, Padding | None] = {}
        self._attached = False
        self._owner: int | None = None  # the thread of the pass that is recorded, while it runs
        self._recorded_by: int | None = None  # the same thread, afterwards
        self._skipping: set[int] = set()  # threads in a pass that is not recorded, or behind one
        self._hooked: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self._counts: dict[tuple[int, str], int] = {}
        self._last: tuple[weakref.ref[Tensor], int, Result] | None = None
        self._open_sums: dict[int, Tensor] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._stance: ExitStack | None = None
        # parallel layers: attention rows whose sum is formed here, by the site of their input and of their branch
        virtual = [i for i, leave in enumerate(plan.stream_out) if leave < 0]
        self._sum_entry = {plan.stream_in[i]: i for i in virtual}
        self._sum_branch = {plan.branch[i]: i for i in virtual}
        self._skip = {i: number(mapping.sublayers[i].skip) for i in virtual}
        self._beta = {i: mapping.sublayers[i].multiplier for i in virtual}

    # --- attaching -----------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put the hooks on; compiled modules run uncompiled until `detach`."""
        try:
            self._attached = True
            self._stance = uncompiled(self._outer)
            self._handles.append(self.model.register_forward_pre_hook(self._model_starts, with_kwargs=True))
            self._handles.append(self.model.register_forward_hook(self._model_ends, always_call=True))
            groups: dict[tuple[int, str], list[int]] = {}
            for index, site in enumerate(self.plan.sites):
                groups.setdefault((id(site.module), site.side), []).append(index)
            for indices in groups.values():
                site = self.plan.sites[indices[0]]
                if site.side == "input":
                    hook = partial(self._enters, indices)
                    self._handles.append(site.module.register_forward_pre_hook(hook, with_kwargs=True))
                else:
                    self._handles.append(site.module.register_forward_hook(partial(self._leaves, indices)))
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Take every hook off and let compiled modules run compiled again; harmless when nothing is attached."""
        with _LOCK:  # a pass that another thread is in goes on, unrecorded
            self._attached = False
            for handle in (*self._handles, *self._hooked.values()):
                handle.remove()
            self._handles.clear()
            self._hooked.clear()
            self._open_sums.clear()
            self._last = None
        if self._stance is not None:
            self._stance.close()
            self._stance = None

    def give_padding(self, padding: dict[int, Tensor | None]) -> None:
        """Which positions count, by stack, in the pass that this thread is about to begin; instead of its mask."""
        self._given_padding[threading.get_ident()] = padding

    # --- hooks ---------------------------------------------------------------------------------------

    def _model_starts(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        me = threading.get_ident()
        given = self._given_padding.pop(me, None)
        with _LOCK:
            evaluates = self._evaluates()
            self.calls += not evaluates
            if evaluates or self.calls > 1:
                self._skipping.add(me)
                return
            self._skipping.discard(me)
            self._owner = me
            self._forget()
        names = (self.mapping.padding, self.mapping.decoder_padding)
        if given is None:
            bound = {**inspect.signature(model.forward).bind_partial(*args).arguments, **kwargs}
            values = {0: bound.get(names[0]), 1: bound.get(names[1])}
            if self.plan.layout.stack.min() == 1:
                values = {1: values[0]}
            given = {}
            for stack, value in values.items():
                plain = isinstance(value, Tensor) and value.ndim == 2
                stride = self.mapping.padding_stride if stack == self.plan.layout.stack.min() else 1
                given[stack] = value[:, ::stride] if isinstance(value, Tensor) and plain else None
                self.mask_ignored |= value is not None and not plain
        self._padding = {stack: None if mask is None else Padding.of(mask) for stack, mask in given.items()}

    def _model_ends(self, *_: Any) -> None:
        me = threading.get_ident()
        with _LOCK:
            if me == self._owner and me not in self._skipping:
                self._owner, self._recorded_by = None, me
            elif self._evaluates() or me in (self._owner, self._recorded_by):
                self._skipping.discard(me)

    def _evaluates(self) -> bool:
        """Whether this pass is an evaluation between two training steps."""
        return self.backward and not torch.is_grad_enabled()

    def _forget(self) -> None:
        """Drop what was seen before the pass: the end of another thread's, which began before the hooks were on."""
        for handle in self._hooked.values():
            handle.remove()
        for seen in (self.forward, self.gradient, self.shapes, self._hooked, self._counts, self._open_sums):
            seen.clear()
        self._last = None

    def _ignores(self) -> bool:
        """Whether this thread is in a pass that is not recorded.

        Where none is being recorded, all others are followed: a checkpointed layer is run again in a thread of
        autograd's own, and a model can be called by its parts.
        """
        me = threading.get_ident()
        return not self._attached or me in self._skipping or self._owner not in (None, me)

    def _enters(self, indices: list[int], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._ignores():
            first = args[0] if args else None
            self._meet(indices, first if isinstance(first, Tensor) else first_tensor(args or kwargs.values()))

    def _leaves(self, indices: list[int], module: nn.Module, args: Any, output: Any) -> None:
        if not self._ignores():
            self._meet(indices, output if isinstance(output, Tensor) else first_tensor(output))

    def _meet(self, indices: list[int], tensor: Tensor | None) -> None:
        index = indices[0]
        site = self.plan.sites[index]
        if site.calls > 1:
            key = (id(site.module), site.side)
            count = self._counts.get(key, 0)
            self._counts[key] = count + 1
            matching = [i for i in indices if self.plan.sites[i].call == count % site.calls]
            if not matching:
                return
            index = matching[0]
        if tensor is None or self._in_tokens(index, tensor).ndim != 3:
            got = "no tensor" if tensor is None else f"shape {tuple(tensor.shape)}"
            raise InputError(
                f"{self.where(index)}: expected a tensor (batch, tokens, features), got {got}; mend the mapping"
            )
        if index not in self.forward:
            self._record(index, tensor)
        if self.backward and index not in self._hooked and tensor.requires_grad:
            hook = partial(self._flows_back, index)
            with _LOCK:
                if not self._ignores():
                    self._hooked[index] = tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _in_tokens(self, index: int, tensor: Tensor) -> Tensor:
        """The tensor as (batch, tokens, features), where a model has put all its tokens in one row (OPT)."""
        shape = self.shapes.get(self.plan.sites[index].stack)
        if tensor.ndim == 2 and shape is not None and tensor.shape[0] == shape[0] * shape[1]:
            return tensor.reshape(*shape, tensor.shape[1])
        return tensor

    def _record(self, index: int, tensor: Tensor) -> None:
        plain = self._in_tokens(index, tensor.detach())
        stack = self.plan.sites[index].stack
        padding = self._padding_for(stack, plain)
        if padding is not None and padding.keep.shape != plain.shape[:2]:
            raise InputError(
                f"{self.where(index)}: the padding mask has shape {tuple(padding.keep.shape)}, the stream "
                f"{tuple(plain.shape[:2])}; expected (batch, tokens) of both to agree"
            )
        found = {index: moments(plain, padding)}
        row = self._sum_branch.get(index)
        entered = None if row is None else self._open_sums.get(row)
        if row is not None and entered is not None:
            given = self._beta[row]
            beta = given.detach() if isinstance(given, Tensor) else given
            unit_in, unit_branch, _ = self.mapping.sublayers[row].units
            kept, added = self._skip[row] * unit_in, beta * unit_branch
            found[-1 - row] = moments(kept * entered + added * plain, padding)
        with _LOCK:
            if self._ignores():
                return
            self.shapes.setdefault(stack, (plain.shape[0], plain.shape[1]))
            self.forward |= found
            if row is not None:
                self._open_sums.pop(row, None)
            row = self._sum_entry.get(index)
            if row is not None:
                self._open_sums[row] = plain

    def _flows_back(self, index: int, gradient: Tensor) -> None:
        if index in self.gradient:
            return
        last = self._last
        # an addition hands one and the same gradient to the branch and to the stream: reduce it once
        if last is not None and last[0]() is gradient and last[1] == gradient._version:
            self.gradient[index] = last[2]
            return
        plain = gradient.detach()
        tokens = self._in_tokens(index, plain)
        result = moments(tokens, self._padding_for(self.plan.sites[index].stack, plain))
        self.gradient[index] = result
        # weakly: what is held cannot be added to in place, nor its memory be used again, at twice the cost of all else
        self._last = (weakref.ref(gradient), gradient._version, result)

    def _padding_for(self, stack: int, tensor: Tensor) -> Padding | None:
        padding = self._padding.get(stack)
        if padding is not None and padding.keep.device != tensor.device:  # a model spread over several devices
            return padding.to(tensor.device)
        return padding

    # --- words ---------------------------------------------------------------------------------------

    def notes(self) -> list[str]:
        """What the reader of the Profile should know about the pass."""
        out = [f"measured in {'training' if self.model.training else 'evaluation'} mode"]
        if self.calls > 1:
            out.append(f"the model ran {self.calls} times in this step; the first pass was recorded")
        if self.mask_ignored:
            out.append("the attention mask is not of shape (batch, tokens); every position was counted")
        return out

    def where(self, index: int) -> str:
        """Sublayer and probe point of a site, in words."""
        for name in ("stream_in", "branch", "stream_out"):
            points: tuple[int, ...] = getattr(self.plan, name)
            if index in points:
                return f"{describe(self.plan.layout, points.index(index))}, {name}"
        return f"{describe(self.plan.layout, -1 - index)}, stream_out"


def first_tensor(values: Any) -> Tensor | None:
    """The first tensor of a tuple, list, dictionary view or model output; None where there is none."""
    if isinstance(values, Tensor):
        return values
    if hasattr(values, "values"):
        values = values.values()
    try:
        return next((value for value in values if isinstance(value, Tensor)), None)
    except TypeError:
        return None


def uncompiled(model: nn.Module) -> ExitStack:
    """Make compiled code run eagerly until the returned stack is closed.

    Hooks that are added after compilation are silently not called, so a probed step has to run uncompiled.

    Raises:
        InputError: a module is compiled, and this version of PyTorch cannot switch it off.
    """
    stack = ExitStack()
    if "torch._dynamo" in sys.modules:  # nothing can be compiled before that is imported
        set_stance: Callable[..., Any] | None = getattr(torch.compiler, "set_stance", None)
        if set_stance is not None:
            stack.enter_context(_eagerly(set_stance))
        elif any(is_compiled(module) for module in model.modules()):
            raise InputError(
                f"the model is compiled, and hooks are not called in compiled code; torch {torch.__version__} cannot "
                "switch it off: measure before torch.compile, or use torch 2.6 or newer"
            )
    return stack


_eager: list[ExitStack] = []  # one for each user; the first holds what PyTorch is to go back to after the last


@contextmanager
def _eagerly(set_stance: Callable[..., Any]) -> Iterator[None]:
    """The stance is one for all threads, and probes may end in another order than they began in."""
    with _LOCK:
        held = _eager[0] if _eager else ExitStack()
        if not _eager:
            held.enter_context(set_stance("force_eager"))
        _eager.append(held)
    try:
        yield
    finally:
        with _LOCK:
            _eager.pop()
            if not _eager:
                held.close()

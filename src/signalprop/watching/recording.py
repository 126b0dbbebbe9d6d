"""The Recorder: hooks that reduce every probe point to three numbers while a model runs forward and backward."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from collections.abc import Mapping as Dictionary
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.attachment.anatomy import Anatomy
from signalprop.attachment.mapping import masks_of, number
from signalprop.errors import InputError
from signalprop.hooks import LOCK, Hooks, rows_of
from signalprop.watching.between_streams import products
from signalprop.watching.first_positions import DECODER, check_length, later
from signalprop.watching.gradient_hooks import GradientHooks
from signalprop.watching.passes import Pass, Result, in_tokens
from signalprop.watching.reduction import Padding, moments

Begins = Callable[["Recorder", nn.Module, tuple[Any, ...], dict[str, Any]], None]


class Recorder(Pass):
    """One measured pass: attach, run the model forward (and backward), read `forward` and `gradient`, detach.

    Of several forward passes the first is recorded, of passes in several threads the first that began. Under gradient
    checkpointing a module runs twice: the first run is recorded, and gradients as `GradientHooks` says. Nothing but
    `reduction.Rows` or `Sums` per point is kept, save the input of a parallel layer until its attention is known.

    Args:
        begins: called before every pass with this recorder, the model and its arguments. padding: which positions
            count, by stack, instead of the pass's masks.
        skip_first: positions that do not count at the start of every sequence of a decoder. lenient: none such where
            sequences are up to twice as long; else an error where no position is left.
    """

    def __init__(
        self, attached: Anatomy, *, backward: bool, begins: Begins | None = None,
        padding: Dictionary[int, Tensor | None] | None = None, skip_first: int = 0, lenient: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(attached, backward=backward)
        plan = self.plan
        self._begins = begins
        self._skip_first, self._lenient = skip_first, lenient
        self._given_padding = padding
        self._padding: dict[int, Padding | None] = {}
        self._attached = False
        self._rows: tuple[int, int] | None = None  # of sequences and tokens that the model is called with
        self._owner: int | None = None  # the thread of the pass that is recorded, while it runs
        self._recorded_by: int | None = None  # the same thread, afterwards
        self._skipping: set[int] = set()  # threads in a pass that is not recorded, or after one
        self._gradients = GradientHooks(self.gradient.__setitem__)
        self._open_sums: dict[int, Tensor] = {}
        self._hooks = Hooks(self._ignores)
        # parallel layers: attention rows whose sum is formed here, by the site of their input and of their branch
        virtual = [i for i, leave in enumerate(plan.stream_out) if leave < 0]
        self._sum_entry = {plan.stream_in[i]: i for i in virtual}
        self._sum_branch = {plan.branch[i]: i for i in virtual}
        self._skip = {i: number(attached.rows[i].skip) for i in virtual}
        self._beta = {i: attached.rows[i].multiplier for i in virtual}

    # --- attaching -----------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put the hooks on; compiled modules run uncompiled until `detach`."""
        self._attached = True
        self._hooks.before(self.model, self._model_starts, everywhere=True)
        self._hooks.after(self.model, self._model_ends, always=True, everywhere=True)
        self._hooks.sites(self.plan.sites, self._meet)
        try:
            self._hooks.attach()
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Take every hook off and let compiled modules run compiled again; harmless when nothing is attached."""
        with LOCK:  # a pass that another thread is in goes on, unrecorded
            self._attached = False
            self._gradients.clear()
            self._open_sums.clear()
        self._hooks.detach()

    def starts(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is being called already, with these arguments, and this was attached inside the call."""
        self._model_starts(model, args, kwargs)

    # --- hooks ---------------------------------------------------------------------------------------

    def _model_starts(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._begins is not None:
            self._begins(self, model, args, kwargs)
        me = threading.get_ident()
        given = self._given_padding
        with LOCK:
            evaluates = self._evaluates()
            self.calls += not evaluates
            if evaluates or self.calls > 1:
                self._skipping.add(me)
                return
            self._skipping.discard(me)
            self._owner = me
            self._forget()
        self._rows = rows_of([*args, *kwargs.values()])
        if given is None:
            bound = {**inspect.signature(model.forward).bind_partial(*args).arguments, **kwargs}
            given, odd = masks_of(bound, self.mapping)
            self.mask_ignored |= odd
        self._padding = {stack: None if mask is None else Padding.of(mask) for stack, mask in given.items()}

    def _model_ends(self, *_: Any) -> None:
        me = threading.get_ident()
        with LOCK:
            if me == self._owner and me not in self._skipping:
                self._owner, self._recorded_by = None, me
            elif self._evaluates() or me in (self._owner, self._recorded_by):
                self._skipping.discard(me)

    def _evaluates(self) -> bool:
        """Whether this pass is an evaluation between two training steps."""
        return self.backward and not torch.is_grad_enabled()

    def _forget(self) -> None:
        """Drop what was seen before the pass: the end of another thread's, which began before the hooks were on."""
        self._gradients.clear()
        for seen in (self.forward, self.gradient, self.between, self.shapes, self._open_sums):
            seen.clear()
        self._hooks.begin()

    def _ignores(self) -> bool:
        """Whether this thread is in a pass that is not recorded.

        Where none is being recorded, all others are followed: a checkpointed layer is run again in a thread of
        those of autograd, and a model can be called by its parts.
        """
        me = threading.get_ident()
        return not self._attached or me in self._skipping or self._owner not in (None, me)

    def _meet(self, index: int, tensor: Tensor | None) -> None:
        plain = None if tensor is None else self._in_tokens(index, tensor.detach())
        if tensor is None or plain is None or plain.ndim != 3:
            got = "no tensor" if tensor is None else f"shape {tuple(tensor.shape)}"
            raise InputError(
                f"{self.plan.where(index)}: expected a tensor (batch, tokens, features), got {got}; fix the mapping"
            )
        if index not in self.forward:
            self._record(index, plain)
        if self.backward and tensor.requires_grad:
            with LOCK:
                if not self._ignores():
                    self._gradients.see(index, tensor, self._reduced)

    def _in_tokens(self, index: int, tensor: Tensor) -> Tensor:
        if tensor.ndim == 3 and not self.mapping.tokens_first:
            return tensor
        if tensor.ndim == 4 and self.mapping.architecture.streams is not None:  # (batch, tokens, streams, features)
            return tensor.flatten(2)
        stack = self.plan.sites[index].stack
        if tensor.ndim == 2 and stack not in self.shapes:
            rows = (1, len(tensor)) if self._rows is None else self._rows
            if self._rows is None:
                self.folded = "the stream is (tokens, features): all are taken as one sequence"
            return in_tokens(tensor, rows)
        if tensor.ndim == 4:
            self.folded = "the stream is (batch, height, width, features); its rows and columns are taken as tokens"
        elif self.mapping.tokens_first:
            self.folded = "the stream is (tokens, batch, features): correlations are over the tokens"
        return in_tokens(tensor, self.shapes.get(stack), tokens_first=self.mapping.tokens_first)

    def _record(self, index: int, plain: Tensor) -> None:
        stack = self.plan.sites[index].stack
        padding = self._padding_for(stack, plain)
        if padding is not None and padding.keep.shape != plain.shape[:2]:
            raise InputError(
                f"{self.plan.where(index)}: the padding mask has shape {tuple(padding.keep.shape)}, the stream "
                f"{tuple(plain.shape[:2])}; expected (batch, tokens) of both to agree"
            )
        found = {index: moments(plain, padding)}
        streams = self.mapping.architecture.streams
        shared = streams and index in self.plan.stream_out and products(plain, streams.n, padding)
        row = self._sum_branch.get(index)
        entered = None if row is None else self._open_sums.get(row)
        if row is not None and entered is not None:
            given = self._beta[row]
            beta = given.detach() if isinstance(given, Tensor) else given
            unit_in, unit_branch, _ = self.attached.rows[row].units
            kept, added = self._skip[row] * unit_in, beta * unit_branch
            found[-1 - row] = moments(kept * entered + added * plain, padding)
        with LOCK:
            if self._ignores():
                return
            self.shapes.setdefault(stack, (plain.shape[0], plain.shape[1]))
            self.forward |= found
            if isinstance(shared, Tensor):
                self.between[index] = shared
            if row is not None:
                self._open_sums.pop(row, None)
            row = self._sum_entry.get(index)
            if row is not None:
                self._open_sums[row] = plain

    def _reduced(self, index: int, gradient: Tensor) -> Result:
        return moments(self._in_tokens(index, gradient), self._padding_for(self.plan.sites[index].stack, gradient))

    def _padding_for(self, stack: int, tensor: Tensor) -> Padding | None:
        padding = self._padding.get(stack)
        short = self._lenient and tensor.shape[1] <= 2 * self._skip_first
        if self._skip_first and not short and stack == DECODER and stack not in self.shapes:  # its first point
            check_length(tensor.shape[1], self._skip_first)
            real = tensor.new_ones(tensor.shape[:2], dtype=torch.bool) if padding is None else padding.keep
            self._padding[stack] = padding = Padding.of(later(real, self._skip_first))
        if padding is not None and padding.keep.device != tensor.device:  # a model spread over several devices
            return padding.to(tensor.device)
        return padding

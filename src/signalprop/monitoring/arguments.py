"""What a model is called with in a training step: a few sequences to keep."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from signalprop.attachment.arguments import TOKENS, batch_in
from signalprop.attachment.mapping import Mapping
from signalprop.data.batches import Batch
from signalprop.errors import InputError
from signalprop.network.inputs import InputStatistics
from signalprop.watching.recording import Recorder


class Arguments:
    """Sees a training step's arguments, and stores the first few sequences of models that read one sequence of tokens.

    Args:
        kept: how many sequences are stored, from the first step seen.

    Attributes:
        reads_tokens: whether the model reads one sequence of tokens.
    """

    def __init__(self, mapping: Mapping, kept: int) -> None:
        self._kept, self._mapping = kept, mapping
        self.reads_tokens = mapping.architecture.input == "tokens" and mapping.architecture.kind != "encoder-decoder"
        self._held: dict[str, Tensor] = {}

    def names(self, model: nn.Module) -> tuple[str, ...]:
        """The arguments of the model's forward that `keep` looks at."""
        return (self._ids_of(model), self._mapping.padding, "labels") if self.reads_tokens else ()

    def see(self, recorder: Recorder, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pre-hook of the model, which has to run before the recorder's."""
        if self.reads_tokens and not recorder.calls and torch.is_grad_enabled():
            self.keep(model, {**inspect.signature(model.forward).bind_partial(*args).arguments, **kwargs})

    def keep(self, model: nn.Module, bound: dict[str, Any]) -> None:
        """Keep the first sequences of the first pass whose arguments are shown."""
        ids = bound.get(self._ids_of(model))
        if self._held or not self.reads_tokens:
            return
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
            return
        axis = int(self._mapping.reads_tokens_first)
        given = {TOKENS: ids, **{name: bound.get(name) for name in self.names(model)[1:]}}
        self._held = {
            name: x.narrow(axis * (x.ndim == 2), 0, min(self._kept, ids.shape[axis])).detach().clone()
            for name, x in given.items()
            if isinstance(x, Tensor) and x.ndim in (1, 2)
        }

    def _ids_of(self, model: nn.Module) -> str:
        names = inspect.signature(model.forward).parameters
        return "input_ids" if "input_ids" in names else next(iter(names))  # the first, in a user's model

    def batch(self) -> Batch:
        """The stored sequences as a Batch."""
        found = batch_in(self._mapping, self._held, "the first sampled step")
        if found is None or found.tokens is None:
            raise InputError("the step's arguments hold no token ids; give batch=, a signalprop.data.Batch")
        ids, causal = found.tokens, self._mapping.architecture.causal
        if self._computes_its_loss and causal and found.keep is None and ids.shape[1] > 1:
            return Batch(tokens=ids[:, :-1], targets=ids[:, 1:], source=found.source)
        return found

    @property
    def _computes_its_loss(self) -> bool:
        """Whether the model may be given targets; which number its loss leaves out (-1, -100) is not known."""
        return self._mapping.found is not None or "targets" in getattr(self._mapping.arguments, "inputs", {})

    def statistics(self) -> InputStatistics | None:
        """Input statistics of the kept sequences; None (the default ones) if there are none."""
        return self.batch().statistics(self._mapping.architecture) if self._held else None

"""What a model is called with in a training step: its padding, and a few sequences to keep."""

from __future__ import annotations

import inspect
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from signalprop.attachment.mapping import Mapping
from signalprop.data.batches import Batch
from signalprop.errors import InputError
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics
from signalprop.watching.first_positions import later
from signalprop.watching.recording import Recorder


class Arguments:
    """Sees a training step's arguments: leaves first positions out of the record, and keeps the first few sequences.

    Sequences of models that read one token sequence are stored. First positions are left out of decoders alone: those
    of an encoder can carry the whole gradient (class tokens).

    Args:
        skip_first: positions that statistics leave out. kept: how many sequences are stored, from the first step seen.

    Attributes:
        reads_tokens: whether the model reads one sequence of tokens.
    """

    def __init__(self, mapping: Mapping, skip_first: int, kept: int) -> None:
        self.skip_first, self._kept, self._mapping = skip_first, kept, mapping
        self.reads_tokens = mapping.architecture.input == "tokens" and mapping.architecture.kind != "encoder-decoder"
        self._ids: Tensor | None = None
        self._mask: Tensor | None = None
        self._labels: Tensor | None = None

    def names(self, model: nn.Module) -> tuple[str, ...]:
        """The arguments of the model's forward that `keep` looks at."""
        return (self._ids_of(model), self._mapping.padding, "labels") if self.reads_tokens else ()

    def see(self, recorder: Recorder, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pre-hook of the model, which has to run before the recorder's own."""
        if not self.reads_tokens or recorder.calls or not torch.is_grad_enabled():
            return
        bound = {**inspect.signature(model.forward).bind_partial(*args).arguments, **kwargs}
        self.keep(model, bound)
        bound = self._by_sequence(bound)
        ids, given = bound.get(self._ids_of(model)), bound.get(self._mapping.padding)
        if not _is_ids(ids):
            return
        mask = given if isinstance(given, Tensor) and given.shape == ids.shape else None
        unread = mask is None and given is not None  # a mask of another shape
        short = ids.shape[1] <= 2 * self.skip_first
        if self.skip_first and self._mapping.architecture.causal and not short and not unread:
            real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
            recorder.give_padding({int(recorder.plan.layout.stack.min()): later(real, self.skip_first)})

    def keep(self, model: nn.Module, bound: dict[str, Any]) -> None:
        """Keep the first sequences of the first pass whose arguments are shown."""
        bound = self._by_sequence(bound)
        ids, labels, mask = bound.get(self._ids_of(model)), bound.get("labels"), bound.get(self._mapping.padding)
        if self._ids is not None or not self.reads_tokens or not _is_ids(ids):
            return
        fits = isinstance(mask, Tensor) and mask.shape == ids.shape
        self._ids = ids[: self._kept].detach().clone()
        self._mask = mask[: self._kept].detach().clone() if isinstance(mask, Tensor) and fits else None
        self._labels = labels[: self._kept].detach().clone() if isinstance(labels, Tensor) else None

    def _by_sequence(self, bound: dict[str, Any]) -> dict[str, Any]:
        """Arguments (batch, tokens), of a model that is called with (tokens, batch) too."""
        if not self._mapping.reads_tokens_first:
            return bound
        return {k: v.T if isinstance(v, Tensor) and v.ndim == 2 else v for k, v in bound.items()}

    def _ids_of(self, model: nn.Module) -> str:
        names = inspect.signature(model.forward).parameters
        return "input_ids" if "input_ids" in names else next(iter(names))  # the first, in a model of one's own

    def batch(self) -> Batch:
        """The stored sequences as a Batch."""
        a = self._mapping.architecture
        if self._ids is None:
            raise InputError("the step's arguments hold no token ids; give batch=, a signalprop.data.Batch")
        ids = self._ids.cpu().numpy()
        keep = None if self._mask is None else (self._mask != 0).cpu().numpy()
        if self._computes_its_loss and a.causal and keep is None and ids.shape[1] > 1:
            return Batch(tokens=ids[:, :-1], targets=ids[:, 1:], source="the first sampled step")
        return Batch(tokens=ids, targets=self._targets(a, ids, keep), keep=keep, source="the first sampled step")

    @property
    def _computes_its_loss(self) -> bool:
        """Whether the model may be given targets; which number its own loss leaves out (-1, -100) is not known."""
        return self._mapping.anatomy is not None or "targets" in getattr(self._mapping.arguments, "inputs", {})

    def statistics(self) -> InputStatistics | None:
        """Input statistics of the kept sequences; None (the default ones) where there are none."""
        return None if self._ids is None else self.batch().statistics(self._mapping.architecture)

    def _targets(self, a: Architecture, ids: Any, keep: Any) -> Any:
        labels = None if self._labels is None else self._labels.cpu().numpy()
        if a.head == "classes" and labels is not None and labels.ndim == 1:
            return labels
        if labels is None or labels.shape != ids.shape:
            labels = ids if keep is None else np.where(keep, ids, -1)
        targets = np.where(labels < 0, -1, labels)
        if a.causal:  # labels stand at their own token, targets at the one before it
            targets = np.concatenate([targets[:, 1:], np.full_like(targets[:, :1], -1)], 1)
        return targets


def _is_ids(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.ndim == 2 and not value.is_floating_point()

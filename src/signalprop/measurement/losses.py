"""The loss whose gradients are measured, and gradients that are borrowed for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Mapping as Dictionary
from contextlib import contextmanager
from inspect import signature
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from signalprop.data.batches import Batch
from signalprop.errors import InputError
from signalprop.hooks import loss_and_logits

Loss = Callable[[Any], Tensor]
ASSUMED = "the loss is assumed to be the mean cross-entropy of the next token (loss= gives another)"
_MASK = "attention_mask"


def loss_of(
    output: Any,
    batch: Batch | Dictionary[str, Any],
    loss: Loss | None,
    *,
    tokens_first: bool = False,
    model: nn.Module | None = None,
) -> Tensor:
    """The loss to differentiate; see `measure`.

    Args:
        tokens_first: the model is called with ids (tokens, batch). model: for messages.
    """
    if loss is not None:
        value = loss(output)
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            raise InputError("loss= has to return one number with a gradient (a tensor of one element)")
        return value
    own, logits = loss_and_logits(output)
    if tokens_first and isinstance(logits, Tensor) and logits.ndim == 3:
        logits = logits.transpose(0, 1)
    fits = isinstance(batch, Batch) and isinstance(logits, Tensor) and logits.shape[:-1] == batch.targets.shape
    if isinstance(own, Tensor) and not fits:
        return own
    ids = None if isinstance(batch, Batch) else next_ids(logits, batch, tokens_first)
    if ids is not None:
        return _cross_entropy(logits[:, :-1], ids)
    if not isinstance(logits, Tensor):
        raise InputError(
            "the model returns no logits and no loss; give loss=, a function of its output, or backward=False "
            "(--no-gradient)"
        )
    if not isinstance(batch, Batch):
        taken = () if model is None else signature(model.forward).parameters
        name = next((name for name in ("labels", "targets", "target") if name in taken), "labels")
        raise InputError(
            f"there are no labels for the loss; give loss=, a function of the model's output, add `{name}` to the "
            "arguments, or give backward=False (--no-gradient)"
        )
    targets = torch.as_tensor(np.ascontiguousarray(batch.targets), device=logits.device)
    if logits.shape[:-1] != targets.shape:
        raise InputError(
            f"targets have shape {tuple(targets.shape)}, the logits "
            f"{tuple(logits.shape)}; give a batch with such targets, loss=, or backward=False (--no-gradient)"
        )
    if targets.numel() and int(targets.max()) >= logits.shape[-1]:
        raise InputError(
            f"targets go up to {int(targets.max()):,}, the model's output has {logits.shape[-1]:,} features, as of one "
            "without a head; give a batch with such targets, loss=, or backward=False (--no-gradient)"
        )
    return _cross_entropy(logits, targets)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Over positions whose target is not -1; in float32, of float64 logits in float64."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, -2), targets.flatten().long(), ignore_index=-1)


def takes_next(output: Any, arguments: Dictionary[str, Any], tokens_first: bool) -> bool:
    """Whether `loss_of` takes the cross-entropy of the next token, of a model that gives no loss."""
    own, logits = loss_and_logits(output)
    if tokens_first and isinstance(logits, Tensor) and logits.ndim == 3:
        logits = logits.transpose(0, 1)
    return not isinstance(own, Tensor) and next_ids(logits, arguments, tokens_first) is not None


def next_ids(logits: Any, arguments: Dictionary[str, Any], tokens_first: bool) -> Tensor | None:
    """The token ids that a model of logits (batch, tokens, words) was called with, each at the position before its own.

    -1 where a mask says padding; None where no argument, or several, could be the ids.
    """
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[1] < 2:
        return None
    turned = {k: v.T if tokens_first and isinstance(v, Tensor) and v.ndim == 2 else v for k, v in arguments.items()}
    found = {
        name: value
        for name, value in turned.items()
        if isinstance(value, Tensor)
        and not value.is_floating_point()
        and value.shape == logits.shape[:2]
        and value.dtype != torch.bool
        and name != _MASK
        and int(value.max()) < logits.shape[2]
    }
    found = {"input_ids": found["input_ids"]} if "input_ids" in found else found
    if len(found) != 1:
        return None
    (ids,) = found.values()
    mask = turned.get(_MASK)
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        ids = ids.masked_fill(mask == 0, -1)
    return ids[:, 1:]


@contextmanager
def lent_gradients(model: nn.Module) -> Iterator[None]:
    """Every floating parameter takes part in the backward pass; afterwards gradients and flags are as before.

    Gradients of parameters are dropped as they come (`.grad` stays None): what passes through is read, and all of them
    at once would take as much memory as the weights.
    """
    parameters = [p for p in model.parameters() if p.is_floating_point() and p.is_leaf]
    if any(p.is_inference() for p in parameters):
        raise InputError(
            "the model was created under torch.inference_mode, so it has no gradients; create or load it outside"
        )
    before = [(p.requires_grad, p.grad) for p in parameters]
    for p in parameters:
        p.requires_grad_(True)
        p.grad = None
    handles = [p.register_post_accumulate_grad_hook(_drop) for p in parameters]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for p, (flag, gradient) in zip(parameters, before, strict=True):
            p.requires_grad_(flag)
            p.grad = gradient


def _drop(parameter: Tensor) -> None:
    parameter.grad = None

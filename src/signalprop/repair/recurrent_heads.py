"""Heads of recurrent mixers that cannot work or learn with the numbers that `A_log` and `dt_bias` hold.

A head forgets by exp(-rate step) per token: rate exp(A_log), step softplus(dt_bias) where the input adds nothing
(Mamba-2, the gated delta rule). Both are stored in the model's type and computed in float32, as the models do. A draw
from an interval that ends at 0 rounds to 0 in bfloat16 every few hundred heads: its logarithm is -inf, and the head
keeps all that it ever read, and A_log gets no gradient (transformers 47831).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.functional import softplus

RATE, STEP = "A_log", "dt_bias"  # the names that models give them


class DeadHead(NamedTuple):
    """One head: path of the parameter that is to blame, number of the head, what it does, in words."""

    path: str
    head: int
    reason: str


def dead_heads(model: nn.Module) -> list[DeadHead]:
    """The heads whose decay per token, where the input adds nothing to the step, is exactly 0, exactly 1, or no number.

    In float32: exactly 1 from rate * step below 2^-25, exactly 0 from above about 104. Modules count that hold
    parameters `A_log` and `dt_bias` with one number per head.
    """
    return [
        DeadHead(f"{path}.{name}".lstrip("."), head, reason)
        for path, module in model.named_modules()
        for name, head, reason in _of(module)
    ]


def _of(module: nn.Module) -> Iterator[tuple[str, int, str]]:
    """(name, head, reason) of a module's dead heads."""
    rates, steps = getattr(module, RATE, None), getattr(module, STEP, None)
    if not (isinstance(rates, Tensor) and isinstance(steps, Tensor)) or rates.ndim != 1 or rates.shape != steps.shape:
        return
    if rates.is_meta or steps.is_meta:
        return
    rates, steps = rates.detach().float(), steps.detach().float()
    rate, step = rates.exp(), softplus(steps)
    held = zip(rates.tolist(), steps.tolist(), rate.tolist(), step.tolist(), (-rate * step).exp().tolist(), strict=True)
    for head, (log, bias, r, s, decay) in enumerate(held):
        if math.isnan(decay):
            name, value = (STEP, bias) if math.isnan(s) or (s == 0 and r < math.inf) else (RATE, log)
            yield name, head, f"{name} {value:.4g}: its decay is NaN"
        elif r == 0:
            yield RATE, head, f"A_log {log:.4g}: its rate exp(A_log) is 0, so it never forgets and cannot learn to"
        elif s == 0:
            yield STEP, head, f"dt_bias {bias:.4g}: its step is 0, so it reads and forgets nothing"
        elif decay in (0.0, 1.0):
            does = "it never forgets" if decay else "it forgets all at every token"
            yield RATE, head, f"A_log {log:.4g}, dt_bias {bias:.4g}: exp(-rate step) is {decay:.0f}, so {does}"

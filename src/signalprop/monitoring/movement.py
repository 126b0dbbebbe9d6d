"""How far every layer moves, at every step: the last steps are kept, and looked through when the loss jumps.

A sampled step comes too late to say which layer went first. This costs a norm of the gradients per step, and a
difference of some thousand weights per parameter; nothing is read back on an accelerator but every few steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from signalprop.attachment.attached import Attached
from signalprop.monitoring.roll_call import is_sharded
from signalprop.network.moments import FloatArray

# Weights of a parameter that are followed: evenly spread ones.
_FOLLOWED = 4096
# Steps between two looks on an accelerator, where each look waits for it.
_LOOK = 8
# A jump is this many robust standard deviations and this share above the median of so many steps before.
_DEVIATIONS, _RISE, _BEFORE = 6.0, 0.1, 10
# Steps before a jump in which a layer may have moved first.
_RECENT = 8
_NORMAL = 1.4826  # standard deviation over median absolute deviation, of a Gaussian


@dataclass(frozen=True, eq=False)
class Jump:
    """A loss that jumped.

    Attributes:
        step, loss: of the jump. usual: the median loss before it. layer: that moved first, None where none did; at:
            the step; quantity: what moved, gradient or update; factor: over its median before.
        steps: that were kept; losses (steps,), gradients and updates (steps, layers): norms of the layer's gradients,
            and of the update that made the weights of the step, over that of the weights.
    """

    step: int
    loss: float
    usual: float
    layer: int | None
    at: int
    quantity: str
    factor: float
    steps: tuple[int, ...]
    losses: FloatArray
    gradients: FloatArray
    updates: FloatArray

    @property
    def text(self) -> str:
        """All of it in one line."""
        said = f"step {self.step}: the loss jumped to {self.loss:.3g} from about {self.usual:.3g}; "
        if self.layer is None:
            return said + "no layer's gradient or weights had moved before"
        what = "the gradient of" if self.quantity == "gradient" else "the weights of"
        return said + f"first moved {what} layer {self.layer}, at step {self.at} ({self.factor:.3g} times as usual)"

    def to_json(self) -> dict[str, Any]:
        """What is written of it: the ring at full resolution."""
        return {
            "first_layer": self.layer,
            "ring": {
                "step": list(self.steps),
                "loss": _finite(self.losses),
                "gradient_norm": [_finite(row) for row in self.gradients],
                "update": [_finite(row) for row in self.updates],
            },
        }


class Movement:
    """The last steps of a training: loss, norm of gradients and relative update of every layer.

    Args:
        layers: the parameters of every layer. kept: steps.
    """

    def __init__(self, layers: Sequence[Sequence[nn.Parameter]], kept: int) -> None:
        self._layers = [[p for p in layer if p.is_floating_point()] for layer in layers]
        self._flat = [p for layer in self._layers for p in layer]
        sizes = [len(layer) for layer in self._layers]
        self._bounds = list(zip(np.cumsum([0, *sizes[:-1]]).tolist(), np.cumsum(sizes).tolist(), strict=True))
        self._ring: deque[tuple[int, FloatArray]] = deque(maxlen=kept)
        self._pending: list[tuple[int, Tensor]] = []
        self._before: list[Tensor] | None = None
        self._quiet_until = 0

    def record(self, step: int, loss: Tensor | float | None) -> list[Jump]:
        """Keep a step, after its backward pass and before its update; the jumps that are known by now."""
        if not self._flat:
            return []
        device = self._flat[0].device
        with torch.no_grad():
            given = torch.as_tensor(math.nan if loss is None else loss, dtype=torch.float32).detach().to(device)
            row = torch.cat([given.mean().reshape(1), self._gradients(device), self._updates(device)])
        self._pending.append((step, row))
        return self.look() if device.type == "cpu" or len(self._pending) >= _LOOK else []

    def look(self) -> list[Jump]:
        """Fetch what is pending, and see whether the loss jumped."""
        pending, self._pending = self._pending, []
        if not pending:
            return []
        jumps = []
        rows = torch.stack([row for _, row in pending]).cpu().double().numpy()
        for (step, _), row in zip(pending, rows, strict=True):
            self._ring.append((step, row))
            jump = self._jump() if step >= self._quiet_until else None
            if jump is not None:
                self._quiet_until = step + (self._ring.maxlen or 0)
                jumps.append(jump)
        return jumps

    def update(self) -> list[float | None]:
        """Relative update of every layer that made today's weights; None before the second step."""
        self.look()
        if not self._ring:
            return []
        values = self._ring[-1][1][1 + len(self._layers) :]
        return [float(v) if math.isfinite(v) else None for v in values]

    def _gradients(self, device: torch.device) -> Tensor:
        norms = torch.zeros(len(self._flat), device=device)
        there = [i for i, p in enumerate(self._flat) if p.grad is not None]
        if there:
            found = torch._foreach_norm([self._flat[i].grad for i in there])  # type: ignore[misc]
            norms[torch.tensor(there, device=device)] = torch.stack([x.float().to(device) for x in found])
        return self._by_layer(norms)

    def _updates(self, device: torch.device) -> Tensor:
        now = [_some(p) for p in self._flat]
        before, self._before = self._before, [x.clone() for x in now]
        if before is None:
            return torch.full((len(self._layers),), math.nan, device=device)
        moved = torch._foreach_norm(torch._foreach_sub(now, before))
        sizes = torch._foreach_norm(before)
        # a parameter counts by all of its entries, of which some are seen
        scale = [math.sqrt(p.numel() / max(1, x.numel())) for p, x in zip(self._flat, now, strict=True)]
        weight = torch.tensor(scale, device=device)
        top, bottom = (torch.stack([x.float().to(device) for x in part]) * weight for part in (moved, sizes))
        return self._by_layer(top) / self._by_layer(bottom)

    def _by_layer(self, norms: Tensor) -> Tensor:
        return torch.stack([torch.linalg.vector_norm(norms[a:b]) for a, b in self._bounds])

    def _jump(self) -> Jump | None:
        steps = tuple(step for step, _ in self._ring)
        table = np.stack([row for _, row in self._ring])
        losses, before = table[:, 0], table[:-1, 0]
        before = before[np.isfinite(before)][-_BEFORE:]  # the last ones: losses fall
        if len(before) < _BEFORE or math.isnan(losses[-2]):  # what is not finite was told
            return None
        usual, spread = _usual(before)
        high = usual + max(_DEVIATIONS * spread, _RISE * abs(usual))
        if losses[-1] <= high or (math.isnan(losses[-1]) and not np.isfinite(losses[-2])):
            return None
        n = len(self._layers)
        gradients, updates = table[:, 1 : 1 + n], table[:, 1 + n :]
        layer, at, quantity, factor = first_moved(gradients, updates)
        return Jump(
            steps[-1], float(losses[-1]), usual, layer, steps[at], quantity, factor, steps, losses, gradients, updates
        )


def first_moved(gradients: FloatArray, updates: FloatArray) -> tuple[int | None, int, str, float]:
    """(layer, row, quantity, factor) that first left what was usual for it, of the last rows; layer None: none did.

    Of several in one step it is the one furthest from its own, in robust standard deviations of logarithms.

    Args:
        gradients, updates: (steps, layers); the last step is that of the jump.
    """
    n = len(gradients)
    first = max(_BEFORE // 2, n - 1 - _RECENT)
    found = []
    with np.errstate(divide="ignore", invalid="ignore"):
        for quantity, table in (("update", np.log(updates)), ("gradient", np.log(gradients))):
            for k in range(table.shape[1]):
                before = table[:first, k][np.isfinite(table[:first, k])]
                if len(before) < 3:
                    continue
                usual, spread = _usual(before)
                away = (table[first:, k] - usual) / max(spread, 0.1)
                moved = np.flatnonzero((away > _DEVIATIONS) | np.isnan(table[first:, k]) | (table[first:, k] == np.inf))
                if len(moved):
                    row = int(moved[0])
                    far = float(np.nan_to_num(away[row], nan=np.inf))
                    with np.errstate(over="ignore"):
                        found.append((row, -far, k, quantity, float(np.exp(table[first + row, k] - usual))))
    if not found:
        return None, n - 1, "", 1.0
    row, _, k, quantity, factor = min(found)
    return k, first + row, quantity, factor


def _usual(values: FloatArray) -> tuple[float, float]:
    """Median, and standard deviation by the median absolute deviation."""
    middle = float(np.median(values))
    return middle, _NORMAL * float(np.median(np.abs(values - middle)))


def _some(p: nn.Parameter) -> Tensor:
    flat = p.detach().reshape(-1)
    return flat[:: max(1, len(flat) // _FOLLOWED)]


def _finite(values: FloatArray) -> list[float | None]:
    return [float(v) if math.isfinite(v) else None for v in values]


def movement_of(attached: Attached, ring: int) -> Movement | None:
    """What keeps the last `ring` steps; None where that is none, no layers are named, or their weights are sharded."""
    if not ring or not attached.layers or is_sharded(attached.model):
        return None
    parts = [layer if isinstance(layer, tuple) else (layer,) for layer in attached.layers]
    return Movement([[p for part in layer for p in part.parameters()] for layer in parts], ring)

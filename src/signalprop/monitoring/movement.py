"""How far every sublayer moves, at every step: the last steps are stored, and searched when the loss jumps.

A sampled step comes too late to say which sublayer went first. This costs a norm of the gradients per step, and a
difference of some thousand weights per parameter; nothing is read back on an accelerator but every few steps. Where
parameters are sharded, processes add up some numbers per sublayer at every step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from signalprop.attachment.anatomy import Anatomy
from signalprop.attachment.rows import AttachedRow, Held
from signalprop.files.storage import finite
from signalprop.monitoring.bands import Departure
from signalprop.monitoring.jumps import Jump, Jumps
from signalprop.monitoring.places import OTHER, Place, sublayers_of
from signalprop.monitoring.processes import distinct_shards, local_part, mesh_of, summed
from signalprop.network.moments import FloatArray

# Weights of a parameter that are followed: evenly spread ones.
_FOLLOWED = 4096
# Steps between two looks on an accelerator, where each look waits for it.
_LOOK = 8
# Steps without a gradient from which a place is idle; before, its layer may have been skipped, as LayerDrop does.
_IDLE = 10
_HALF, _STALLED = (torch.bfloat16, torch.float16), 0.9


class Movement:
    """The last steps of a training: loss, norm of gradients and relative update of every sublayer.

    Args:
        parts: the parameters of every place. kept: steps. mesh: over whose processes parameters are sharded.

    Attributes:
        places: those of `parts`.
    """

    def __init__(self, parts: Sequence[tuple[Place, Sequence[nn.Parameter]]], kept: int, mesh: Any = None) -> None:
        self.places = tuple(place for place, _ in parts)
        layers = [[p for p in part if p.is_floating_point()] for _, part in parts]
        self._flat = [p for layer in layers for p in layer]
        self._owner = [k for k, layer in enumerate(layers) for _ in layer]
        self._mesh = mesh
        # of what several processes hold each counts its share
        self._share = [1.0 if mesh is None else distinct_shards(p) / mesh.size() for p in self._flat]
        self._ring: deque[tuple[int, FloatArray]] = deque(maxlen=kept)
        self._pending: list[tuple[int, Tensor]] = []
        self._before: list[Tensor] | None = None
        self._frozen: set[int] = set()
        self._jumps = Jumps(self.places)
        self._same: deque[Tensor] = deque(maxlen=_IDLE)

    def record(self, step: int, loss: Tensor | float | None) -> list[Jump]:
        """Keep a step, after its backward pass and before its update; the jumps that are known by now."""
        if not self._flat:
            return []
        device = local_part(self._flat[0]).device
        if self._before is None:
            self._frozen = self._intended()
        with torch.no_grad():
            given = torch.as_tensor(math.nan if loss is None else loss, dtype=torch.float32).detach().to(device)
            parts = [given.mean().reshape(1), self._gradients(device), *self._updates(device)]
            row = torch.cat(parts) if self._mesh is None else summed(torch.cat(parts), self._mesh)
        self._pending.append((step, row))
        return self.look() if device.type == "cpu" or len(self._pending) >= _LOOK else []

    def look(self) -> list[Jump]:
        """Fetch what is pending, and see whether the loss or a gradient jumped."""
        pending, self._pending = self._pending, []
        if not pending:
            return []
        jumps = []
        rows = torch.stack([row for _, row in pending]).cpu().double().numpy()
        rows[:, 0] /= 1 if self._mesh is None else self._mesh.size()
        rows[:, 1:] = np.sqrt(rows[:, 1:])
        for (step, _), row in zip(pending, rows, strict=True):
            self._ring.append((step, row))
            jumps += self._jumps.seen([step for step, _ in self._ring], *self._table())
        return jumps

    def update(self) -> tuple[list[float | None], list[float | None]]:
        """Relative updates that gave today's weights, (of every layer, of every place); empty before the second step.

        Of a place that was frozen when the training began, in a layer that was not, None: adapters may be elsewhere.
        So it is of a place that got no gradient in the step before and did in another of the last: it was skipped.
        """
        self.look()
        if not self._ring:
            return [], []
        n = len(self.places)
        moved, sizes = self._ring[-1][1][1 + n :].reshape(2, n)
        layer = np.array([place.layer for place in self.places])
        with np.errstate(divide="ignore", invalid="ignore"):
            both = [np.bincount(layer, part**2) ** 0.5 for part in (moved, sizes)]
            of_layers, own = both[0] / both[1], moved / sizes
        own[list(self._frozen)] = np.nan
        gradients = np.stack([row[1 : 1 + n] for _, row in self._ring])
        trains = np.zeros(n, np.bool_)
        np.logical_or.at(trains, self._owner, [p.requires_grad for p in self._flat])
        skipped = (gradients > 0).any(0) | (len(gradients) < _IDLE)
        skipped &= trains & (moved == 0) & (gradients[-2:][0] == 0)
        own[skipped] = np.nan
        of_layers[np.bincount(layer, ~skipped) == 0] = np.nan
        return finite(of_layers), finite(own)

    def stalled(self) -> float | None:
        """The share of 16-bit weights with a gradient that no step changes, if it was above 90 % in each of the last.

        bfloat16 has steps of 0.4 to 0.8 % of a number: updates below half of that are rounded away.
        """
        shares = torch.stack(list(self._same)).tolist() if len(self._same) == _IDLE else []
        return min(shares) if shares and min(shares) > _STALLED else None

    def sampled(self, step: int) -> tuple[list[float | None], list[float | None], list[Departure]]:
        """The updates, and weights that stand still as an event."""
        share = self.stalled()
        text = f"step {step}: {share or 0:.0%} of the 16-bit weights have not changed in any of the last steps"
        return *self.update(), [] if share is None else [Departure(step, "stalled", (), None, share, text)]

    def _table(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Losses (steps,), gradients and updates (steps, places)."""
        table = np.stack([row for _, row in self._ring])
        losses, (gradients, moved, sizes) = table[:, 0], np.split(table[:, 1:], 3, axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            return losses, gradients, moved / sizes

    def _gradients(self, device: torch.device) -> Tensor:
        norms = torch.zeros(len(self._flat), device=device)
        there = [i for i, p in enumerate(self._flat) if p.grad is not None]
        if there:
            found = torch._foreach_norm([local_part(self._flat[i].grad) for i in there])
            norms[torch.tensor(there, device=device)] = torch.stack([x.float().to(device) for x in found])
        return self._squares(norms)

    def _updates(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Squared norms of what moved, and of what was there."""
        now = [_some(p) for p in self._flat]
        before, self._before = self._before, [x.clone() for x in now]
        if before is None:
            nothing = torch.full((len(self.places),), math.nan, device=device)
            return nothing, nothing
        half = [i for i, p in enumerate(self._flat) if p.dtype in _HALF and p.grad is not None]
        if half:
            self._same.append(torch.stack([(now[i] == before[i]).float().mean().to(device) for i in half]).mean())
        moved = torch._foreach_norm(torch._foreach_sub(now, before))
        sizes = torch._foreach_norm(before)
        # a parameter counts by all of its entries, of which some are seen
        scale = [math.sqrt(local_part(p).numel() / max(1, x.numel())) for p, x in zip(self._flat, now, strict=True)]
        weight = torch.tensor(scale, device=device)
        top, bottom = (torch.stack([x.float().to(device) for x in part]) * weight for part in (moved, sizes))
        return self._squares(top), self._squares(bottom)

    def _squares(self, norms: Tensor) -> Tensor:
        """Sums over the parameters of every place."""
        owner, share = (torch.tensor(x, device=norms.device) for x in (self._owner, self._share))
        return torch.zeros(len(self.places), device=norms.device).index_add(0, owner, norms.square() * share)

    def _intended(self) -> set[int]:
        """Places where nothing trains, in layers where something does."""
        trains = {k for k, p in zip(self._owner, self._flat, strict=True) if p.requires_grad}
        layers = {self.places[k].layer for k in trains}
        return {k for k, place in enumerate(self.places) if k not in trains and place.layer in layers}


def _some(p: nn.Parameter) -> Tensor:
    flat = local_part(p.detach()).reshape(-1)
    return flat[:: max(1, len(flat) // _FOLLOWED)]


def movement_of(attached: Anatomy, ring: int) -> Movement | None:
    """What keeps the last `ring` steps; None where that is none, or the mapping does not say where weights are."""
    parts = parts_of(attached)
    return Movement(parts, ring, mesh_of(attached.model)) if ring and parts else None


def parts_of(attached: Anatomy) -> list[tuple[Place, list[nn.Parameter]]]:
    """The parameters of every sublayer, each once, and of every layer those that belong to none of its sublayers."""
    places = sublayers_of(attached.layout)
    found: dict[Place, dict[int, nn.Parameter]] = {place: {} for place in places}
    taken: set[int] = set()
    # weights that are named come first: the branch of one sublayer may hold another
    for of_row in (_named, _around):
        for place, row in zip(places, attached.rows, strict=True):
            new = {id(p): p for p in of_row(row) if id(p) not in taken}
            taken |= new.keys()
            found[place] |= new
    for k, layer in enumerate(attached.layers):
        modules = layer if isinstance(layer, tuple) else (layer,)
        rest = {id(p): p for m in modules for p in m.parameters() if id(p) not in taken}
        taken |= rest.keys()
        found[Place(k, OTHER)] = rest
    there = [(place, list(parts.values())) for place, parts in found.items() if parts]
    return sorted(there, key=lambda item: item[0].layer)


def _named(row: AttachedRow) -> list[nn.Parameter]:
    held = [row.weights[role] for role in row.weights if not row.weights[role].problem]
    return [p for one in held for p in _parameters(one)]


def _around(row: AttachedRow) -> list[nn.Parameter]:
    parts = (row.branch, row.norm, row.post_norm, row.query_norm, row.key_norm, row.carrier)
    return [p for part in parts for p in _parameters(part)]


def _parameters(part: Any) -> list[nn.Parameter]:
    if isinstance(part, Held):
        part = None if part.problem else part.found
    if isinstance(part, nn.Module):
        return list(part.parameters())
    return [part] if isinstance(part, nn.Parameter) else []

"""Attention scores of a model in training, by layer, measured on a fixed small batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from signalprop.attachment.anatomy import Anatomy
from signalprop.data.batches import Batch
from signalprop.diagnosis.heads import HeadSums, Watch
from signalprop.diagnosis.layers import groups, run
from signalprop.diagnosis.result import Number, Numbers
from signalprop.measurement.measuring import arguments_of
from signalprop.monitoring.processes import gathered
from signalprop.network.moments import FloatArray
from signalprop.streams.live_model import evaluating
from signalprop.watching.first_positions import Streams

Layers = dict[str, list[Number]]


def attention_scores(attached: Anatomy, batch: Batch, skip_first: int, mesh: Any = None) -> Layers:
    """Scores and entropy of every self-attention, of one pass in evaluation mode that looks at nothing else.

    Args:
        mesh: processes that parameters are sharded over, which all call this together.
    """
    model, mapping = attached.model, attached.mapping
    arguments = arguments_of(attached, batch)
    streams = Streams(attached, skip_first, lambda *_: None)
    streams.begin(arguments)
    watch = Watch(attached, streams, outputs=False)
    with evaluating(model), streams, torch.no_grad():
        run(model, arguments)
    for module in model.modules() if mesh is not None else ():
        kept: Any = getattr(module, "reshard", None)  # FSDP2 keeps the root's parameters for a backward pass
        if kept is not None:
            kept()
    found = [next((watch.seen[i] for i in rows if i in watch.seen), HeadSums()) for rows in groups(attached.layout)]
    columns = [list(heads.told().values()) for heads in found]
    return _of_heads(columns, mesh, mapping.architecture.n_heads)


def _of_heads(found: Sequence[Sequence[Numbers]], mesh: Any, n_heads: int) -> Layers:
    """By layer, what its heads say, of deviation, largest score and entropy; each None or NaN where it is not known.

    Args:
        mesh: processes that each saw all heads of other sequences, or other heads of the same ones.
    """
    most = max((len(column) for columns in found for column in columns), default=0)
    table = torch.full((len(found), 3, most), math.nan)
    for k, columns in enumerate(found):
        for i, column in enumerate(columns):
            table[k, i, : len(column)] = torch.tensor(np.array(column, np.float64))  # NaN for None
    whole = most == n_heads
    if mesh is not None and most:
        parts = gathered(table.to(mesh.device_type), mesh).cpu()
        squares = torch.stack(
            [parts[:, :, 0].square().mean(0).sqrt(), parts[:, :, 1].amax(0), parts[:, :, 2].mean(0)], 1
        )
        whole = whole or len(parts) * most == n_heads
        table = squares if most == n_heads else parts.permute(1, 2, 0, 3).flatten(2)
    std, largest, entropy = table.double().numpy().transpose(1, 0, 2)

    def layers(rows: FloatArray, of: Callable[[FloatArray], Any], told: bool = True) -> list[Number]:
        return [float(of(row)) if told and np.isfinite(row).any() else None for row in rows]

    return {
        "score_std": layers(std, np.nanmax),
        "largest_score": layers(largest, np.nanmax),
        "largest_score_head": layers(largest, np.nanargmax, whole),
        "attention_entropy": layers(entropy, np.nanmean),
        "lowest_entropy": layers(entropy, np.nanmin),
        "lowest_entropy_head": layers(entropy, np.nanargmin, whole),
    }


@contextmanager
def random_states_kept(model: nn.Module) -> Iterator[None]:
    """Random states of the CPU and of the model's accelerators are afterwards what they were."""
    found = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    kinds = {device.type for device in found} or {"cuda"}
    indices = [device.index or 0 for device in found]
    with torch.random.fork_rng(devices=indices, device_type=min(kinds)):
        yield

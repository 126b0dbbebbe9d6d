"""What a monitor measures on a fixed batch when it is asked to: quantities of `signalprop.diagnosis`, by layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from signalprop.attachment.attached import Attached
from signalprop.attachment.live_model import evaluating
from signalprop.data.batches import Batch
from signalprop.diagnosis.casts import casts
from signalprop.diagnosis.heads import HeadSums, Watch
from signalprop.diagnosis.identity import identity
from signalprop.diagnosis.layers import groups, run
from signalprop.diagnosis.removal import removal
from signalprop.diagnosis.result import Number, Numbers
from signalprop.diagnosis.signal import observe
from signalprop.measurement.measuring import arguments_of
from signalprop.monitoring.roll_call import gathered
from signalprop.network.moments import FloatArray
from signalprop.watching.first_positions import Streams

Layers = dict[str, list[Number]]
_OF_SIGNAL = {"rank": ("effective_rank",), "alignment": ("alignment",), "outliers": ("outlier", "first_variance")}
REQUESTS = ("attention", *_OF_SIGNAL, "identity", "removal", "casts")


def measured_on(attached: Attached, batch: Batch, names: Sequence[str], skip_first: int, mesh: Any = None) -> Layers:
    """The quantities that requests stand for, by name, a number per layer; the model is in evaluation mode meanwhile.

    Args:
        mesh: processes that parameters are sharded over, which all call this together; for `attention` alone.
    """
    out: Layers = {}
    model, mapping = attached.model, attached.mapping
    with evaluating(model):
        if "attention" in names:
            out |= _attention(attached, batch, skip_first, mesh)
        if set(names) & _OF_SIGNAL.keys():
            signal = observe(attached, [batch], skip_first=skip_first, gradient_sequences=0)
            for quantity in (quantity for name in names for quantity in _OF_SIGNAL.get(name, ())):
                out[quantity] = [getattr(layer, quantity) for layer in signal]
        if "identity" in names:
            found = identity(attached, [batch], skip_first=skip_first, probes=1, limit=1)
            out["cosine"], out["angular"] = list(found.cosine), list(found.angular[0])
            out["jacobian"] = [item.value for item in found.jacobian]
        if "removal" in names:
            loss_without: list[Number] = [None] * len(mapping.layers)
            for item in removal(model, [batch], mapping).single:
                loss_without[item.layers[0]] = item.increase.value
            out["removal"] = loss_without
        if "casts" in names:
            for cast in casts(attached, [batch], of=("both",), scaled=(False,), skip_first=skip_first):
                out[f"snr_{cast.format}"] = list(cast.signal_to_noise)
    return out


def _attention(attached: Attached, batch: Batch, skip_first: int, mesh: Any) -> Layers:
    """Scores and entropy of every self-attention, of one pass that looks at nothing else."""
    model, mapping = attached.model, attached.mapping
    arguments = arguments_of(model, mapping, batch)
    streams = Streams(attached, skip_first, lambda *_: None)
    streams.begin(arguments)
    watch = Watch(attached, streams, outputs=False)
    with streams, torch.no_grad(), watch:
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

"""What a monitor measures on a fixed batch when it is asked to: quantities of `signalprop.diagnosis`, by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from signalprop.attachment.attached import attach
from signalprop.attachment.live_model import evaluating
from signalprop.attachment.mapping import Mapping
from signalprop.data.batches import Batch
from signalprop.diagnosis.casts import casts
from signalprop.diagnosis.heads import HeadSums, Watch
from signalprop.diagnosis.identity import identity
from signalprop.diagnosis.layers import Positions, groups, run
from signalprop.diagnosis.removal import removal
from signalprop.diagnosis.result import LayerSignal, Number
from signalprop.diagnosis.signal import observe
from signalprop.hooks import Hooks
from signalprop.measurement.measuring import arguments_of

Layers = dict[str, list[Number]]
_OF_SIGNAL = ("rank", "alignment", "outliers")
REQUESTS = ("attention", *_OF_SIGNAL, "identity", "removal", "casts")


def measured_on(model: nn.Module, mapping: Mapping, batch: Batch, names: Sequence[str], skip_first: int) -> Layers:
    """The quantities that requests stand for, by name, a number per layer; the model is in evaluation mode meanwhile.

    Raises:
        InputError: the batch does not fit the model, or as the sections of a diagnosis.
    """
    out: Layers = {}
    with evaluating(model):
        if "attention" in names:
            out |= _attention(model, mapping, batch, skip_first)
        if set(names) & set(_OF_SIGNAL):
            signal = observe(model, [batch], mapping, skip_first=skip_first, gradient_sequences=0)
            for name in names:
                out |= _of_signal(name, signal)
        if "identity" in names:
            found = identity(model, [batch], mapping, skip_first=skip_first, probes=1, limit=1)
            out["cosine"], out["angular"] = list(found.cosine), list(found.angular[0])
            out["jacobian"] = [item.value for item in found.jacobian]
        if "removal" in names:
            loss_without: list[Number] = [None] * len(mapping.layers)
            for item in removal(model, [batch], mapping).single:
                loss_without[item.layers[0]] = item.increase.value
            out["removal"] = loss_without
        if "casts" in names:
            for cast in casts(model, [batch], mapping, of=("both",), scaled=(False,), skip_first=skip_first):
                out[f"snr_{cast.format}"] = list(cast.signal_to_noise)
    return out


def _attention(model: nn.Module, mapping: Mapping, batch: Batch, skip_first: int) -> Layers:
    """Scores and entropy of every self-attention, of one pass that looks at nothing else."""
    attached = attach(model, mapping)
    arguments = arguments_of(model, mapping, batch)
    positions = Positions(mapping, arguments, skip_first)
    sites = attached.plan.sites
    keeps: dict[int, Tensor] = {}
    watch = Watch(lambda row: keeps.get(int(attached.layout.stack[row])), outputs=False)
    hooks = Hooks(attached.outer)

    def passes(index: int, x: Tensor | None) -> None:
        if x is not None and x.ndim == 3:  # the stream, of which masks say what counts
            keeps.setdefault(sites[index].stack, positions.keep(sites[index].stack, x))

    hooks.sites(sites, passes, first=True)
    for i, row in enumerate(attached.rows):
        if row.kind.attends_itself:
            watch.follow(hooks, i, row, mapping.architecture.n_heads)
    with hooks, torch.no_grad(), watch:
        run(model, arguments)
    found = [_heads(watch, rows) for rows in groups(attached.layout)]
    largest = [[v for v in heads.largest_score() if v is not None] for heads in found]
    return {
        "score_std": [_most([v for v in heads.score_std() if v is not None]) for heads in found],
        "largest_score": [_most(values) for values in largest],
        "largest_score_head": [float(np.argmax(values)) if values else None for values in largest],
        "attention_entropy": [_mean([v for v in heads.relative_entropy() if v is not None]) for heads in found],
    }


def _heads(watch: Watch, rows: Sequence[int]) -> HeadSums:
    return next((watch.seen[i] for i in rows if i in watch.seen), HeadSums())


def _of_signal(name: str, signal: Sequence[LayerSignal]) -> Layers:
    if name == "rank":
        return {"effective_rank": [s.effective_rank for s in signal]}
    if name == "alignment":
        return {"alignment": [s.alignment for s in signal]}
    if name == "outliers":
        return {"outlier": [s.outlier for s in signal], "first_variance": [s.first_variance for s in signal]}
    return {}


def _most(values: Sequence[float]) -> Number:
    return max(values, default=None)


def _mean(values: Sequence[float]) -> Number:
    return float(np.mean(values)) if values else None


@contextmanager
def random_states_kept(model: nn.Module) -> Iterator[None]:
    """Random states of the CPU and of the model's accelerators are afterwards what they were."""
    found = {p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")}
    kinds = {device.type for device in found} or {"cuda"}
    indices = [device.index or 0 for device in found]
    with torch.random.fork_rng(devices=indices, device_type=min(kinds)):
        yield

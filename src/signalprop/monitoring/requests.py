"""What a monitor measures on a fixed batch when it is asked to: quantities of `signalprop.diagnosis`, by layer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import nn

from signalprop.attachment.live_model import evaluating
from signalprop.attachment.mapping import Mapping
from signalprop.data.batches import Batch
from signalprop.diagnosis.casts import casts
from signalprop.diagnosis.identity import identity
from signalprop.diagnosis.removal import removal
from signalprop.diagnosis.result import LayerSignal, Number
from signalprop.diagnosis.signal import observe

Layers = dict[str, list[Number]]
_OF_SIGNAL = ("attention", "rank", "alignment", "outliers")
REQUESTS = (*_OF_SIGNAL, "identity", "removal", "casts")


def measured_on(model: nn.Module, mapping: Mapping, batch: Batch, names: Sequence[str], skip_first: int) -> Layers:
    """The quantities that requests stand for, by name, a number per layer; the model is in evaluation mode meanwhile.

    Raises:
        InputError: the batch does not fit the model, or as the sections of a diagnosis.
    """
    out: Layers = {}
    with evaluating(model):
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


def _of_signal(name: str, signal: Sequence[LayerSignal]) -> Layers:
    if name == "attention":
        return {
            "score_std": [_most([v for v in s.score_std if v is not None]) for s in signal],
            "attention_entropy": [_mean([v for v in s.entropy if v is not None]) for s in signal],
        }
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

"""Whether the predicted damage of casts ranks layers as the loss does, in a checkpoint that is trained.

    python -m benchmarks.cast_ranking MODEL --json ranking.json

Every layer alone is cast, all others stay; the loss and the logits are measured on sequences of the built-in text.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

from signalprop.attachment.attached import attach
from signalprop.attachment.families import mapping_for
from signalprop.data.batches import Batch
from signalprop.diagnosis.casts import cast
from signalprop.diagnosis.layers import groups
from signalprop.diagnosis.loading import load
from signalprop.diagnosis.number_formats import Format
from signalprop.diagnosis.result import Cast, Estimate
from signalprop.diagnosis.sensitivity import by_map, layer_maps
from signalprop.diagnosis.stream import token_batches
from signalprop.files.storage import write_json


def ranking(source: str, formats: list[str], sequences: int, length: int) -> dict[str, Any]:
    """Of every format: predicted damage and measured loss by layer, and their rank correlations."""
    loaded = load(source)
    model, mapping = loaded.model.eval(), mapping_for(loaded.model, None)
    (batch,) = token_batches(None, loaded.tokenizer, length, sequences, sequences, architecture=mapping.architecture)
    clean, loss = _logits(model, batch)
    nothing = Estimate(value=None)
    out: dict[str, Any] = {"model": loaded.name, "tokens": sequences * length, "loss": loss, "formats": {}}
    attached = attach(model, mapping)
    for name in formats:
        row = Cast(format=name, of="weights", scaled=True, loss=nothing, increase=nothing)
        (found,) = by_map(model, batch, mapping, [row])
        losses, noises = [], []
        for group in groups(attached.layout):
            with cast(model, mapping, Format(name, scaled=True), "weights", list(layer_maps(attached, group).values())):
                noisy, with_cast = _logits(model, batch)
            losses.append(with_cast - loss)
            noises.append(float((noisy - clean).square().mean() / clean.square().mean()))
        damages = [found.damages[k] for k in range(len(losses))]
        ranks = {
            "rank correlation with the loss": float(spearmanr(damages, losses).statistic),
            "rank correlation with the logits": float(spearmanr(damages, noises).statistic),
        }
        print(name, ranks, flush=True)
        out["formats"][name] = {"damage": damages, "loss": losses, "logits": noises, **ranks}
    return out


def _logits(model: Any, batch: Batch) -> tuple[torch.Tensor, float]:
    """Of every sequence but its first four positions, each row less its mean; and the loss of all."""
    rows, losses = [], []
    for tokens in torch.as_tensor(np.asarray(batch.tokens)):
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, tokens[1:]))
        rows.append((logits - logits.mean(-1, keepdim=True))[4:])
    return torch.cat(rows), float(torch.stack(losses).mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--format", action="append", dest="formats")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--json", required=True)
    asked = parser.parse_args()
    write_json(
        asked.json, ranking(asked.model, asked.formats or ["mxfp4", "int4_channel"], asked.sequences, asked.length)
    )

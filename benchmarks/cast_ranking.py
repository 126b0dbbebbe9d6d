"""Whether the predicted damage of casts ranks layers as the loss does, in a checkpoint that is trained.

    python -m benchmarks.cast_ranking MODEL --json ranking.json

Every layer alone is cast, all others stay; the loss, the divergence from the model without a cast (Kullback-Leibler,
nats per token) and the logits are measured on sequences of the built-in text. The rise of the loss on a text is that
divergence plus chance; ranks of the same number on two halves of the text say how much. The plain ranking that the
prediction has to beat is the squared error of the cast weights of a layer, over the square of these weights.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

from signalprop.attachment.attached import attach, require_roles
from signalprop.attachment.families import mapping_for
from signalprop.data.batches import Batch
from signalprop.diagnosis.casts import LinearMap, cast, maps_of
from signalprop.diagnosis.layers import groups
from signalprop.diagnosis.loading import load
from signalprop.diagnosis.number_formats import Format
from signalprop.diagnosis.result import Cast, Estimate
from signalprop.diagnosis.sensitivity import by_map
from signalprop.diagnosis.stream import token_batches
from signalprop.files.storage import write_json


def ranking(source: str, formats: list[str], sequences: int, length: int) -> dict[str, Any]:
    """Of every format: predicted damage and measured loss by layer, and their rank correlations."""
    loaded = load(source)
    model, mapping = loaded.model.eval(), mapping_for(loaded.model, None)
    (batch,) = token_batches(None, loaded.tokenizer, length, sequences, sequences, architecture=mapping.architecture)
    clean, before = _logits(model, batch)
    nothing = Estimate(value=None)
    attached = require_roles(attach(model, mapping))
    layers = [maps_of(attached, [attached.rows[i] for i in group]) for group in groups(attached.layout)]
    out: dict[str, Any] = {
        "model": loaded.name,
        "tokens": sequences * length,
        "loss": float(before.mean()),
        "formats": {},
    }
    for name in formats:
        row = Cast(format=name, of="weights", scaled=True, loss=nothing, increase=nothing)
        (found,) = by_map(model, batch, mapping, [row])
        measured: dict[str, list[Any]] = {"loss": [], "divergence": [], "logits": []}
        for maps in layers:
            with cast(model, Format(name, scaled=True), "weights", maps):
                noisy, losses = _logits(model, batch)
            measured["loss"].append((losses - before).tolist())
            measured["divergence"].append(_divergence(clean, noisy).tolist())
            measured["logits"].append([float((noisy - clean).square().mean() / clean.square().mean())])
        damages = [found.damages[k] for k in range(len(layers))]
        plain = [_weight_error(maps, Format(name, scaled=True)) for maps in layers]
        ranks = {
            f"{by} and {what}": _rank(ranked, np.mean(each, -1))
            for by, ranked in (("damage", damages), ("weight error", plain))
            for what, each in measured.items()
        }
        for what in ("loss", "divergence"):
            halves = np.array(measured[what])
            half = halves.shape[1] // 2
            ranks[f"{what}, two halves of the text"] = _rank(halves[:, :half].mean(-1), halves[:, half:].mean(-1))
        print(name, ranks, flush=True)
        means = {what: np.mean(each, -1).tolist() for what, each in measured.items()}
        out["formats"][name] = {"damage": damages, "weight_error": plain, **means, "ranks": ranks}
    return out


def _weight_error(maps: list[LinearMap], form: Format) -> float:
    """Squared error of the cast weights over their square, all maps of a layer together."""
    weights = [one.weight.detach() for one in maps]
    wrong = [one.held(form) - weight for one, weight in zip(maps, weights, strict=True)]
    return float(sum(w.double().square().sum() for w in wrong) / sum(w.double().square().sum() for w in weights))


def _rank(one: Any, other: Any) -> float:
    return float(spearmanr(one, other).statistic)


def _divergence(clean: torch.Tensor, noisy: torch.Tensor) -> torch.Tensor:
    """Of every token, in nats."""
    parts = []
    for p, q in zip(clean.log_softmax(-1), noisy.log_softmax(-1), strict=True):
        parts.append((p.exp() * (p - q)).sum(-1))
    return torch.stack(parts)


def _logits(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every sequence but its first four positions, each row less its mean; and the loss of each of these tokens."""
    rows, losses = [], []
    for tokens in torch.as_tensor(np.asarray(batch.tokens)):
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")[4:])
        rows.append((logits - logits.mean(-1, keepdim=True))[4:])
    return torch.cat(rows), torch.cat(losses)


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

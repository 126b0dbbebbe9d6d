"""Whether the predicted damage of casts ranks layers as the loss does, in a checkpoint that is trained.

    python -m benchmarks.cast_ranking MODEL              # its rows in docs/benchmarks/cast_ranking.json, then the page

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

from benchmarks.page import RECORDS, write_page
from benchmarks.timing import record, table
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
from signalprop.files.storage import read_json, write_json

COMMAND = "python -m benchmarks.cast_ranking MODEL"
TITLE = "Which layers a cast hurts"
ABOUT = f"""
`{COMMAND}`: the weights of every layer alone are cast, the others stay. What that does to the words that the model
predicts, in nats per token, stands against two rankings of the layers: *damage*, which `diagnose --cast` predicts from
gradients on the first 256 tokens, and *weight error*, the plain one: squared error of the cast weights over their
square. The columns: Spearman's rank correlation with the divergence (Kullback-Leibler) from the model without a cast,
then with the rise of the loss, each beside the correlation between the two halves of the text, which says what chance
leaves to any ranking; of the divergence of all layers the part of that tenth of them which a ranking puts first, and
the most that a tenth can have; the predicted damage over the measured divergence, median of the layers [5 %, 95 %].
"""
READING = """
In every row the damage ranks layers better by their divergence than the weights' own error does (in Gemma 3 by little),
and it is of the divergence's size, which the weights' error says nothing of: in SmolLM2 that ranks little or nothing,
since to a cast the weights of all layers are nearly alike. The rise of the loss both rank little: on a given text a
cast moves the loss up or down, and only how far is predicted. Weights of both were stored with 4 bits before.
"""


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


def section(models: dict[str, Any]) -> str:
    """The table of the page."""
    head = [
        "model", "tokens", "format", "damage", "weight error", "two halves", "loss: damage", "weight error",
        "two halves", "first tenth: damage", "weight error", "at best", "damage over divergence",
    ]  # fmt: skip
    rows = []
    for model in models.values():
        for name, found in model["formats"].items():
            numbers = []
            for what in ("divergence", "loss"):
                columns = (f"damage and {what}", f"weight error and {what}", f"{what}, two halves of the text")
                numbers += [f"{found['ranks'][column]:.2f}" for column in columns]
            shares = [_share(found, by) for by in ("damage", "weight_error", "divergence")]
            numbers += [f"{100 * share:.0f} %" for share in shares]
            low, middle, high = np.percentile(np.divide(found["damage"], found["divergence"]), (5, 50, 95))
            rows.append([_name(model), f"{model['tokens']:,}", name, *numbers, f"{middle:.2f} [{low:.2f}, {high:.2f}]"])
    return table(head, rows)


def _name(model: dict[str, Any]) -> str:
    return str(model["model"]).removesuffix(".gguf")


def _share(found: dict[str, Any], by: str) -> float:
    """Of the divergence of all layers, each cast alone: that of the tenth which a ranking puts first."""
    divergence = np.array(found["divergence"])
    first = np.argsort(found[by])[::-1][: -(-len(divergence) // 10)]
    return float(divergence[first].sum() / divergence.sum())


def main() -> None:
    """Command line of the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--format", action="append", dest="formats")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    asked = parser.parse_args()
    found = ranking(asked.model, asked.formats or ["mxfp4", "nvfp4", "int4_channel"], asked.sequences, asked.length)
    file = RECORDS / "cast_ranking.json"
    models = (read_json(file)["models"] if file.is_file() else {}) | {found["model"]: found}
    write_json(file, record("cast_ranking", section(models)) | {"command": COMMAND, "models": models})
    write_page()


if __name__ == "__main__":
    main()

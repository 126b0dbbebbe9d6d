"""One real step of Adam in a small fresh decoder, and what was stored of many (records/first-steps.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

import signalprop as sp
from signalprop.data.batches import Batch, text_batch
from signalprop.files.storage import read_json
from signalprop.models.transformer import batch_tensors

STORED = Path(__file__).parent.parent / "records" / "first-steps"
SEQUENCES, LENGTH, VOCABULARY = 12, 32, 256
RATE = 1e-9  # in double precision: the change is linear in it


def network(layers: int, width: int, norm: str) -> sp.Architecture:
    """The decoder of a cell."""
    return sp.Architecture(
        kind="decoder", n_layers=layers, d_model=width, n_heads=width // 32, d_ff=4 * width, vocab_size=VOCABULARY,
        seq_len=LENGTH, dropout=0.0, norm_placement=norm,
    )  # fmt: skip


def batch_of(a: sp.Architecture, seed: int, sequences: int = SEQUENCES) -> Batch:
    """Words of a law like Zipf's, quicker than text."""
    ids = np.random.default_rng(0).zipf(1.5, 20_000) % VOCABULARY
    return text_batch(a, ids, sequences, seed)


def change_by_adam(table: sp.Parametrization, batch: Batch, seed: int) -> float:
    """Relative change of the last hidden states when the sublayers take one step, per unit of learning rate."""
    model = sp.build(table, seed=seed, dtype=torch.float64).eval()
    values: dict[str, Any] = {k: v for k, v in batch_tensors(batch).items() if v is not None}
    out = model(**values)
    before = out.hidden.detach().clone()
    out.loss.backward()
    inside = {id(x): x for sublayer in model.sublayers() for x in sublayer.parameters()}
    torch.optim.Adam(inside.values(), lr=RATE, eps=1e-30).step()
    with torch.no_grad():
        return float((model(**values).hidden - before).norm() / before.norm() / RATE)


def measured_over_predicted(optimizer: str) -> np.ndarray:
    """Of every stored cell, the geometric mean over its seeds."""
    keys = ("scheme", "layers", "width", "optimizer")
    rows = read_json(STORED / "rows.json")["rows"]
    cells = [c for c in read_json(STORED / "predictions.json")["cells"] if c["optimizer"] == optimizer]
    logs = [[np.log(r["change"]) for r in rows if all(r[k] == c[k] for k in keys)] for c in cells]
    return np.array([np.exp(np.mean(found)) / c["change"] for found, c in zip(logs, cells, strict=True) if found])

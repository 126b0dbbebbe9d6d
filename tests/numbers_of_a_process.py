"""Numbers of everything that computes, for tests that compare processes: `numbers_of_a_process.py THREADS FOLDER`.

Prints JSON. With THREADS 0 only predictions, without PyTorch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import signalprop as sp


def predictions() -> dict[str, Any]:
    """By both recursions, of schemes with and without statistics of their own."""
    encoder = sp.Architecture.preset("tgs", n_layers=4)
    decoder = sp.Architecture.preset("llama-130m", n_layers=2, seq_len=96)
    mixed = sp.Architecture(kind="encoder-decoder", n_layers=3, d_model=64, activation="silu", gated=True, dropout=0.2)
    cases = (("deepscalelm", encoder), ("mix-ln", decoder), ("admin", mixed), ("xavier", decoder))
    return {f"{name} {k}": sp.predict(sp.scheme(name)(a)).to_json() for k, (name, a) in enumerate(cases)}


def networks(threads: int, folder: Path) -> dict[str, Any]:
    """Measured, simulated, diagnosed and trained ones."""
    import torch

    from signalprop.data.batches import default_batch
    from signalprop_lab.training.recipe import parse
    from signalprop_lab.training.run import train
    from trained import lines, recipe_of

    torch.set_num_threads(threads)
    a = sp.Architecture(kind="decoder", n_layers=4, d_model=256, vocab_size=2000, seq_len=128, dropout=0.1)
    table, batch = sp.scheme("xavier")(a), default_batch(a, batch_size=4)
    model = sp.build(table, seed=1)
    torch.manual_seed(0)
    out = {"measured": sp.measure(model, batch).to_json(), "simulated": sp.simulate(table, n_seeds=2, seed=3).to_json()}
    out["diagnosed"] = sp.diagnose(model, [batch]).to_json()
    recipe = recipe_of(folder)
    # the text and its tokens lie in a folder of each process's own
    train(parse(recipe), folder / "run", progress=False)
    return out | {"trained": lines(folder / "run" / "metrics.jsonl"), "signal": lines(folder / "run" / "signal.jsonl")}


if __name__ == "__main__":
    n = int(sys.argv[1])
    found = predictions() if n == 0 else networks(n, Path(sys.argv[2]))
    json.dump(found, sys.stdout)

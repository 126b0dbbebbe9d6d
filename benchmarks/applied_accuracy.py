"""Predicted against measured signals of models that carry a scheme: every scheme on five Hugging Face families.

    python -m benchmarks.applied_accuracy                                     # only predict anew and write the page
    python -m benchmarks.applied_accuracy --minutes 60 [--depths 4,48,192] [--schemes a,b] [--families a,b]

Every cell applies a scheme to a freshly configured transformers model (width 256, 4 heads, 128 tokens of real text or
24 x 24 pixels) and measures it on two batch rows and `--seeds` draws. What was measured is kept in
records/applied-accuracy.json, cell by cell, and compared with what is predicted now.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import signalprop as sp
from benchmarks.accuracy_grid import TARGETS
from benchmarks.accuracy_rows import errors_of
from benchmarks.measured import Measured, read_store, write_store
from benchmarks.models import hugging_face
from benchmarks.timing import compact
from signalprop.data.batches import Batch, default_batch
from signalprop.errors import InputError
from signalprop.files.storage import write_text
from signalprop.network.inputs import InputStatistics
from signalprop.repair import apply, initialize

FAMILIES = ("bert", "gpt2", "llama", "vit", "t5")
DEPTHS = (4, 48, 192)
WIDTH, HEADS, TOKENS, VOCABULARY = 256, 4, 128, 1000
STORE = Path("records/applied-accuracy.json")
PAGE = Path("records/applied-accuracy.md")


@dataclass(frozen=True, order=True)
class Cell:
    """One model that carries a scheme."""

    n_layers: int
    scheme: str
    family: str


def vanilla(family: str, n_layers: int) -> Any:
    """A model of the family, on the meta device."""
    with torch.device("meta"):
        return hugging_face(family, n_layers, width=WIDTH, heads=HEADS, vocab_size=VOCABULARY, tokens=TOKENS)


def images(n: int) -> Batch:
    """The first digits of scikit-learn, 8 x 8, enlarged to 24 x 24 and cut into 3 x 3 patches."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = torch.as_tensor(digits.images[:n] / 16.0, dtype=torch.float32)[:, None]
    large = torch.nn.functional.interpolate(pixels, size=(24, 24), mode="bilinear", align_corners=False)[:, 0]
    patches = large.reshape(n, 8, 3, 8, 3).permute(0, 1, 3, 2, 4).reshape(n, 64, 9).numpy()
    return Batch(tokens=None, patches=patches, targets=digits.target[:n], source="scikit-learn's digits")


def batch_for(family: str, architecture: sp.Architecture) -> Batch:
    """Real input for a family."""
    if family == "vit":
        return images(8)
    return default_batch(architecture.replace(seq_len=TOKENS), batch_size=2)


def carrying(cell: Cell) -> tuple[Any, sp.Parametrization, InputStatistics, Batch] | None:
    """The model, on the meta device, with its table and what it reads; None: the family cannot have the scheme."""
    model = vanilla(cell.family, cell.n_layers)
    architecture = sp.Architecture.from_hf(model)
    batch = batch_for(cell.family, architecture)
    statistics = batch.statistics(architecture)
    try:
        return model, apply(model, cell.scheme, inputs=statistics), statistics, batch
    except InputError:
        return None


def measure(cell: Cell, seeds: int) -> Measured | None:
    """Means over so many draws; None where the scheme is refused."""
    began, found = time.process_time(), carrying(cell)
    if found is None:
        return None
    model, _, _, batch = found
    model.to_empty(device="cpu")
    profiles = []
    for seed in range(seeds):
        initialize(model, seed=seed)
        profiles.append(sp.measure(model.eval(), batch))
    return Measured.of(sp.average(profiles), time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=0.0, help="time to measure cells that are not stored")
    parser.add_argument("--depths", default=",".join(map(str, DEPTHS)))
    parser.add_argument("--schemes", default=",".join(sorted(sp.SCHEMES)))
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    store, end = read_store(STORE, Cell), time.monotonic() + 60 * given.minutes
    wanted = (
        Cell(int(depth), scheme, family)
        for depth in given.depths.split(",")
        for scheme in given.schemes.split(",")
        for family in given.families.split(",")
    )
    for cell in wanted:
        if time.monotonic() > end:
            break
        if cell not in store and (found := measure(cell, given.seeds)) is not None:
            store[cell] = found
            write_store(STORE, "signalprop/applied-accuracy/1", dict(sorted(store.items())))
            print(cell, f"{found.seconds:.1f} s", flush=True)
    write_text(PAGE, page(store))


HEADER = f"""Generated by `python -m benchmarks.applied_accuracy`; what was measured is stored in
`records/applied-accuracy.json`, predictions are made anew. Each cell: median error, over all sublayers, of the variance
of the stream, of its token correlation (relative, to 0.1 at least) and of the variance of the gradient, in percent (100
|ln(predicted / measured)| for variances), between `predict` and a Hugging Face model with the scheme, as means over
networks of the width (as of [accuracy](accuracy.md), where they are derived); in brackets the standard error of the
measurement over its random networks.
Width {WIDTH}, {TOKENS} tokens of real text
(ViT: digits in 64 patches); half of T5's layers are in its encoder. A dash: the family cannot express the scheme
([families.md](families.md)), or there is no gradient at the start."""


def page(store: dict[Cell, Measured]) -> str:
    """The page, of the depths and schemes of which something is stored."""
    lines = ["# Applied schemes: predicted against measured", "", HEADER]
    for depth in sorted({cell.n_layers for cell in store}):
        schemes = sorted({cell.scheme for cell in store if cell.n_layers == depth})
        rows = [[s, *(_words(Cell(depth, s, family), store) for family in FAMILIES)] for s in schemes]
        lines += ["", f"## {depth} layers", "", compact(["scheme", *FAMILIES], rows)]
    return "\n".join(lines) + "\n"


def _words(cell: Cell, store: dict[Cell, Measured]) -> str:
    found = carrying(cell)
    if found is None:
        return "–"
    if cell not in store:
        return "not run"
    errors = errors_of(sp.predict(found[1], found[2]), store[cell])
    parts = [f"{100 * e.median:.1f} ({100 * e.se:.1f})" if (e := errors.get(name)) else "–" for name in TARGETS]
    return ", ".join(parts)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

"""Predicted against measured signals of models that carry a scheme: every scheme on five Hugging Face families.

    python -m benchmarks.applied_accuracy [--minutes M] [--depths 4,48,192] [--schemes a,b] [--report]

Every cell applies a scheme to a freshly configured transformers model (width 256, 4 heads, 128 tokens of real text or
24 x 24 pixels), measures it on two batch rows and `seeds` draws, and compares with `predict`. Results are kept in
`out/applied_accuracy`, so that a run goes on where the last one stopped; `--report` writes docs/applied-accuracy.md.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import signalprop as sp
from benchmarks.models import hugging_face
from signalprop.data.batches import Batch, default_batch
from signalprop.errors import InputError
from signalprop.files.storage import write_json, write_text
from signalprop.repair import apply, initialize

FAMILIES = ("bert", "gpt2", "llama", "vit", "t5")
DEPTHS = (4, 48, 192)
WIDTH, HEADS, TOKENS, VOCABULARY = 256, 4, 128, 1000
RESULTS = Path("out/applied_accuracy")
REPORT = Path("docs/applied-accuracy.md")
QUANTITIES = ("forward variance", "forward token correlation", "gradient variance")


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


def measured(family: str, scheme: str, n_layers: int, seeds: int) -> dict[str, Any]:
    """The measured Profile of one cell as JSON, or why the scheme is refused."""
    model = vanilla(family, n_layers)
    architecture = sp.Architecture.from_hf(model)
    batch = batch_for(family, architecture)
    try:
        apply(model, scheme, inputs=batch.statistics(architecture))
    except InputError as error:
        return {"refused": str(error)}
    model.to_empty(device="cpu")
    profiles = []
    for seed in range(seeds):
        initialize(model, seed=seed)
        profiles.append(sp.measure(model.eval(), batch))
    silent = not any(profile.gradient_scale for profile in profiles)  # Fixup's head starts at zero
    return {"profile": sp.average(profiles).to_json(), "silent": silent}


def agreements(family: str, scheme: str, n_layers: int, result: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """(median error, standard error of the measurement) by quantity, of a cell that was measured."""
    model = vanilla(family, n_layers)
    architecture = sp.Architecture.from_hf(model)
    statistics = batch_for(family, architecture).statistics(architecture)
    table = apply(model, scheme, inputs=statistics)
    comparison = sp.compare(sp.predict(table, statistics), sp.Profile.from_json(result["profile"]))
    return {
        agreement.quantity: (agreement.median, agreement.standard_error or 0.0)
        for agreement in comparison.agreements
        if not (result["silent"] and agreement.quantity.startswith("gradient"))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--depths", default=",".join(map(str, DEPTHS)))
    parser.add_argument("--schemes", default=",".join(sorted(sp.SCHEMES)))
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--report", action="store_true")
    given = parser.parse_args()
    if given.report:
        write_text(REPORT, report())
        return
    RESULTS.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * given.minutes
    for depth in map(int, given.depths.split(",")):
        for scheme in given.schemes.split(","):
            for family in given.families.split(","):
                path = RESULTS / f"{scheme}-{family}-{depth}.json"
                if path.exists():
                    continue
                if time.monotonic() > end:
                    return
                began = time.monotonic()
                write_json(path, measured(family, scheme, depth, given.seeds))
                print(f"{scheme} {family} {depth}: {time.monotonic() - began:.0f} s", flush=True)


HEADER = f"""Generated by `python -m benchmarks.applied_accuracy`. Each cell: median error, over all sublayers, of the
variance of the stream, of its token correlation (relative, to 0.1 at least) and of the variance of the gradient, in
percent, between `predict` and a Hugging Face model to which the scheme was applied; in brackets the standard error of
the measurement over its random networks. Width {WIDTH}, {TOKENS} tokens of real text (ViT: digits in 64 patches); half
of T5's layers are in its encoder. A dash: the family cannot express the scheme ([families.md](families.md)), or there
is no gradient at the start."""


def report() -> str:
    """The page, from the results that are there."""
    lines = ["# Applied schemes: predicted against measured", "", HEADER]
    for depth in DEPTHS:
        found = {
            tuple(path.stem.rsplit("-", 2)[:2]): json.loads(path.read_text())
            for path in sorted(RESULTS.glob(f"*-{depth}.json"))
        }
        if not found:
            continue
        lines += ["", f"## {depth} layers", "", "| scheme | " + " | ".join(FAMILIES) + " |", "| --- |" + " --- |" * 5]
        for scheme in sorted({key[0] for key in found}):
            row = [_words(family, scheme, depth, found.get((scheme, family))) for family in FAMILIES]
            lines.append(f"| {scheme} | " + " | ".join(row) + " |")
    return "\n".join(lines) + "\n"


def _words(family: str, scheme: str, depth: int, result: dict[str, Any] | None) -> str:
    if result is None:
        return "not run"
    if "refused" in result:
        return "–"
    found = agreements(family, scheme, depth, result)
    parts = []
    for quantity in QUANTITIES:
        median, error = found.get(quantity, (np.nan, 0.0))
        parts.append(f"{100 * median:.1f} ({100 * error:.1f})" if np.isfinite(median) else "–")
    return ", ".join(parts)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

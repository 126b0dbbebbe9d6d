"""Vision transformers on corrupted digits: is the deeper one with DeepScaleLM also the more robust one?

Beside Transformers Get Stable, Table 10 (ImageNet-v2, -R and -Sketch). The networks of `sweep-tgs-tab10` at their
tuned rates are trained anew on scikit-learn's digits and asked about the held-out fifth, whole and corrupted.

python -m benchmarks.corrupted_digits    # train, ask, write records/corrupted-digits.json; minutes of a core
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.ndimage import uniform_filter

from signalprop.data.batches import patches_of
from signalprop.files.storage import write_json
from signalprop.network.moments import FloatArray
from signalprop_lab.training.networks import network_of
from signalprop_lab.training.recipe import Recipe, load_recipe
from signalprop_lab.training.run import train
from signalprop_lab.training.tasks import prepare
from signalprop_lab.training.weight_files import fill_weights, load_tensors

RECORD = Path("records/corrupted-digits.json")
SEEDS = range(4)
PATCH, GRID = 2, 4  # of the recipe vit-small: 8 x 8 pixels
DEEP = ["model.architecture.n_layers=48", "model.architecture.d_model=32", "model.architecture.n_heads=2"]
NETWORKS = {  # the tuned cells of records/results/tgs-tab10.json
    "baseline, 12 layers of width 64": ["model.scheme=xavier", "optimizer.learning_rate=3e-4"],
    "DeepScaleLM, 48 layers of width 32": [*DEEP, "optimizer.learning_rate=3e-3"],
}


def _noise(images: FloatArray, rng: np.random.Generator) -> FloatArray:
    return images + rng.normal(size=images.shape)


def _shift(images: FloatArray, rng: np.random.Generator) -> FloatArray:
    out = np.full_like(images, images.min())
    out[:, :, 1:] = images[:, :, :-1]
    return out


def _blur(images: FloatArray, rng: np.random.Generator) -> FloatArray:
    return np.asarray(uniform_filter(images, (0, 3, 3)))


def _hole(images: FloatArray, rng: np.random.Generator) -> FloatArray:
    out = images.copy()
    for image, (row, column) in zip(out, rng.integers(0, 6, (len(out), 2)), strict=True):
        image[row : row + 3, column : column + 3] = images.min()
    return out


def _contrast(images: FloatArray, rng: np.random.Generator) -> FloatArray:
    return images / 2


CORRUPTIONS: dict[str, Callable[[FloatArray, np.random.Generator], FloatArray]] = {
    "none": lambda images, rng: images,
    "Gaussian noise of the pixels' own variance": _noise,
    "one pixel to the right": _shift,
    "mean of 3 x 3 pixels": _blur,
    "a black square of 3 x 3": _hole,
    "half the contrast": _contrast,
}


def images_of(patches: FloatArray) -> FloatArray:
    """Patches (n, 16, 4) as images (n, 8, 8), the inverse of `patches_of`."""
    blocks = patches.reshape(-1, GRID, GRID, PATCH, PATCH)
    return blocks.transpose(0, 1, 3, 2, 4).reshape(-1, GRID * PATCH, GRID * PATCH)


def accuracies(recipe: Recipe, folder: Path) -> dict[str, float]:
    """Train, then the share of held-out digits that are named rightly, by corruption."""
    train(recipe, folder)
    prepared = prepare(recipe)
    network = network_of(recipe, prepared)
    weights = folder / "final" / "model.safetensors"
    fill_weights(network.module, load_tensors(weights), weights)
    network.module.eval()
    rng = np.random.default_rng(0)
    examples = [prepared.validation.example(i, rng) for i in range(len(prepared.validation))]
    images = images_of(np.stack([one["patches"] for one in examples]).astype(np.float64))
    labels = np.array([int(one["labels"]) for one in examples])
    found = {}
    for name, corrupt in CORRUPTIONS.items():
        patches = patches_of(corrupt(images, np.random.default_rng(1))[:, None], PATCH)
        with torch.no_grad():
            logits = network.module(torch.as_tensor(patches, dtype=torch.float32)).logits
        found[name] = float((logits.argmax(-1).numpy() == labels).mean())
    return found


def main() -> None:
    """Train all, and write the record."""
    asked: dict[str, list[dict[str, float]]] = {name: [] for name in NETWORKS}
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in NETWORKS.items():
            for seed in SEEDS:
                all_of_them = [*settings, f"seed={seed}", "cadence.signal=0", "cadence.save=0", "cadence.evaluate=0"]
                recipe = load_recipe("vit-small", all_of_them)
                asked[name].append(accuracies(recipe, Path(folder) / f"{name[:8]}-{seed}"))
                print(name, seed, asked[name][-1], flush=True)
    write_json(RECORD, {"command": "python -m benchmarks.corrupted_digits", "accuracy": asked, "rows": rows(asked)})


def rows(asked: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Means, and the deeper network's less the baseline's with its standard error over seeds, by corruption."""
    base, deep = asked.values()
    out = []
    for name in CORRUPTIONS:
        one, other = (np.array([run[name] for run in runs]) for runs in (base, deep))
        difference = other - one
        out.append({
            "corruption": name, "baseline": one.mean(), "DeepScaleLM": other.mean(), "difference": difference.mean(),
            "standard_error": difference.std(ddof=1) / math.sqrt(len(difference)),
        })  # fmt: skip
    return out


if __name__ == "__main__":
    main()

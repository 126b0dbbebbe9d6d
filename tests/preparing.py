"""Small recipes and made-up text for the tests of what training reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from signalprop_lab.training.examples import IGNORED, Example, Prepared
from signalprop_lab.training.recipe import Recipe, parse

_WORDS = ["tree", "house", "runs", "blue", "river", "under", "sings", "cold", "stone", "bright", "walks", "old", "ähre"]


def text_of(seed: int, words: int) -> str:
    """Words that follow each other at random, in lines of twelve."""
    drawn = np.random.default_rng(seed).choice(_WORDS, words)
    return "\n".join(" ".join(drawn[i : i + 12]) for i in range(0, words, 12))


def documents_of(n: int, words: int = 60) -> list[str]:
    """Different documents; each begins with a name of its own."""
    return [f"doc{i:03d} {text_of(i, words)}" for i in range(n)]


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def recipe(task: str, cache: Path, architecture: dict[str, Any] | None = None, **data: Any) -> Recipe:
    """A recipe of a small network."""
    shape = {"n_layers": 1, "d_model": 16} | (architecture or {})
    return parse(
        {
            "name": "test",
            "task": task,
            "model": {"architecture": shape, "scheme": "deepscalelm-simple"},
            "data": {"cache": str(cache)} | {k: str(v) if isinstance(v, Path) else v for k, v in data.items()},
        }
    )


def example(prepared: Prepared, i: int, seed: int = 0) -> Example:
    return prepared.train.example(i, np.random.default_rng([seed, i]))  # type: ignore[union-attr]


def validation(prepared: Prepared) -> list[Example]:
    return [prepared.validation.example(i, np.random.default_rng()) for i in range(len(prepared.validation))]


def labels_in(examples: list[Example]) -> np.ndarray[Any, Any]:
    found = np.concatenate([np.ravel(e["labels"]) for e in examples])
    return found[found != IGNORED]

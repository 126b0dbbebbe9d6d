"""A small thing to train, and sweeps of it: gradient descent on a parabola, whose best learning rate is known."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from signalprop.errors import InputError
from signalprop_lab.training.recipe import Recipe

FLOOR, CHANCE = 2.0, 5.0
BASE: dict[str, Any] = {
    "schema": "signalprop/recipe/1",
    "name": "parabola",
    "task": "causal-lm",
    "model": {
        "architecture": {"kind": "decoder", "n_layers": 2, "d_model": 16, "n_heads": 2},
        "scheme": "xavier",
    },
    "budget": {"steps": 12, "batch_size": 4},
    "cadence": {"log": 1},
}
SWEEP: dict[str, Any] = {
    "schema": "signalprop/sweep/1",
    "name": "parabolas",
    "base": BASE,
    "axes": {
        "method": {"plain": {"model.scheme": "xavier"}, "scaled": {"model.scheme": "deepscalelm"}},
        "layers": {
            "2": {"model.architecture.n_layers": 2},
            "8": {"model.architecture.n_layers": 8},
        },
    },
    "tune": {"key": "optimizer.learning_rate", "values": [0.01, 0.03, 0.1], "extend": 3},
    "seeds": [0, 1],
}


def curvature(recipe: Recipe) -> float:
    """Of the parabola: its inverse is the best rate, twice that diverges; grows with depth for one of the schemes."""
    depth = (recipe.model.architecture or {})["n_layers"]
    return 1.0 if recipe.model.scheme == "deepscalelm" else float(depth)


@dataclass(frozen=True)
class Ended:
    """A result, as `train` gives it."""

    data: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return self.data


def descend(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool,
    progress: bool,
    final: bool,
    interrupted_at: int | None = None,
) -> Ended:
    """Gradient descent that writes where it is after every step, and goes on from there.

    The environment variable PAUSE makes every step take so many seconds.
    """
    written = out / "state.json"
    state = json.loads(written.read_text()) if written.exists() else {"step": 0, "x": None}
    with (out / "started.txt").open("a") as file:
        file.write(f"{state['step']} {os.getpid()}\n")
    if recipe.optimizer.weight_decay == 0.5:
        raise InputError("this decay is refused")
    step, steps = state["step"], recipe.budget.steps
    x = state["x"] if step else float(1.5 + 0.1 * np.random.default_rng(recipe.seed).standard_normal())
    status, h, rate = "finished", curvature(recipe), recipe.optimizer.learning_rate
    loss = FLOOR + h * x * x
    while step < steps:
        x -= rate * 2 * h * x / 2
        step += 1
        loss = float(FLOOR + h * x * x)
        time.sleep(float(os.environ.get("PAUSE", "0")))
        beside = out / "state.tmp"
        beside.write_text(json.dumps({"step": step, "x": x}))
        beside.replace(written)
        if loss > 1e3:
            status = "diverged"
            break
        if step == interrupted_at:
            raise KeyboardInterrupt
    whole = status == "finished"
    result = {
        "schema": "signalprop/run/1", "name": recipe.name, "status": status, "reason": None, "steps": step,
        "train_loss": loss if whole else None, "eval_loss": loss if whole else None, "chance": CHANCE,
        "parameters": 1, "seconds": 0.5, "throughput": 100.0, "unit": "tokens", "scores": {"accuracy": 1 / loss},
    }  # fmt: skip
    return Ended(result)

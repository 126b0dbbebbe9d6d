"""When a run has left the plateau at chance."""

from __future__ import annotations

from pathlib import Path

import pytest

from signalprop_lab.training.plateau import left_at
from signalprop_lab.training.run import train


@pytest.mark.parametrize(
    ("losses", "step"),
    [
        ([3.0] * 20, None),
        ([3.0, 2.6] + [3.0] * 18, None),  # one lucky batch is no learning
        ([2.0] * 10, 50),  # not before there is a whole stretch
        ([3.0] * 10 + [2.85] * 10, 140),
    ],
)
def test_a_plateau_is_left_when_fifty_steps_are_below_chance(losses, step) -> None:
    lines = [{"step": 10 * (i + 1), "loss": loss} for i, loss in enumerate(losses)]
    assert left_at([*lines, {"step": 5, "eval_loss": 0.0}], 3.0) == step


@pytest.mark.slow
def test_a_run_may_end_there(tmp_path: Path) -> None:
    changes = {
        "model.architecture.n_layers": 1,
        "model.architecture.norm_placement": "pre",
        "optimizer.learning_rate": 0.01,
        "budget.until_learning": "true",
        "cadence.signal": 0,
    }
    settings = [f"{key}={value}" for key, value in changes.items()]
    result = train("bytes-decoder", tmp_path / "run", settings=settings, progress=False, final=False)
    assert result.status == "finished"
    assert result.scores["plateau_steps"] == result.steps < 200

"""Verdicts of small healthy models, before training and after 200 steps: no fault, no warning but what is planted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from diagnosing import findings, tiny, weights_of
from signalprop.data.batches import Batch, load_text, windows
from signalprop.diagnosis.result import Diagnosis
from signalprop.diagnosis.run import diagnose

STEPS, TOKENS = 200, 64


@lru_cache(maxsize=1)
def text() -> tuple[Any, Any]:
    """Bytes to train on, and others."""
    data = np.frombuffer(load_text()[:300_000].encode(), np.uint8).astype(np.int64)
    return data[:250_000], data[250_000:]


def fresh(family: str, n_layers: int) -> Any:
    """A model as transformers initialises it: weights of standard deviation 0.02, gains 1, biases 0."""
    width = {"n_embd": 64, "n_positions": 64} if family == "gpt2" else {"hidden_size": 64}
    more = {} if family == "gpt2" else {"max_position_embeddings": 64, "intermediate_size": 172}
    model = tiny(family, n_layers, initializer_range=0.02, vocab_size=256, **width, **more)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.fill_(float(name.endswith("weight")))
    return model


@pytest.fixture(scope="module")
def trained() -> Any:
    """A small Llama after 200 steps on bytes: 2.3 nats per byte, where bytes alone tell 3.1."""
    model = fresh("llama", 3).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        rows = torch.from_numpy(windows(text()[0], TOKENS, 6, step))
        model(input_ids=rows, labels=rows).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def found_in(model: nn.Module, *, cast: Sequence[str] = ("float8_e4m3fn", "int8")) -> Diagnosis:
    rows = windows(text()[1], TOKENS, 24, 0)
    batch = Batch(rows[:, :-1], rows[:, 1:], source="bytes")
    return diagnose(model, [batch], remove=True, cast=cast, cast_of=["both"])


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_before_training(family: str) -> None:
    """No layer costs anything yet, which is no fault of the layers."""
    found = found_in(fresh(family, 4))
    assert findings(found, "fault", "warning") == []
    assert ("no layer counts", tuple(range(4))) in findings(found, "note")


@pytest.mark.slow
def test_after_200_steps(trained: Any) -> None:
    found = found_in(trained)
    assert found.loss is not None and found.loss.value is not None and found.loss.value < 2.6
    assert findings(found, "fault", "warning") == []
    assert all((item.increase.value or 0) > 0.02 for item in found.removal.single)
    kinds = [kind for kind, _ in findings(found, "note")]
    assert "no scale" in kinds and "no layer counts" not in kinds  # int8 without a scale destroys it


@pytest.mark.slow  # test_faults.py has them in fresh models
@pytest.mark.parametrize(
    ("roles", "factor", "kind"),
    [
        (("query", "key"), 4.0, "scaled queries and keys"),
        (("query", "key", "value", "output", "gate", "up", "down"), 8.0, "scaled weights"),
        (("query", "key", "value", "output", "gate", "up", "down"), 0.0, "zero weights"),
    ],
)
def test_faults_in_a_trained_model(trained: Any, roles: tuple[str, ...], factor: float, kind: str) -> None:
    kept = {name: value.clone() for name, value in trained.state_dict().items()}
    try:
        with torch.no_grad():
            for weight, rows in weights_of(trained, 1, roles):
                weight[rows] *= factor
        assert findings(found_in(trained, cast=()), "fault") == [(kind, (1,))]
    finally:
        trained.load_state_dict(kept)

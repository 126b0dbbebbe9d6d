"""Verdicts of small healthy models, before training and after 200 steps: no fault, no warning but what is planted."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.doctor.faults import FAULTS
from benchmarks.doctor.healthy import HEALTHY
from benchmarks.doctor.table import judged, judged_healthy
from torch import nn

from diagnosing import findings, tiny
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


def found_in(model: nn.Module, *, cast: Sequence[str] = ("float8_e4m3fn", "int8")) -> Diagnosis:
    rows = windows(text()[1], TOKENS, 24, 0)
    batch = Batch(rows[:, :-1], rows[:, 1:], source="bytes")
    return diagnose(model, [batch], remove=True, cast=cast, cast_of=["both"])


@pytest.mark.parametrize("family", ["llama", pytest.param("bert", marks=pytest.mark.slow)])
def test_before_training(family: str) -> None:
    """No layer costs anything yet, which is no fault of the layers."""
    found = found_in(fresh(family, 4))
    assert findings(found, "fault", "warning") == []
    assert ("no layer counts", tuple(range(4))) in findings(found, "note")


# --- the table of planted faults: each is named first, with its place; healthy models are left in peace


def test_a_healthy_model_is_left_in_peace() -> None:
    """A trained one: test_trials."""
    (one,) = [each for each in HEALTHY if each.name == "fresh gemma2"]
    assert judged_healthy(one).verdict == "nothing"


@pytest.mark.slow
def test_the_whole_table() -> None:
    rows = [judged(fault) for fault in FAULTS]
    assert len(rows) >= 90
    assert sum(one.verdict == "named" for one in rows) >= 0.9 * len(rows)
    assert not [one for one in rows if one.verdict == "wrong"]
    good = [judged_healthy(one) for one in HEALTHY]
    assert len(good) >= 30
    assert not [one for one in good if one.verdict == "false alarm"]

"""`study` against the same steps taken one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import signalprop as sp
from applied import vanilla
from signalprop.data import default_batch

SMALL = sp.Architecture(n_layers=2, d_model=32, n_heads=2, vocab_size=100, seq_len=12, dropout=0.1)


def same(one: sp.Profile, other: sp.Profile) -> bool:
    return all(np.array_equal(one.forward[p].variance, other.forward[p].variance) for p in one.forward)


def test_fresh_networks() -> None:
    table, batch = sp.scheme("deepscalelm")(SMALL), default_batch(SMALL, batch_size=2, seed=5)
    done = []
    found = sp.study(SMALL, "deepscalelm", batches=batch, seeds=3, seed=5, progress=lambda k, n: done.append((k, n)))
    profiles = []
    for seed in (5, 6, 7):
        model = sp.build(table, seed=seed)
        torch.manual_seed(seed)
        profiles.append(sp.measure(model, batch))
    assert same(found.measured, sp.average(profiles))
    assert same(found.predicted, sp.predict(table, batch.statistics(SMALL)))
    assert done == [(1, 3), (2, 3), (3, 3)] and found.measured.n_seeds == 3
    assert same(sp.study(table, seeds=1, seed=5).measured, sp.study(table, batches=[batch], seeds=1, seed=5).measured)


def test_a_live_model_is_predicted_from_its_weights() -> None:
    model = vanilla("gpt2").eval()
    with torch.no_grad():
        model.transformer.h[1].mlp.c_proj.weight.mul_(10.0)
    found = sp.study(model, seeds=2, batch_size=1)
    table = sp.read_parametrization(model)
    assert found.predicted.scheme == found.measured.scheme == "as is"
    branch = found.predicted.forward["branch"].variance
    assert branch[3] > 50 * branch[1] and table.weights["down"][3] > 9 * table.weights["down"][1]
    assert found.measured.n_seeds == 2 and any("weights as random" in note for note in found.predicted.notes)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"subject": "gtp2"}, "unknown preset 'gtp2'"),
        ({"subject": SMALL, "scheme": "xaver"}, "xaver"),
        ({"subject": SMALL, "seeds": 0}, "seeds is 0; expected a whole number from 1 on"),
        ({"subject": SMALL, "fidelity": "simulate"}, "choose fidelity auto, moments or kernel"),
        ({"subject": SMALL, "batches": [default_batch(SMALL)] * 2}, "2 batches given; expected one"),
    ],
)
def test_one_line_per_mistake(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(sp.InputError, match=says):
        sp.study(**arguments)  # type: ignore[arg-type]

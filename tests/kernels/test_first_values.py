"""Attention that adds the values of the first one (value residuals): built, measured, simulated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import signalprop as sp
from signalprop.data.batches import Batch
from signalprop.errors import InputError
from signalprop.models import layerwise
from signalprop.results.cost import count_parameters, train_flops

_INPUTS = sp.InputStatistics(token_correlation=1 / 500, target_correlation=1 / 500)


def _table(kind: str = "decoder", **settings: Any) -> sp.Parametrization:
    a = sp.Architecture(
        kind=kind, n_layers=4, d_model=128, n_heads=2, d_ff=128, vocab_size=500, seq_len=32, dropout=0.0,
        positions="rotary", tied_embeddings=False, settings={"attention": settings} if settings else {},
    )  # fmt: skip
    return sp.scheme("xavier")(a)


def test_only_simulation_predicts_them() -> None:
    table = _table(own_value=0.5, first_value=2.0)
    assert sp.Parametrization.from_json(table.to_json()) == table
    assert sp.predict(table, _INPUTS).source == "simulated"
    for fidelity in ("moments", "kernel"):
        with pytest.raises(InputError, match="fidelity simulate"):
            sp.predict(table, _INPUTS, fidelity=fidelity)


def test_the_values_are_the_first_ones() -> None:
    """With factors 0 and 1 later value maps do nothing, and what they cost is counted."""
    table = _table(own_value=0.0, first_value=1.0)
    model = sp.build(table, seed=0).double().eval()
    ids = torch.arange(32)[None]
    before = model(ids).logits
    with torch.no_grad():
        for sublayer in model.sublayers()[2::2]:
            sublayer.branch.function.value.weight.mul_(3)
    assert torch.equal(model(ids).logits, before)
    assert train_flops(table, 1, 1)["attention"] > train_flops(_table(), 1, 1)["attention"]
    trained = replace(table, attention_trainable=True)
    assert count_parameters(trained)["total"] == sum(x.numel() for x in sp.build(trained, seed=0).parameters())
    assert count_parameters(trained)["multipliers"] == 4 * 2 + 3 * 2


@pytest.mark.parametrize("memory", [2**30, 1])
def test_one_sublayer_at_a_time_gives_the_gradients_of_the_whole(monkeypatch: pytest.MonkeyPatch, memory: int) -> None:
    monkeypatch.setattr(layerwise, "STREAM_MEMORY", memory)  # of 1: streams are computed again on the way back
    table = _table(own_value=0.5, first_value=2.0)
    ids = np.random.default_rng(0).integers(0, 500, (2, 32))
    batch = Batch(tokens=ids, targets=np.roll(ids, -1, 1))
    simulated = sp.simulate(table, batch=batch, n_seeds=1, seed=3, dtype=torch.float64)
    measured = sp.measure(sp.build(table, seed=3, dtype=torch.float64), batch)
    for point in ("stream_in", "branch", "stream_out"):
        one, other = simulated.gradient[point], measured.gradient[point]
        assert one.log_variance == pytest.approx(other.log_variance, abs=1e-9)
        assert one.token_correlation == pytest.approx(other.token_correlation, abs=1e-9)


def test_what_does_not_go_together() -> None:
    table = _table(first_value=0.5)
    with pytest.raises(InputError, match="value_skip"):
        sp.build(table.with_columns(value_skip=0.5), seed=0)
    with pytest.raises(InputError, match="norm_placement"):
        sp.build(sp.scheme("xavier")(table.architecture.replace(norm_placement="res-post")), seed=0)
    with pytest.raises(InputError, match="value_norm"):
        sp.build(_table(first_value=0.5, value_norm=True), seed=0)

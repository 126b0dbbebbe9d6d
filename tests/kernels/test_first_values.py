"""Attention that adds the values of the first one (value residuals): predicted, built, measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

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


def _errors(table: sp.Parametrization, measured: sp.Profile, fidelity: Literal["moments", "kernel"]) -> list[float]:
    """Largest error of ln of the streams' variance, of their token correlation, of ln of the gradient's variance."""
    predicted = sp.predict(table, _INPUTS, fidelity=fidelity)
    (p, m), (g, h) = [
        (getattr(predicted, way)[at], getattr(measured, way)[at])
        for way, at in (("forward", "stream_out"), ("gradient", "stream_in"))
    ]
    pairs = (
        (p.log_variance, m.log_variance),
        (p.token_correlation, m.token_correlation),
        (g.log_variance, h.log_variance),
    )
    return [float(np.abs(x - y).max()) for x, y in pairs]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("encoder", {"own_value": 0.5, "first_value": 2.0}),
        ("decoder", {"own_value": 0.5, "first_value": 2.0}),
        ("decoder", {"own_value": 0.5, "first_value": (0.0, 2.0), "gate": "features", "window": (8, 0)}),
    ],
)
def test_built_networks_are_predicted(kind: str, settings: dict[str, Any]) -> None:
    table = _table(kind, **settings)
    assert sp.Parametrization.from_json(table.to_json()) == table
    models = [sp.build(table, seed=seed) for seed in range(6)]
    ids = torch.randint(0, 500, (2, 32), generator=torch.Generator().manual_seed(0))
    measured = sp.average([sp.measure(model, {"inputs": ids, "targets": ids.roll(-1, 1)}) for model in models])
    variance, correlation, gradient = _errors(table, measured, "kernel")
    assert variance < 0.05
    assert correlation < 0.03
    assert gradient < 0.05
    variance, correlation, gradient = _errors(table, measured, "moments")
    assert variance < 0.05
    assert correlation < 0.05
    assert gradient < 0.25  # positions of a decoder differ
    without = table.architecture.replace(settings={"attention": settings | {"own_value": 1.0, "first_value": 0.0}})
    assert _errors(sp.scheme("xavier")(without), measured, "kernel")[2] > 0.15


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
        sp.predict(table.with_columns(value_skip=0.5))
    with pytest.raises(InputError, match="norm_placement"):
        sp.predict(sp.scheme("xavier")(table.architecture.replace(norm_placement="res-post")))
    with pytest.raises(InputError, match="value_norm"):
        sp.build(_table(first_value=0.5, value_norm=True), seed=0)


def test_a_grid_of_positions_is_all_of_them() -> None:
    a = _table(own_value=0.5, first_value=2.0).architecture.replace(seq_len=240, n_layers=3)
    grid, every = (sp.predict(sp.scheme("xavier")(a), _INPUTS, fidelity=fidelity) for fidelity in ("auto", "kernel"))
    assert any("positions, interpolated" in note for note in grid.notes)
    for way, at in (("forward", "stream_out"), ("gradient", "stream_in")):
        one, other = (getattr(profile, way)[at] for profile in (grid, every))
        assert one.log_variance == pytest.approx(other.log_variance, abs=1e-3)
        assert one.token_correlation == pytest.approx(other.token_correlation, abs=1e-3)

"""Mixtures of experts in whole networks: built against predicted, applied, counted, refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import signalprop as sp
from signalprop.errors import InputError
from signalprop.results.cost import active_parameters, count_parameters

SHARED = {"n_experts": 8, "top_k": 2, "width": 48, "shared_width": 64, "shared_gated": True, "normalised": False}


def architecture(**settings: Any) -> sp.Architecture:
    return sp.Architecture(
        kind="decoder", n_layers=3, d_model=128, n_heads=4, d_ff=96, gated=True, activation="silu", norm="rmsnorm",
        norm_bias=False, bias=False, positions="rotary", vocab_size=300, seq_len=24, tied_embeddings=False,
        branches=[["attention", "feed_forward"]] + [["attention", "experts"]] * 2, settings={"experts": settings},
    )  # fmt: skip


@pytest.fixture(scope="module")
def table() -> sp.Parametrization:
    return sp.scheme("xavier")(architecture(**SHARED))


@pytest.fixture(scope="module")
def measured(table: sp.Parametrization) -> sp.Profile:
    ids = torch.randint(0, 300, (4, 24), generator=torch.Generator().manual_seed(0))
    batch = {"inputs": ids, "targets": ids.roll(-1, 1)}
    return sp.average([sp.measure(sp.build(table, seed=seed), batch) for seed in range(8)])


INPUTS = sp.InputStatistics(token_correlation=1 / 300, target_correlation=1 / 300)


@pytest.mark.parametrize("fidelity", ["kernel"])
def test_expert_loads(table: sp.Parametrization, measured: sp.Profile, fidelity: Any) -> None:
    predicted = sp.predict(table, INPUTS, fidelity=fidelity)
    mine, theirs = (np.array(one.statistics["expert_load_variation"]) for one in (predicted, measured))
    assert mine[0] == theirs[0] == 0  # a layer without experts
    np.testing.assert_allclose(mine[1:], theirs[1:], rtol=0.2)
    assert any(f"{mine[2]:.2g} in layer 2" in note for note in predicted.notes)


def test_built_against_predicted(table: sp.Parametrization, measured: sp.Profile) -> None:
    predicted = sp.predict(table, INPUTS, fidelity="kernel")
    experts = np.array([3, 5])
    for mine, theirs in (
        (predicted.forward["branch"], measured.forward["branch"]),
        (predicted.gradient["stream_in"], measured.gradient["stream_in"]),
    ):
        np.testing.assert_allclose(mine.log_variance[experts], theirs.log_variance[experts], atol=0.1)
        np.testing.assert_allclose(mine.token_correlation[experts], theirs.token_correlation[experts], atol=0.04)


def test_applied_and_counted(table: sp.Parametrization) -> None:
    model = sp.build(table, seed=0)
    assert count_parameters(table)["total"] == sum(x.numel() for x in model.parameters())
    idle = count_parameters(table.architecture)["total"] - active_parameters(table.architecture)
    assert idle == 2 * 6 * 3 * 128 * 48
    sp.apply(model, "xavier-uniform", seed=1)
    assert sp.check(model, "xavier-uniform").ok
    fresh = sp.build(sp.scheme("xavier-uniform")(table.architecture), seed=1).state_dict()
    assert all(torch.equal(value, fresh[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        model.decoder.sublayers[3].branch.function.expert_up.weight[2] *= 3.0
    assert [row.name for row in sp.check(model, "xavier-uniform").wrong] == ["expert_up"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"top_k": 9}, "top_k 9 is more than the 8"),
        ({"n_groups": 3, "top_groups": 1}, "groups of one size"),
        ({"shared_gated": True}, "needs a shared_width"),
        ({"scores": "hash"}, "scores"),
    ],
)
def test_refusals(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        architecture(**settings)

"""Mixtures of experts in whole networks: built against predicted, applied, counted, refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import signalprop as sp
from signalprop.errors import InputError
from signalprop.models.residual import make_norm
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics
from signalprop.results.cost import active_parameters, count_parameters, train_flops

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


# --- dyT and Derf in the place of norms: built, counted, simulated; no formula follows them


SMALL = Architecture(
    kind="decoder", n_layers=2, d_model=32, n_heads=2, d_ff=64, norm="dyt", positions="none", bias=False,
    activation="silu", gated=True, vocab_size=50, seq_len=8, tied_embeddings=False,
)  # fmt: skip


@pytest.mark.parametrize(("norm", "function"), [("dyt", torch.tanh), ("derf", torch.erf)])
def test_an_activation_stands_in_the_norms_place(norm: str, function: Any) -> None:
    x = torch.linspace(-3, 3, 32)[None]
    made = make_norm(SMALL.replace(norm=norm), 1.5, torch.float32, 0.7)
    torch.testing.assert_close(made(x), 1.5 * function(0.7 * x))


def test_a_model_has_the_parameters_that_are_counted_and_is_read_again() -> None:
    p = sp.scheme("xavier")(SMALL).with_columns(norm_slope=0.3)
    model = sp.build(p, seed=0)
    assert count_parameters(p)["total"] == sum(q.numel() for q in model.parameters())
    assert sp.read_parametrization(model).norm_slope == pytest.approx(p.norm_slope)
    assert sp.Parametrization.from_json(p.to_json()) == p


def test_only_simulation_predicts_them() -> None:
    p = sp.scheme("xavier")(SMALL)
    alone = InputStatistics(kind="stream", variance=1.0, token_correlation=0.2, target_correlation=0.0)
    for fidelity in ("moments", "kernel"):
        with pytest.raises(sp.InputError, match=r"norm 'dyt' .* take simulate"):
            sp.predict(p, alone, fidelity=fidelity)
    small, usual = sp.predict(p.with_columns(norm_slope=1e-3), alone), sp.predict(p, alone)
    assert small.source == usual.source == "simulated"  # an activation of small numbers is linear: branches shrink
    ratio = small.forward["branch"].variance[0] / usual.forward["branch"].variance[0]
    assert np.log(ratio) == pytest.approx(np.log(1e-6 / np.tanh(0.5) ** 2), abs=1.0)


@pytest.mark.parametrize("changes", [{"norm_placement": "post"}, {"embedding_norm": True}, {"kind": "encoder-decoder"}])
def test_what_has_no_place_for_it_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(sp.InputError, match="norm 'dyt' stands before branches"):
        SMALL.replace(**changes)


def test_a_slope_is_a_unit_of_the_stream() -> None:
    p = sp.scheme("xavier")(SMALL)
    difference = sp.equivalent(p, p.with_columns(norm_slope=0.25)).difference
    assert difference is not None and difference.what == "slope by the size that it reads"


# --- attention with heads of two widths: what is built and counted of it, and what it cannot be


WIDTH = 128


def network(**own: Any) -> sp.Architecture:
    """Attention in a window, and to all tokens with wider heads; scores of variance 16 and 32."""
    settings = {"n_kv_heads": 1, "rotary_base": 1e5, "rotary_fraction": 0.5, "proportional": True, "value_norm": True}
    return sp.Architecture(
        kind="decoder", n_layers=2, d_model=WIDTH, n_heads=8, d_head=16, n_kv_heads=2, d_ff=128, gated=True,
        norm="rmsnorm", norm_placement="sandwich", norm_bias=False, bias=False, positions="rotary", qk_norm=True,
        attention_scale=1.0, vocab_size=300, seq_len=32, tied_embeddings=False,
        branches=(("attention", "feed_forward"), ("global_attention", "feed_forward")),
        settings={
            "attention": {"window": 8, "value_norm": True}, "global_attention": {"d_head": 32, **settings, **own},
        },
    )  # fmt: skip


@pytest.mark.parametrize("shared", [False, True])
def test_heads_of_two_widths_are_built_and_counted(shared: bool) -> None:
    a = network(shared=shared)
    table = sp.scheme("xavier")(a)
    assert sp.Parametrization.from_json(table.to_json()) == table
    model = sp.build(table, seed=0)
    gains = 2 * (16 + 32)  # of QK-norm, which built networks have in the scale of their scores
    assert count_parameters(table)["total"] == gains + sum(x.numel() for x in model.parameters())
    free = train_flops(sp.scheme("xavier")(network()), 1, 1)["attention"] - train_flops(table, 1, 1)["attention"]
    assert free == pytest.approx(2 * 2 * 32 * WIDTH * 32 * shared, rel=0.01)


def test_what_global_attention_cannot_be() -> None:
    with pytest.raises(InputError, match="expected a divisor of n_heads 8"):
        sp.predict(sp.scheme("xavier")(network(n_kv_heads=3)))
    with pytest.raises(InputError, match="a key's bias as a value is not derived"):
        sp.predict(sp.scheme("xavier")(network(shared=True).replace(qkv_bias=True)))

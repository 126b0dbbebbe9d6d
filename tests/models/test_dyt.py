"""DyT and Derf in the place of norms: built, counted, simulated; no formula follows them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import signalprop as sp
from signalprop.models.residual import make_norm
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics
from signalprop.results.cost import count_parameters

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

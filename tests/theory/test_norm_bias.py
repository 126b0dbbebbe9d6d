"""Biases of norms: what all tokens share of what branches read, and of the stream after a post-norm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import signalprop as sp
from signalprop.attachment.parametrization_of import read_parametrization
from signalprop.errors import InputError
from signalprop.network.inputs import InputStatistics
from signalprop.theory.branch_inputs import with_bias
from signalprop_lab.studies.growth import fixed_point

BIAS = 0.3
INPUTS = InputStatistics(kind="stream", token_correlation=0.2, variance=1.0, mean=0.0)


def table(**fields: Any) -> sp.Parametrization:
    shape: dict[str, Any] = {"n_layers": 4, "d_model": 128, "n_heads": 4, "seq_len": 24}
    return sp.scheme("xavier")(sp.Architecture(positions="none", **shape | fields))


@pytest.mark.parametrize(
    ("kind", "placement"),
    [
        ("encoder", "pre"), ("decoder", "sandwich"),
        *(pytest.param(x, "post", marks=pytest.mark.slow) for x in ("encoder", "decoder")),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_networks_with_biased_norms_are_predicted(kind: str, placement: str) -> None:
    """4 layers, d = 256, 16 networks; without the biases the token correlation is off."""
    p = table(kind=kind, norm_placement=placement, head="none", d_model=256).with_columns(norm_bias=BIAS)
    seen = sp.simulate(p, INPUTS, n_seeds=16)
    branch = seen.forward["branch"]
    for fidelity in ("kernel", "moments")[: 1 + (kind == "encoder")]:  # averages over positions do not compound
        right = sp.predict(p, INPUTS, fidelity=fidelity)
        wrong = sp.predict(p.with_columns(norm_bias=0.0), INPUTS, fidelity=fidelity)
        for profile, good in ((right, True), (wrong, False)):
            r = profile.forward["stream_out"].token_correlation - seen.forward["stream_out"].token_correlation
            assert np.abs(r).max() < 0.02 if good else np.abs(r).max() > (0.015 if placement == "sandwich" else 0.02)
        off = np.log(right.forward["branch"].variance / branch.variance)
        assert (np.abs(off) < 4 * branch.variance_se + 0.03).all()
        there, here = (profile.forward["stream_out"] for profile in (right, seen))
        assert (np.abs(np.log(there.variance / here.variance)) < 4 * here.variance_se + 0.015).all()
        assert seen.gradient is not None and right.gradient is not None
        there, here = (profile.gradient["stream_in"] for profile in (right, seen))
        error = 4 * here.variance_se + 0.06
        assert (np.abs(np.log(there.variance / here.variance)) < error).all()


def test_members_of_a_sweep_are_what_they_are_alone() -> None:
    p = table(norm_placement="post")
    sweep = p.with_columns(norm_bias=np.array([0.0, BIAS])[:, None] * np.ones(p.n_sublayers))
    both = sp.predict(sweep)
    for k, bias in enumerate((0.0, BIAS)):
        alone = sp.predict(p.with_columns(norm_bias=bias), fidelity="moments")
        for point in ("stream_out", "branch"):
            for name in ("variance", "token_correlation"):
                got, wanted = (getattr(x.forward[point], name) for x in (both, alone))
                np.testing.assert_allclose(got[k], wanted, rtol=1e-12)


def test_what_has_no_bias_stays_as_it_is_bit_for_bit() -> None:
    assert with_bias(1.7, 0.3, 0.0) == (1.7, 0.3)
    second, r = with_bias(np.array([1.7, 1.7]), np.array([0.3, 0.3]), np.array([0.0, 0.09]))
    assert (np.asarray(second)[0], np.asarray(r)[0]) == (1.7, 0.3)
    np.testing.assert_allclose(np.asarray(r)[1], (1.7 * 0.3 + 0.09) / 1.79)


def test_a_document_has_the_column_only_where_there_is_a_bias() -> None:
    p = table()
    assert "norm_bias" not in str(p.to_json())
    q = p.with_columns(norm_bias=np.where(np.arange(p.n_sublayers) == 2, BIAS, 0.0))
    assert sp.Parametrization.from_json(q.to_json()) == q != p
    assert "norm_bias 0.3" in q.table()


def test_biases_of_a_network_are_read() -> None:
    p = table(norm_placement="post").with_columns(norm_bias=BIAS)
    read = read_parametrization(sp.build(p, seed=0))
    np.testing.assert_allclose(read.norm_bias, BIAS, rtol=0.25)
    assert (read_parametrization(sp.build(table(), seed=0)).norm_bias == 0).all()


def test_a_trained_like_model_is_predicted_nearer_with_its_biases() -> None:
    model = sp.build(table(n_layers=6, head="none", kind="encoder"), seed=0).eval()
    torch.manual_seed(0)
    for sublayer in model.modules():
        if isinstance(norm := getattr(sublayer, "norm", None), torch.nn.LayerNorm):
            torch.nn.init.normal_(norm.weight, 0.7, 0.2)
            torch.nn.init.normal_(norm.bias, 0.0, BIAS)
    read = read_parametrization(model)
    seen = sp.simulate(read, INPUTS, n_seeds=4).forward["stream_out"].variance[-1]
    with_it, without = (
        abs(np.log(sp.predict(p, INPUTS).forward["stream_out"].variance[-1] / seen))
        for p in (read, read.with_columns(norm_bias=0.0))
    )
    assert with_it < 0.05 < 0.15 < without


def test_what_biases_are_not_derived_for_is_refused() -> None:
    p = table(kind="encoder").with_columns(norm_bias=BIAS)
    with pytest.raises(InputError, match="norm_bias 0"):
        fixed_point(p)
    with pytest.raises(InputError, match="norm_bias of sublayer 0"):
        table(norm_placement="res-post").with_columns(norm_bias=BIAS)
    with pytest.raises(InputError, match="norm_bias of sublayer 0"):
        table().with_columns(norm_bias=-BIAS)
    with pytest.raises(InputError, match="has no bias"):
        sp.build(table(norm="rmsnorm").with_columns(norm_bias=BIAS), seed=0)

"""What TGS shows of vanilla models, predicted and measured: records/growth.md in small."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from signalprop.measurement.simulation import simulate
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics
from signalprop.network.parametrization import Parametrization
from signalprop.results.profile import Profile
from signalprop.results.series import Series
from signalprop.schemes import scheme
from signalprop.theory.network import predict_moments

STREAM = InputStatistics(kind="stream", token_correlation=0.25, target_correlation=0.3)


def tgs(n_layers: int, **changes: Any) -> Architecture:
    shape = {"d_model": 128, "n_heads": 4, "seq_len": 64, "dropout": 0.0, "head": "none"}
    return Architecture.preset("tgs", n_layers=n_layers, **shape | changes)


def both(p: Parametrization, *, backward: bool = False) -> tuple[Profile, Profile]:
    measured = simulate(p, STREAM, n_seeds=8, batch_size=1, backward=backward)
    return predict_moments(p, STREAM, backward=backward), measured


def values_of_noci(a: Architecture) -> Parametrization:
    """Xavier, with values and outputs at Noci et al.'s initialisation (TGS v1 appendix F)."""
    theirs = scheme("noci")(a).weights
    return scheme("xavier")(a).with_columns(weight__value=theirs["value"], weight__output=theirs["output"])


def final_r(series: Series) -> tuple[float, float]:
    return float(series.token_correlation[-1]), float(series.token_correlation_se[-1])


def test_queries_and_keys_at_twice_xavier_make_gradients_explode() -> None:
    a = tgs(6)
    predicted, measured = both(scheme("xavier", qk_gain=2.0)(a), backward=True)
    ours, theirs = predicted.gradient["stream_in"], measured.gradient["stream_in"]
    # the overlap of two rows of weights is an interpolation at such scores: 20 %, and three standard errors
    error = float(ours.log_variance[0] - theirs.log_variance[0])
    assert abs(error) < 0.2 + 3 * float(theirs.variance_se[0]), (ours.variance[0], theirs.variance[0])
    plain = predict_moments(scheme("xavier")(a), STREAM).gradient
    assert theirs.variance[0] > 4 * plain["stream_in"].variance[0]


@pytest.mark.parametrize(("placement", "least"), [("pre", 0.95), ("post", 0.999)])
def test_values_and_outputs_of_noci_collapse_tokens_without_dropout(placement: str, least: float) -> None:
    predicted, measured = both(values_of_noci(tgs(12, norm_placement=placement)))
    r, _ = final_r(measured.forward["stream_out"])
    assert r > least and predicted.forward["stream_out"].token_correlation[-1] > least
    middle = measured.forward["stream_out"].token_correlation_se
    np.testing.assert_allclose(
        predicted.forward["stream_out"].token_correlation,
        measured.forward["stream_out"].token_correlation,
        atol=0.02 + 3 * float(middle.max()),
    )
    deep = predict_moments(values_of_noci(tgs(2000, norm_placement=placement)), STREAM, backward=False)
    assert deep.forward["stream_out"].token_correlation[-1] > 0.999

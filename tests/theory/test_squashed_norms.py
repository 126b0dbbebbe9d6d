"""DyT and Derf in the place of norms: numbers by quadrature, built networks, and growth with depth."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import signalprop as sp
from signalprop.models.synthetic import synthetic_batch
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics
from signalprop.network.parametrization import Parametrization
from signalprop.results.cost import count_parameters
from signalprop.theory.elements import squashed

SMALL = Architecture(
    kind="decoder", n_layers=3, d_model=256, n_heads=4, d_ff=512, norm="dyt", positions="none", bias=False,
    activation="silu", gated=True, vocab_size=500, seq_len=32, tied_embeddings=False,
)  # fmt: skip


@pytest.mark.parametrize(("name", "function"), [("tanh", np.tanh), ("erf", np.vectorize(math.erf))])
def test_moments_against_sampling(name: str, function: Any) -> None:
    """f(a x) of a pair of Gaussians of variance 3 and correlation .6; a = .7; slopes by finite differences."""
    x, y = np.random.default_rng(0).multivariate_normal([0, 0], [[3, 1.8], [1.8, 3]], 400_000).T
    f, g = function(0.7 * x), function(0.7 * y)
    fx, gy = ((function(0.7 * (v + 1e-4)) - w) / 1e-4 for v, w in ((x, f), (y, g)))
    wanted = [np.mean(f * f), np.mean(f * g) / np.mean(f * f), np.mean(fx * fx), np.mean(fx * gy)]
    assert squashed(name, 0.7, 3.0, 0.6) == pytest.approx(wanted, rel=1e-2)


@pytest.mark.parametrize(
    ("norm", "slope", "scheme"), [("dyt", 1.0, "xavier"), ("derf", 0.5, "xavier"), ("dyt", 0.5, "fixed")]
)
def test_predicted_is_what_built_networks_measure(norm: str, slope: float, scheme: str) -> None:
    a = SMALL.replace(norm=norm, tied_embeddings=scheme == "fixed")
    p = sp.scheme(scheme)(a).with_columns(norm_slope=slope)
    batch = synthetic_batch(a, InputStatistics(token_correlation=1 / 500, target_correlation=1 / 500), 4, 0)
    models = [sp.build(p, seed=seed) for seed in range(2)]
    measured = sp.average([sp.measure(model, batch) for model in models])
    predicted = sp.predict(p, batch.statistics(a), fidelity="kernel")
    for mine, theirs, bound in (
        (predicted.forward["stream_out"], measured.forward["stream_out"], 0.03),
        (predicted.forward["branch"], measured.forward["branch"], 0.12),
        (predicted.gradient["stream_in"], measured.gradient["stream_in"], 0.05),
    ):
        assert np.abs(mine.log_variance - theirs.log_variance).max() < bound
        assert np.abs(mine.token_correlation - theirs.token_correlation).max() < 0.03
    assert count_parameters(p)["total"] == sum(q.numel() for q in models[0].parameters())
    assert sp.read_parametrization(models[0]).norm_slope == pytest.approx(p.norm_slope)
    assert Parametrization.from_json(p.to_json()) == p


def deep(n_layers: int, norm: str) -> tuple[float, float]:
    """(variance at the top, ln of the gradient's variance first over last) of a pre-norm encoder with ReLU.

    Tokens have gradients that are independent, so that attention, which averages, sends none back.
    """
    a = Architecture.preset("tgs", n_layers=n_layers, norm=norm, norm_placement="pre", dropout=0.0)
    alone = InputStatistics(kind="stream", variance=1.0, token_correlation=0.2, target_correlation=0.0)
    profile = sp.predict(sp.scheme("xavier")(a), alone, fidelity="moments")
    return float(profile.forward["stream_out"].variance[-1]), float(profile.gradient["stream_in"].log_variance[0])


def test_the_gradient_grows_like_the_exponential_of_the_square_root_of_the_depth() -> None:
    """A slope's mean square falls like 1 / sigma, not 1 / sigma^2: docs/theory/components.md has the rate."""
    depths = np.array([768, 3072])
    variances, logs = np.transpose([deep(n, "derf") for n in depths])
    growth = np.diff(variances)[0] / np.diff(depths)[0]
    assert growth == pytest.approx(1.15, abs=0.02)  # the stream's variance: linear, as under norms
    feed_forward = 2 * 0.32 * (2 * 0.5 / np.pi) / np.sqrt(growth) * np.diff(depths**0.5)[0]
    assert feed_forward < np.diff(logs)[0] < 1.15 * feed_forward  # attention adds a power of the depth
    assert np.diff([deep(n, "rmsnorm")[1] for n in depths])[0] < np.log(4)  # a power, of an exponent below 1


@pytest.mark.parametrize("changes", [{"norm_placement": "post"}, {"embedding_norm": True}, {"kind": "encoder-decoder"}])
def test_what_is_not_derived_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(sp.InputError, match="norm 'dyt' is derived before branches"):
        SMALL.replace(**changes)


def test_a_slope_is_a_unit_of_the_stream() -> None:
    p = sp.scheme("xavier")(SMALL)
    moved = p.with_columns(norm_slope=0.25)
    difference = sp.equivalent(p, moved).difference
    assert difference is not None and difference.what == "slope by the size that it reads"

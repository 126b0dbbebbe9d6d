"""Tokens of one stream differ in size by chance, which norms on the way back see: against draws."""

from __future__ import annotations

import numpy as np
import pytest

from signalprop.kernels.state import State
from signalprop.kernels.tokens import predict_token_kernels
from signalprop.kernels.unmasked import UnmaskedAttention
from signalprop.measurement.simulation import simulate
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics
from signalprop.schemes import scheme
from signalprop.sublayers.feed_forward.kernel import kurtosis


@pytest.mark.parametrize(
    ("name", "gated", "value"), [("relu", False, 6.0), ("identity", True, 9.0), ("relu2", False, 52.5 / 1.5**2)]
)
def test_kurtosis_by_hand(name: str, gated: bool, value: float) -> None:
    """Moments of a Gaussian: E z^4 = 3, E z^8 = 105, and half of them."""
    assert kurtosis(name, 1.7, gated) == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("s0", [1.0, 16.0])
def test_how_sharp_rows_are_scatters_as_drawn(s0: float) -> None:
    """Orthogonal tokens: the size of what a head gives is the sum of its squared weights."""
    rng, length, d, dk = np.random.default_rng(2), 24, 128, 64
    x = np.linalg.qr(rng.normal(size=(d, length)))[0].T * np.sqrt(d)
    sums = []
    for _ in range(1500):
        wq, wk = rng.normal(size=(2, d, dk)) / np.sqrt(d)
        scores = (x @ wq) @ (x @ wk).T * np.sqrt(s0 / dk)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        sums.append(((weights / weights.sum(1, keepdims=True)) ** 2).sum(1))
    drawn = np.var(sums, axis=0) / np.mean(sums, axis=0) ** 2
    attention = UnmaskedAttention(np.eye(length), qk=s0, d_model=d, d_head=dk)
    own = np.diagonal(attention.forward())
    assert attention.uneven(own, 1).mean() == pytest.approx(drawn.mean(), rel=0.12)
    assert attention.uneven(own, 4) == pytest.approx(attention.uneven(own, 1) / 4)


def test_of_a_sum() -> None:
    one, other = State(np.diag([1.0, 2.0]), 0.0, np.array([0.2, 0.1])), State(np.diag([3.0, 2.0]), 0.0, 0.4)
    total = one.plus(other.times(0.5))
    assert total.uneven == pytest.approx([(0.2 + 0.4 * 1.5**2) / 2.5**2, (0.1 * 4 + 0.4) / 9])
    assert one.plus(State(0 * one.kernel)).uneven == pytest.approx(one.uneven)


def test_norms_divide_gradients_by_tokens_of_different_size() -> None:
    """Few hidden features: the mean of 1 over a size is 10 % more than 1 over the mean size."""
    a = Architecture(
        kind="decoder", n_layers=2, branches=("feed_forward",), d_model=256, d_ff=40, n_heads=4, vocab_size=100,
        seq_len=16, activation="relu", dropout=0.0, tied_embeddings=False,
    )  # fmt: skip
    table = scheme("xavier")(a)
    p = table.with_columns(weight__down=table.weights["down"] * 6)
    inputs = InputStatistics(token_correlation=0.01, target_correlation=0.01)
    predicted, drawn = predict_token_kernels(p, inputs), simulate(p, inputs, n_seeds=120, batch_size=1)
    assert predicted.gradient is not None and drawn.gradient is not None
    found, expected = (x.gradient["stream_in"] for x in (predicted, drawn))
    grown, measured = (float(x.variance[1]) - 1 for x in (found, expected))
    error = float(expected.variance_se[1]) * (measured + 1) / measured
    assert grown == pytest.approx(measured, rel=0.06)  # 12 % low with tokens of one size
    assert error < 0.02

"""What the papers print of single components and what holds, by sampling; `signalprop verify` samples the elements."""

from __future__ import annotations

import numpy as np
import pytest

from signalprop.network.architecture import Architecture
from signalprop.network.embedding_and_head import Embedding
from signalprop.network.inputs import InputStatistics
from signalprop.theory.branch_inputs import read_normed, read_raw
from signalprop.theory.embedding import embed
from signalprop.theory.log_arithmetic import NO_SIGNAL
from signalprop.theory.signals import inner_correlation


def test_layer_norm_errata() -> None:
    """Identical tokens stay identical; v1 prints (1 - 1/d) r, and no (d - 2) / (d - 3) on the way back."""
    a = Architecture(n_layers=1, d_model=100, n_heads=1, norm_eps=0.0)
    assert read_normed(a, 1.0, NO_SIGNAL, 0.0, 1.0, 0.0)[1] == 1
    rng, d, n = np.random.default_rng(0), 16, 200_000
    x, g = rng.normal(size=(2, n, d))
    x -= x.mean(1, keepdims=True)
    norm2 = np.square(x).sum(1)
    # the Jacobian takes out the mean and the direction of x, and divides by the standard deviation
    left = np.square(g).sum(1) - d * g.mean(1) ** 2 - (g * x).sum(1) ** 2 / norm2
    returned = left / norm2  # mean square of the gradient: |left|^2 / d over |x|^2 / d
    error = returned.std() / np.sqrt(n)
    assert abs(returned.mean() - 14 / 13) < 4.5 * error
    assert returned.mean() - 1 > 4.5 * error


def test_embedding_sum_simulated() -> None:
    """Dropout leaves the covariance and divides the variance: the papers leave the correlation as it was."""
    rng, p, d, n = np.random.default_rng(1), 0.1, 64, 4000
    a = Architecture(n_layers=1, d_model=d, n_heads=1, seq_len=2, n_segments=2, embedding_dropout=p)
    made = embed(
        a,
        Embedding(token=1.0, position=1.0, segment=1.0),
        InputStatistics(token_correlation=0.04, segment_correlation=2 / 3),
    )
    same_token, same_segment = rng.random(n) < 0.04, rng.random(n) < 2 / 3
    token, position, segment = rng.normal(size=(3, n, 2, d))
    token[same_token, 1] = token[same_token, 0]
    segment[same_segment, 1] = segment[same_segment, 0]
    x = (token + position + segment) * (rng.random((n, 2, d)) >= p) / (1 - p)
    products, squares = (x[:, 0] * x[:, 1]).mean(1), np.square(x).mean((1, 2))
    assert abs(products.mean() - made.covariance) < 4.5 * products.std() / np.sqrt(n)
    assert abs(squares.mean() - made.variance) < 4.5 * squares.std() / np.sqrt(n)
    assert made.token_correlation == pytest.approx((0.04 + 2 / 3) / 3 * (1 - p))


def test_cosines_of_few_mapped_features() -> None:
    """A norm on few features: two tokens' cosine is smaller than the tokens' correlation."""
    rng, width, r = np.random.default_rng(2), 8, 0.6
    x, y = rng.standard_normal((2, 200_000, width))
    y = r * x + np.sqrt(1 - r**2) * y
    cosine = (x * y).sum(1) / np.sqrt(np.square(x).sum(1) * np.square(y).sum(1))
    assert cosine.mean() / r == pytest.approx(inner_correlation(r, width), abs=0.006)  # 1/width^2 is left out


@pytest.mark.parametrize("normed", [False, True])
def test_a_mean_is_shared_by_all_tokens(normed: bool) -> None:
    """Branches read second moments: with no norm, and after an RMSNorm, which leaves the mean."""
    a, (mean, variance, r) = Architecture(n_layers=1, d_model=8, n_heads=1, norm="rmsnorm"), (0.5, 2.0, 0.3)
    stream, whole = (float(np.log(variance)), r, mean), variance + mean**2
    second, shared, other = read_normed(a, 4.0, np.log(0.1), *stream) if normed else read_raw(a, *stream)
    assert shared == pytest.approx((r * variance + mean**2) / whole)
    assert second == pytest.approx(4 * whole / (whole + 0.1) if normed else whole)
    assert other == pytest.approx(np.log(whole + 0.1) if normed else 0.0)

"""Attention of tokens that have one length, against heads written out in NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from signalprop.kernels.bidirectional_attention import UnmaskedAttention
from signalprop.kernels.causal_attention import TokenAttention
from signalprop.kernels.sliding_window import windowed
from signalprop.theory.attention import Sizes, across, backward, backward_apart, forward, on_itself
from signalprop.theory.attention_rows import Band, Mask
from signalprop.theory.equal_norm_tokens import HeadNorms

N, D = 24, 64


def tokens(rng: np.random.Generator, draws: int, r: float, *, one_length: bool) -> np.ndarray:
    """(draws, N, D), of mean correlation r."""
    if one_length:
        r *= 1 + (1 - r * r) / (2 * D)  # the mean cosine of Gaussian vectors is below their correlation
    x = math.sqrt(r) * rng.standard_normal((draws, 1, D)) + math.sqrt(1 - r) * rng.standard_normal((draws, N, D))
    return np.asarray(x * math.sqrt(D) / np.linalg.norm(x, axis=2, keepdims=True) if one_length else x)


def simulated(s0: float, r: float, causal: bool, draws: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    """Variance and covariance of what heads give, of values of infinite width, and their standard errors."""
    rng, found = np.random.default_rng(2), []
    for _ in range(draws // 250):
        x = tokens(rng, 250, r, one_length=True)
        query, key = (rng.standard_normal((250, D, D)) * s0**0.25 / math.sqrt(D) for _ in range(2))
        scores = (x @ query) @ (x @ key).swapaxes(1, 2) / math.sqrt(D)
        if causal:
            scores[:, ~np.tri(N, dtype=bool)] = -np.inf
        weights = np.exp(scores - scores.max(2, keepdims=True))
        out = weights / weights.sum(2, keepdims=True) @ x
        square, total = (out**2).sum((1, 2)), (out.sum(1) ** 2).sum(1)
        shared = ((x.sum(1) ** 2).sum(1) / D - N) / (N * (N - 1)) - r  # the sample's correlation, a control
        found.append(np.stack([square / (N * D), (total - square) / (N * (N - 1) * D), shared], axis=1))
    values = np.concatenate(found)
    fit = np.linalg.lstsq(np.column_stack([np.ones(draws), values[:, 2]]), values[:, :2], rcond=None)[0]
    rest = values[:, :2] - values[:, 2:] * fit[1]
    return fit[0], rest.std(0) / math.sqrt(draws)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("s0", "r"), [(1.0, 0.0), (4.0, 0.3)])
def test_what_heads_give(s0: float, r: float, causal: bool) -> None:
    mean, error = simulated(s0, r, causal)
    kernel = (TokenAttention if causal else UnmaskedAttention)(
        (1 - r) * np.eye(N) + r, s0, D, d_head=D, one_length=True
    ).forward()
    own = np.trace(kernel) / N
    by_kernel = [own, (kernel.sum() - N * own) / (N * (N - 1))]
    by_moments = forward(on_itself(r, s0, N, D, D, causal=causal, one_length=True))
    unlike = forward(on_itself(r, s0, N, D, D, causal=causal))
    for found, largest in ((by_kernel, 0.007), (by_moments, 0.012)):
        assert np.all(np.abs(found - mean) < largest * mean[0] + 4 * error), (found, mean, error)
    assert unlike[0] - mean[0] > 0.01 * mean[0] + 4 * error[0]  # Gaussian lengths are something else


@pytest.mark.parametrize("one_length", [False, True])
@pytest.mark.parametrize("r", [0.0, 0.4])
def test_gradient_of_a_query_at_small_scores(r: float, one_length: bool) -> None:
    """It is the centred kernel's squared norm over n²."""
    x = tokens(np.random.default_rng(2), 4000, r, one_length=one_length)
    own = x - x.mean(1, keepdims=True)
    found = ((own @ own.swapaxes(1, 2) / D) ** 2).sum((1, 2)) / N**2
    shared = ((x.sum(1) ** 2).sum(1) / D - (x**2).sum((1, 2)) / D) / (N * (N - 1)) - r
    fit = np.polyfit(shared, found, 1) if one_length else np.array([0.0, found.mean()])
    error = (found - fit[0] * shared).std() / math.sqrt(len(found))
    s0 = 1e-6
    predicted = backward_apart(across(r, r, s0, N, N, D, D, one_length=one_length))[0][0] / s0
    assert abs(predicted / fit[1] - 1) < 0.002 + 4 * error / fit[1]


SEEN = {
    False: np.ones((N, N), dtype=bool),
    True: np.tri(N, dtype=bool),
    Band(8, True): np.tri(N, dtype=bool) & ~np.tri(N, k=-8, dtype=bool),
}
WIDTH = 16  # of a head


def normed_heads(rng: np.random.Generator, x: np.ndarray, mask: Mask, s0: float) -> tuple[float, float]:
    """Variance of what heads with QK-norm give, and of what independent gradients of size 1 send back to x."""
    query, key, value = (rng.standard_normal((len(x), D, WIDTH)) / math.sqrt(D) for _ in range(3))
    of_queries, of_keys = (np.sqrt(((x @ w) ** 2).mean(2, keepdims=True)) for w in (query, key))
    q, k = x @ query / of_queries, x @ key / of_keys
    scores = np.where(SEEN[mask], q @ k.swapaxes(1, 2) * math.sqrt(s0 / WIDTH), -np.inf)
    weights = np.exp(scores - scores.max(2, keepdims=True))
    weights /= weights.sum(2, keepdims=True)
    arrived = rng.standard_normal((len(x), N, WIDTH))
    moved = weights * (arrived @ (x @ value).swapaxes(1, 2))
    moved = (moved - weights * moved.sum(2, keepdims=True)) * math.sqrt(s0 / WIDTH)
    back = weights.swapaxes(1, 2) @ arrived @ value.swapaxes(1, 2)
    for at, to, size, w in ((q, moved @ k, of_queries, query), (k, moved.swapaxes(1, 2) @ q, of_keys, key)):
        back += (to - at * (to * at).mean(2, keepdims=True)) / size @ w.swapaxes(1, 2)
    return float(((weights @ x) ** 2).mean()), float((back**2).sum(2).mean() / WIDTH)


@pytest.mark.parametrize("mask", SEEN)
@pytest.mark.parametrize(("s0", "r"), [(1.0, 0.0), (4.0, 0.3)])
def test_queries_and_keys_of_one_length(mask: Mask, s0: float, r: float) -> None:
    rng, norms = np.random.default_rng(5), HeadNorms(WIDTH, WIDTH)
    drawn = [normed_heads(rng, tokens(rng, 250, r, one_length=True), mask, s0) for _ in range(16)]
    mean, error = np.mean(drawn, 0), np.std(drawn, 0) / 4
    kernel, fields = (1 - r) * np.eye(N) + r, {"qk": s0, "d_model": D, "d_head": WIDTH, "one_length": True}
    if isinstance(mask, Band):
        head = windowed(kernel, 8, None, None, causal=True, norms=norms, **fields)
    else:
        head = (TokenAttention if mask else UnmaskedAttention)(kernel, norms=norms, **fields)
    x = Sizes(N, N, D, WIDTH, causal=mask, one_length=True, norms=norms).on_itself(r, s0)
    by_kernel = [np.trace(k) / N for k in (head.forward(), head.backward(np.eye(N)))]
    for found in (by_kernel, [forward(x)[0], backward(x)[0]]):
        assert np.all(np.abs(found / mean - 1) < [0.01, 0.04] + 4 * error / mean), (found / mean - 1, error / mean)
    if not (mask or r):  # where it is most
        assert forward(Sizes(N, N, D, WIDTH, one_length=True).on_itself(r, s0))[0] > 1.04 * mean[0]


def test_flat_scores_of_equal_keys() -> None:
    words = np.arange(N) * 2 // 3
    rng, norms = np.random.default_rng(6), HeadNorms(WIDTH, WIDTH)
    drawn = [normed_heads(rng, tokens(rng, 250, 0.0, one_length=True)[:, words], False, 4.0)[0] for _ in range(16)]
    kernel = np.equal.outer(words, words).astype(float)
    head = UnmaskedAttention(kernel, qk=4.0, d_model=D, d_head=WIDTH, one_length=True, norms=norms)
    found, error = np.trace(head.forward()) / N / np.mean(drawn) - 1, np.std(drawn) / 4 / np.mean(drawn)
    assert abs(found) < 0.02 + 4 * error, (found, error)

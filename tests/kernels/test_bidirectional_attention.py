"""Attention without a mask to keys some of which are equal, against sampled heads."""

from __future__ import annotations

import numpy as np
import pytest

from signalprop.kernels.bidirectional_attention import UnmaskedAttention
from signalprop.kernels.causal_attention import TokenAttention
from signalprop.kernels.similar_keys import centred, similar_keys
from signalprop.kernels.softmax_rows import rows_of
from signalprop.theory.repeated_keys import softmax_of_groups

IDS = np.array([0] * 9 + [1] * 5 + [2] * 3 + [3] * 3 + list(range(4, 16)))


ALIKE = (IDS[:, None] == IDS) & ~np.eye(len(IDS), dtype=bool)


def sampled(
    kernel: np.ndarray, gradient: np.ndarray, s0: float, draws: int, causal: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Of heads of 32 features, (draws, T, T) both: output kernels, and those of the gradient of all three paths.

    What values send back sums to the sum of `gradient`; its deviation in a draw is taken from every pair.
    """
    rng, t, width = np.random.default_rng(0), len(kernel), 32

    def root(k: np.ndarray) -> np.ndarray:
        values, vectors = np.linalg.eigh(k)
        return np.asarray(vectors * np.sqrt(np.maximum(values, 0.0)))

    q, k, v = root(kernel) @ rng.normal(size=(3, draws, t, width))
    g = root(gradient) @ rng.normal(size=(draws, t, width))
    q, k = q * s0**0.25, k * s0**0.25
    a = np.exp(q @ k.swapaxes(1, 2) / np.sqrt(width))
    a = np.tril(a) if causal else a
    a /= a.sum(2, keepdims=True)
    moved = g @ v.swapaxes(1, 2)
    moved = a * (moved - (a * moved).sum(2, keepdims=True)) / np.sqrt(width)
    back = gradient.sum() / t**2 - (g.sum(1) ** 2).mean(1)[:, None, None] / t**2 + np.zeros((draws, t, t))
    for sent, scale in ((moved @ k, s0**0.5), (moved.swapaxes(1, 2) @ q, s0**0.5), (a.swapaxes(1, 2) @ g, 1.0)):
        back += scale * sent @ sent.swapaxes(1, 2) / width
    return a @ kernel @ a.swapaxes(1, 2), back


def agrees(found: float, drawn: np.ndarray, within: float) -> bool:
    """Within four standard errors and so much of the mean."""
    return bool(abs(found - drawn.mean()) < 4 * drawn.std() / np.sqrt(len(drawn)) + within * drawn.mean())


@pytest.mark.parametrize("common", [0.0, 0.4])
@pytest.mark.parametrize("s0", [1.0, 4.0, 16.0])
def test_equal_keys(s0: float, common: float) -> None:
    """To first order in the scores variances are up to 24 % too large, what equal keys get up to half."""
    equal = (IDS[:, None] == IDS).astype(float)
    kernel, gradient = common + (1 - common) * equal, 0.3 + 0.7 * equal
    made = UnmaskedAttention(kernel, qk=s0, d_model=10**9)
    out, back = sampled(kernel, gradient, s0, 300)
    for ours, drawn, within in ((made.forward(), out, 0.01), (made.backward(gradient), back, 0.04)):
        assert agrees(np.trace(ours), np.trace(drawn, axis1=1, axis2=2), within)
        assert agrees(ours.sum(), drawn.sum((1, 2)), 0.02)
        assert agrees(ours[ALIKE].sum(), drawn[:, ALIKE].sum(1), 0.08)


@pytest.mark.parametrize("degree", [0.9, 0.5])
@pytest.mark.parametrize("s0", [1.0, 4.0, 16.0])
def test_keys_that_are_alike_by_some_degree(s0: float, degree: float) -> None:
    """As dropped embeddings of one token are; counted as fewer equal keys, variances are up to 24 % too large."""
    kernel = degree * (IDS[:, None] == IDS) + (1 - degree) * np.eye(len(IDS))
    made = UnmaskedAttention(kernel, qk=s0, d_model=10**9)
    out, back = sampled(kernel, gradient := 0.1 + 0.9 * np.eye(len(IDS)), s0, 300)
    for ours, drawn, within in ((made.forward(), out, 0.01), (made.backward(gradient), back, 0.03)):
        assert agrees(np.trace(ours), np.trace(drawn, axis1=1, axis2=2), within)
    assert agrees(made.forward().sum(), out.sum((1, 2)), 0.03)


@pytest.mark.parametrize(("causal", "s0"), [(False, 1.0), (False, 16.0), (True, 1.0), (True, 4.0)])
def test_two_queries_share_a_key(s0: float, causal: bool) -> None:
    """The sum of gradients over pairs of tokens, which is 1 to 12 % low without what two queries share."""
    both = 0.3 + 0.7 * np.eye(40)
    attention = (TokenAttention if causal else UnmaskedAttention)(both, qk=s0, d_model=10**9)
    drawn = sampled(both, both, s0, 150, causal)[1].sum((1, 2))
    found = attention.backward(both).sum()
    assert agrees(found, drawn, 0.005)
    if isinstance(attention, UnmaskedAttention):
        shared = (attention._to_queries(both, np.ones(40)) * (1 - np.eye(40))).sum()
    else:
        shared = (both * attention._keys_in_common * (1 - np.eye(40))).sum()
    assert not agrees(found - shared, drawn, 0.005)


def test_equal_keys_move_by_what_their_group_leaves() -> None:
    """E A_k (1 - weight of k's group), of groups of one, two and six keys, over 200,000 rows."""
    word, s = np.repeat(np.arange(6), [1, 1, 1, 2, 2, 6]), 4.0
    attention = UnmaskedAttention((word[:, None] == word).astype(float), s, d_model=10**9)
    sizes, same = np.bincount(word)[word].astype(float), np.equal.outer(word, word).astype(float)
    rows = rows_of(np.full(2, s), np.full(2, 6.0))
    shapes = attention._of_groups(rows, rows, softmax_of_groups(s, sizes), same)[2]
    a = np.exp(np.sqrt(s) * np.random.default_rng(0).normal(size=(200_000, 6)))[:, word]
    a /= a.sum(1, keepdims=True)
    moved = a * (1 - a @ same)
    error = moved.std(0) / len(a) ** 0.5
    assert (np.abs(shapes[0] - moved.mean(0)) < 4.5 * error + 0.005 * moved.mean(0)).all()


def test_keys_far_from_the_others_get_more_of_the_squared_weights() -> None:
    """E A_k^2 of two sizes of keys over 100,000 rows, to first order: within 1.2 %; 3 % off with 2/3 the exponent."""
    size, s = np.repeat([0.92, 1.08], 6), 2.0
    weights = UnmaskedAttention(np.diag(size), s, d_model=10**9)._weights
    far = centred(np.diag(size)).diagonal()
    scores = np.random.default_rng(0).normal(size=(100_000, 12)) * np.sqrt(weights.variance.mean() * far / far.mean())
    a = np.exp(scores)
    second = np.square(a / a.sum(1, keepdims=True)).mean(0).reshape(2, 6).mean(1)
    found = np.square(weights.value[1]).reshape(2, 6).mean(1)
    np.testing.assert_allclose(found / found.sum(), second / second.sum(), rtol=0.012)


@pytest.mark.parametrize("length", [1, 7])
def test_keys_that_are_all_the_same_are_one(length: int) -> None:
    made = UnmaskedAttention(np.ones((length, length)), qk=3.0, d_model=64)
    assert made.forward() == pytest.approx(np.ones((length, length)))
    assert made.backward(np.eye(length)) == pytest.approx(np.full((length, length), 1 / length))


def test_uniform_weights_under_dropout_by_hand() -> None:
    """Without scores every weight is 1/n; masks of single weights add p / (1 - p) / n^2 of every token's variance."""
    n, p = 5, 0.2
    root = np.random.default_rng(0).standard_normal((2, n, n))
    kernel, gradient = root @ root.swapaxes(1, 2)
    attention = UnmaskedAttention(kernel, qk=0.0, d_model=64, dropout=p)
    masks = p / (1 - p) / n**2 * np.eye(n)
    np.testing.assert_allclose(attention.forward(), kernel.mean() + masks * kernel.trace())
    np.testing.assert_allclose(attention.backward(gradient), gradient.sum() / n**2 + masks * gradient.trace())


@pytest.mark.parametrize("degree", [1.0, 0.5])
def test_how_many_keys_are_like_each(degree: float) -> None:
    """Three of one word, two of another and one by itself, whatever the correlation of two of a word."""
    words = np.array([0, 0, 0, 1, 1, 2])
    kernel = np.where(words[:, None] == words, degree, 0.0) + (1 - degree) * np.eye(6)
    np.testing.assert_allclose(similar_keys(kernel, 1.0).size, [3, 3, 3, 2, 2, 1])


def test_how_far_equal_keys_lie_from_their_mean() -> None:
    words = np.array([0, 0, 0, 1, 1, 2])
    kernel = (words[:, None] == words).astype(float)
    found = UnmaskedAttention(kernel, 1.0, d_model=256)
    np.testing.assert_allclose(found._about_mean, np.diagonal(centred(kernel)))
    np.testing.assert_allclose(found._about_mean, 1 - np.array([3, 3, 3, 2, 2, 1]) / 3 + 14 / 36)
    np.testing.assert_allclose(found._distance, 1)


@pytest.mark.parametrize("s0", [1.0, 4.0, 16.0])
def test_how_weights_of_equal_keys_scatter(s0: float) -> None:
    """Against 40,000 rows of weights: their means, and standard deviations over that of a key that has no equal."""
    words = np.array([0, 0, 0, 1, 1, 2])
    weights = UnmaskedAttention((words[:, None] == words).astype(float), s0, d_model=10**9)._weights
    rows = np.exp(np.sqrt(s0) * np.random.default_rng(0).normal(size=(40_000, 3))[:, words])
    rows /= rows.sum(1, keepdims=True)
    np.testing.assert_allclose(weights.mean, rows.mean(0), rtol=0.02)
    deviation = rows.std(0)
    np.testing.assert_allclose(weights.moves / weights.moves[-1], deviation / deviation[-1], rtol=0.02)

"""The gradient at the top, against explicit draws of a tied head and against random networks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from signalprop.data.batches import text_batch
from signalprop.measurement.simulation import simulate
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics
from signalprop.prediction import predict
from signalprop.schemes import scheme
from signalprop.theory.loss_gradient import coincidences, gradient_at_top, top_gradient

TOKENS = np.array([3, 5, 3, 7, 5, 9, 3, 1, 1, 8])
NEXT = np.array([5, 3, 7, 5, 9, 3, 3, 1, 8, 2])  # the targets of positions 6 and 7 are the tokens that they read
MASKED = np.array([4, 6, 3, 2, 6, 9, 4, 0, 1, 4])  # three of them copied


@pytest.mark.parametrize(("targets", "raised"), [(NEXT, 1.0), (MASKED, 5.0), (NEXT, 9.0)])
def test_the_gradient_along_the_stream_against_explicit_tables(targets: np.ndarray, raised: float) -> None:
    """Every pair of positions, before and behind a norm; `raised` is the logit of the token that is read."""
    rng = np.random.default_rng(0)
    classes, d, share, draws = 400, 1024, 0.7, 60  # share of the token's row in the stream
    n = len(TOKENS)
    std = float(np.sqrt(raised / d / np.sqrt(share)))  # with scale 1/std and alpha std = sqrt(share)
    a = Architecture(n_layers=1, d_model=d, seq_len=n, vocab_size=classes, norm_placement="post", kind="decoder")
    p = scheme("deepnorm")(a)
    scale = raised / (np.sqrt(share) * d * std)
    p = replace(
        p,
        embedding=p.embedding.model_copy(update={"token": std}),
        head=p.head.model_copy(update={"weight": std, "scale": scale}),
    )
    equal = (TOKENS[:, None] == TOKENS[None, :]).astype(float)
    whole, across = np.zeros((n, n)), np.zeros((n, n))
    for _ in range(draws):
        table = rng.normal(size=(classes, d)) * std
        x = np.sqrt(share) / std * table[TOKENS] + np.sqrt(1 - share) * rng.normal(size=(n, d))
        logits = scale * x @ table.T
        pi = np.exp(logits - logits.max(1, keepdims=True))
        pi /= pi.sum(1, keepdims=True)
        pi[np.arange(n), targets] -= 1
        g = pi @ table / std / np.sqrt(d)
        unit = x / np.linalg.norm(x, axis=1, keepdims=True)
        whole += g @ g.T / draws
        g = g - (g * unit).sum(1, keepdims=True) * unit
        across += g @ g.T / draws
    r = share * equal
    np.fill_diagonal(r, 1.0)
    top = top_gradient(p, np.zeros((n, n)), r, float(np.log(share / std**2)))
    pairs = (
        (targets[:, None] == targets[None, :]).astype(float),
        equal,
        (TOKENS[:, None] == targets[None, :]).astype(float),
        (targets == TOKENS).astype(float)[:, None],
    )
    off = ~np.eye(n, dtype=bool)
    for measured, normed in ((whole, False), (across, True)):
        variance = np.diagonal(np.broadcast_to(top.variance(pairs[3], normed=normed), (n, n)))
        # lengths of rows scatter by sqrt(2/d), and with them the logit of the token that is read
        np.testing.assert_allclose(np.diagonal(measured), variance, atol=0.04)
        np.testing.assert_allclose(measured[off], np.asarray(top.covariance(*pairs, normed=normed))[off], atol=0.04)


POST: dict[str, Any] = {"n_layers": 2, "d_model": 256, "n_heads": 4, "seq_len": 64, "vocab_size": 1000,
                        "norm_placement": "post"}  # fmt: skip


def with_table(fields: dict[str, Any], std: float, scale: float) -> Any:
    p = scheme("deepnorm")(Architecture(**{**POST, **fields}))
    weight = std if p.architecture.has_tied_head else p.head.weight
    return replace(
        p,
        embedding=p.embedding.model_copy(update={"token": std}),
        head=p.head.model_copy(update={"weight": weight, "scale": scale}),
    )


@pytest.mark.parametrize(
    ("fields", "std", "scale"),
    [
        ({"kind": "decoder"}, 1.0, 1 / 16),
        ({"kind": "decoder", "positions": "none"}, 1.0, 1 / 16),
        ({"kind": "decoder"}, 0.2, 1.0),
        ({"kind": "encoder"}, 1.0, 1 / 16),
        ({"kind": "encoder-decoder", "target_len": 48}, 1.0, 1 / 16),
        ({"kind": "decoder", "tied_embeddings": False}, 1.0, 1 / 16),
    ],
)
def test_a_post_norm_sends_back_what_is_orthogonal_to_the_stream(
    fields: dict[str, Any], std: float, scale: float, word_stream: np.ndarray
) -> None:
    p = with_table(fields, std, scale)
    batch = text_batch(p.architecture, np.where(word_stream < 1000, word_stream, 0), 2, 0)
    measured, predicted = simulate(p, batch=batch, n_seeds=4), predict(p, batch.statistics(p.architecture))
    ours, theirs = predicted.gradient["branch"], measured.gradient["branch"]
    assert abs(ours.variance[-1] / theirs.variance[-1] - 1) < 0.006 + 4 * theirs.variance_se[-1]
    if predicted.fidelity == "kernel":
        assert abs(ours.token_correlation[-1] - theirs.token_correlation[-1]) < 0.008


def test_a_post_norm_takes_two_directions_of_an_untied_head_and_rows_of_a_tied_one() -> None:
    def kept(**fields: Any) -> float:
        p = with_table({"kind": "decoder", **fields}, 1.0, 1 / 16)
        inputs = text_batch(p.architecture, np.arange(900) % 37, 2, 0).statistics(p.architecture)
        return float(gradient_at_top(p, inputs, 0.0, 0.1, -0.5).orthogonal)

    head = with_table({"kind": "decoder", "tied_embeddings": False}, 1.0, 1 / 16).head

    assert 0.4 < kept() < 0.9
    logits = 256 * (head.weight * head.scale) ** 2  # their variance, of tokens of second moment 1
    assert kept(tied_embeddings=False) == pytest.approx(1 - (2 + logits) / 256, abs=1e-6)
    assert kept(tied_embeddings=False, norm="rmsnorm") == pytest.approx(1 - (1 + logits) / 256, abs=1e-6)
    assert kept(final_norm=True) == 1.0


@pytest.mark.parametrize(
    ("classes", "d", "logits", "share"), [(2000, 256, 256.0, 0.058), (1000, 64, 16.0, 0.1), (500, 64, 8.0, 0.3)]
)
def test_the_probability_of_the_token_that_is_read(classes: int, d: int, logits: float, share: float) -> None:
    """Explicit tables: its mean, its mean square, and its mean product over two streams that are alike by r."""
    rng, r, n, draws = np.random.default_rng(0), 0.5, 40, 12
    found = []
    for _ in range(draws):
        table, words = rng.normal(size=(classes, d)), rng.integers(classes, size=n)
        common, *rest = rng.normal(size=(3, n, d))
        of_pair = []
        for own in rest:
            x = share**0.5 * table[words] + (r - share) ** 0.5 * common + (1 - r) ** 0.5 * own
            x /= np.sqrt((x**2).mean(1, keepdims=True))
            z = (logits / d) ** 0.5 * x @ table.T
            of_pair.append(1 / np.exp(z - z[np.arange(n), words][:, None]).sum(1))
        one, other = of_pair
        found.append([one.mean(), (one**2).mean(), (one * other).mean()])
    a = Architecture(kind="decoder", n_layers=1, d_model=d, seq_len=8, vocab_size=classes, n_heads=1, final_norm=True)
    p = scheme("xavier")(a)
    std = (logits / d) ** 0.5  # of the table: a norm leaves second moment 1
    head = p.head.model_copy(update={"weight": std, "scale": 1.0})
    p = replace(p, embedding=p.embedding.model_copy(update={"token": std}), head=head)
    top = top_gradient(p, 0.0, r, float(np.log(share / std**2)))
    copied = (top.covariance(0, 1, 0, 0, normed=False) - top.covariance(0, 0, 0, 0, normed=False)) / top.through
    error = np.std(found, axis=0) / draws**0.5
    np.testing.assert_allclose(
        [top.p_read, top.p_read_square, copied], np.mean(found, axis=0), atol=4 * error.max() + 0.01
    )


def test_masked_language_modelling_reads_masks() -> None:
    """Of the positions that carry loss 80 % are read as one token, 10 % unchanged and 10 % as another token."""
    rng = np.random.default_rng(0)
    a = Architecture.preset("bert-base", n_layers=1)
    words = rng.choice(4, p=[0.5, 0.2, 0.1, 0.2], size=(4, 1_000_000))  # of which two are equal with .34
    c = 0.34
    mask = rng.random((2, 1_000_000))
    read = np.where(mask < 0.8, -1, np.where(mask < 0.9, words[:2], words[2:]))
    found = coincidences(a, InputStatistics(target_correlation=c))
    assert found.targets == c
    assert found.tokens == pytest.approx((read[0] == read[1]).mean(), abs=0.003)
    assert found.crossed == pytest.approx((read[0] == words[1]).mean(), abs=0.003)


def test_equal_ids_are_counted_pair_by_pair() -> None:
    tokens, targets = np.random.default_rng(0).integers(0, 3, (2, 2, 7))
    targets[0, [1, 4]] = -1
    found = coincidences(Architecture.preset("gpt2"), InputStatistics(tokens=tokens, targets=targets))
    at = [[i for i in range(7) if aims[i] >= 0] for aims in targets]
    pairs = [(row, i, j) for row, places in enumerate(at) for i in places for j in places if i != j]
    for name, one, other in (("targets", targets, targets), ("tokens", tokens, tokens), ("crossed", tokens, targets)):
        assert getattr(found, name) == pytest.approx(np.mean([one[r, i] == other[r, j] for r, i, j in pairs]))
    both = [(row, i) for row, places in enumerate(at) for i in places]
    assert found.copied == pytest.approx(np.mean([tokens[r, i] == targets[r, i] for r, i in both]))

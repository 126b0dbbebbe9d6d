"""Attention that sees a window: sums against brute force, and whole networks against built ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import signalprop as sp
from signalprop.data.batches import Batch
from signalprop.errors import InputError
from signalprop.kernels.sliding_window import windowed
from signalprop.theory.attention_rows import Band, over_rows

T = 13


def _kernel(seed: int) -> np.ndarray:
    x = np.random.default_rng(seed).normal(size=(T, 40))
    return np.asarray(x @ x.T / 40 + 0.3)


def _seen(window: int, causal: bool) -> np.ndarray:
    ahead = np.subtract.outer(np.arange(T), np.arange(T))
    return (ahead >= 0) & (ahead < window) if causal else np.abs(ahead) <= window // 2


@pytest.mark.parametrize("causal", [True, False])
def test_at_zero_scores_values_are_averaged_over_what_is_seen(causal: bool) -> None:
    kernel, gradient = _kernel(0), _kernel(1)
    made = windowed(kernel, 5, None, None, qk=0.0, d_model=64, causal=causal)
    seen = _seen(5, causal)
    weights = seen / seen.sum(1, keepdims=True)
    assert made.forward() == pytest.approx(weights @ kernel @ weights.T)
    assert made.backward(gradient) == pytest.approx(weights.T @ gradient @ weights)


@pytest.mark.parametrize(("window", "causal", "length"), [(5, True, T), (6, False, T), (3, True, 40), (4, False, 40)])
def test_meetings_by_brute_force(window: int, causal: bool, length: int) -> None:
    ahead = np.subtract.outer(np.arange(length), np.arange(length))
    seen = (ahead >= 0) & (ahead < window) if causal else np.abs(ahead) <= window // 2
    a = seen / seen.sum(1, keepdims=True)
    jacobians = [np.diag(row) - np.outer(row, row) for row in a]
    meet = sum(np.trace(x @ y) for i, x in enumerate(jacobians) for j, y in enumerate(jacobians) if i != j)
    value = (a @ a.T).sum() - (a * a).sum()
    found = Band(window, causal).meetings(length)
    assert found == pytest.approx((value / length, meet / length, (1 / seen.sum(1)).mean()))
    assert Band(window, causal).lengths(length) == pytest.approx(seen.sum(1))


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_layers_with_windows_and_without_positions(kind: str) -> None:
    a = sp.Architecture(
        kind=kind, n_layers=3, d_model=128, n_heads=2, d_ff=128, vocab_size=500, seq_len=48, positions="rotary",
        tied_embeddings=False, settings={"attention": {"window": (6, 0), "rotates": (True, True, False)}},
    )  # fmt: skip
    table = sp.scheme("xavier")(a)
    assert sp.Parametrization.from_json(table.to_json()) == table
    ids = torch.randint(0, 500, (2, 48), generator=torch.Generator().manual_seed(0))
    batch = {"inputs": ids, "targets": ids.roll(-1, 1)}
    measured = sp.average([sp.measure(sp.build(table, seed=seed), batch) for seed in range(6)])
    inputs = sp.InputStatistics(token_correlation=1 / 500, target_correlation=1 / 500)

    def off(table: sp.Parametrization, fidelity: str = "kernel") -> np.ndarray:
        predicted = sp.predict(table, inputs, fidelity=fidelity)
        pairs = ("forward", "branch"), ("gradient", "stream_in")
        found = [(getattr(p, way)[at].log_variance for p in (predicted, measured)) for way, at in pairs]
        return np.array([np.abs(one - other).max() for one, other in found])

    assert sp.predict(table, inputs).fidelity == "kernel"
    assert (off(table) < (0.1, 0.1)).all()
    assert (off(table, "moments") < 0.45).all()
    assert off(sp.scheme("xavier")(a.replace(settings={"attention": {"window": 0}})))[0] > 0.15


def test_equal_tokens_in_windows_and_large_scores_are_said() -> None:
    def said(window: int, scores: float, words: int = 10) -> bool:
        a = sp.Architecture(kind="decoder", n_layers=2, d_model=32, n_heads=2, seq_len=20, vocab_size=50, qk_norm=True,
                            positions="rotary", settings={"attention": {"window": window}})  # fmt: skip
        table = sp.scheme("fixed", std=0.02)(a)
        table = table.with_columns(score_scale=table.score_scale * scores**0.5)
        ids = np.arange(20)[None] % words
        inputs = Batch(tokens=ids, targets=ids).statistics(a)
        return any("in a window" in note for note in sp.predict(table, inputs, fidelity="kernel").notes)

    assert said(4, 4.0)
    assert not said(4, 1.0) and not said(0, 4.0) and not said(4, 4.0, words=20)


def test_moments_say_what_they_leave_out_and_shapes_have_no_window() -> None:
    a = sp.Architecture(kind="decoder", n_layers=2, d_model=32, n_heads=2, seq_len=20, vocab_size=50,
                        settings={"attention": {"window": 4}})  # fmt: skip
    notes = sp.predict(sp.scheme("xavier")(a), fidelity="moments").notes
    assert any("window" in note for note in notes)
    assert not any("window" in note for note in sp.predict(sp.scheme("xavier")(a.replace(seq_len=4))).notes)
    with pytest.raises(InputError, match="window"):
        sp.predict(sp.scheme("xavier")(a.replace(positions="alibi")))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("window", "length"), [(7, 40), (2, 9), (12, 20)])
def test_averages_over_rows_of_a_window(window: int, length: int, causal: bool) -> None:
    """Of 1, and of what falls as 1/n and as (ln n)/n with the rows' lengths n."""
    band = Band(window, causal)
    lengths = band.lengths(length)
    rows = over_rows(length, band)
    for of in (lambda n: 1.0, lambda n: 1 / n, lambda n: np.log(n) / n):
        found = sum(weight * of(n) for n, weight in rows)
        assert found == pytest.approx(np.mean([of(n) for n in lengths]), rel=2e-3)

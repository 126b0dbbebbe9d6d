"""Latent attention: a small network predicted and built, and DeepSeek-V3's configuration."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import signalprop as sp
from signalprop.errors import InputError
from signalprop.results.cost import count_parameters, train_flops
from signalprop.theory.signals import Signal, through_inner_norm

LATENT = {"rank": 48, "query_rank": 64, "d_rotary": 16, "d_value": 32}


def test_a_built_network_is_predicted() -> None:
    a = sp.Architecture(
        kind="decoder", n_layers=2, d_model=128, n_heads=2, d_head=64, d_ff=128, vocab_size=500, seq_len=32,
        positions="rotary", tied_embeddings=False, branches=("latent_attention", "feed_forward"),
        settings={"latent_attention": LATENT},
    )  # fmt: skip
    table = sp.scheme("xavier")(a)
    assert sp.Parametrization.from_json(table.to_json()) == table
    models = [sp.build(table, seed=seed) for seed in range(5)]
    assert count_parameters(table)["total"] == sum(x.numel() for x in models[0].parameters())
    assert train_flops(table, 1, 1)["attention"] > 0
    ids = torch.randint(0, 500, (2, 32), generator=torch.Generator().manual_seed(0))
    measured = sp.average([sp.measure(model, {"inputs": ids, "targets": ids.roll(-1, 1)}) for model in models])
    inputs = sp.InputStatistics(token_correlation=1 / 500, target_correlation=1 / 500)
    for fidelity, most in (("kernel", 0.12), ("moments", 0.25)):
        predicted = sp.predict(table, inputs, fidelity=fidelity)
        for way, at in (("forward", "branch"), ("gradient", "stream_in")):
            one, other = (getattr(profile, way)[at].log_variance for profile in (predicted, measured))
            assert np.abs(one - other).max() < most
    with pytest.raises(InputError, match="d_rotary"):
        sp.scheme("xavier")(a.replace(settings={"latent_attention": {"d_rotary": 64}}))
    with pytest.raises(InputError, match="value_skip"):
        sp.predict(table.with_columns(value_skip=0.5))


def test_scores_do_not_see_the_size_of_what_they_norm() -> None:
    a = sp.Architecture(
        n_layers=1, d_model=64, n_heads=2, d_head=32, branches=("latent_attention", "feed_forward"), positions="none",
        settings={"latent_attention": {**LATENT, "d_rotary": 1}}, norm_eps=0.0,
    )  # fmt: skip
    from signalprop.sublayers.latent_attention.signal import of

    made = of(sp.scheme("xavier")(a), 0)
    small, large = (made.of_scores(0, size)[0] for size in (1.0, 9.0))
    shared = made.of_scores(0, 1.0)[1]
    assert large / small == pytest.approx(1 - shared + 9 * shared)
    one, nine = (made.forward(0, Signal(size, 0.2 * size)).per_token for size in (1.0, 9.0))
    assert nine == pytest.approx(one, rel=0.05)


@pytest.mark.parametrize("r", [0.0, 0.6, 1.0])
def test_what_the_norm_on_latents_does_to_gradients_agrees_with_sampling(r: float) -> None:
    """Of two tokens of correlation r: sum over the latent's features of what comes back to both; first order."""
    from signalprop.sublayers.latent_attention.signal import of

    d, rank, draws, generator = 96, 48, 3000, np.random.default_rng(0)
    x = np.zeros((2, d))
    x[0, 0], x[1, :2] = d**0.5, d**0.5 * np.array([r, (1 - r * r) ** 0.5])
    found = []
    for _ in range(draws):
        w = generator.normal(size=(rank, d)) / d**0.5
        c = x @ w.T
        size = np.sqrt((c**2).mean(1))
        one, other = (w - np.outer(v, v @ w) / (v @ v) for v in c)
        found.append(float((one * other).sum()) / rank / (size[0] * size[1]))
    a = sp.Architecture(
        n_layers=1, d_model=d, n_heads=2, d_head=48, branches=("latent_attention", "feed_forward"),
        settings={"latent_attention": {**LATENT, "rank": rank}},
    )  # fmt: skip
    factor = float(through_inner_norm(r, *of(sp.scheme("xavier")(a), 0).widths))
    error = np.std(found) / draws**0.5
    assert abs(np.mean(found) - factor) < 4 * error + 4 / rank**2

"""Gated DeltaNet as a kind: its module against transformers', its draws against networks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

import signalprop as sp
from signalprop.data.batches import Batch
from signalprop.models.sublayers import make_sublayer
from signalprop.models.surroundings import Surroundings
from signalprop.results.cost import count_parameters


def architecture(n_layers: int, **changes: Any) -> sp.Architecture:
    given = {"n_heads": 8, "n_groups": 4, "d_value": 16, "d_key": 32} | changes
    return sp.Architecture(
        kind="decoder", n_layers=n_layers, d_model=128, branches=("gated_delta_net",), norm="rmsnorm", positions="none",
        vocab_size=500, seq_len=32, bias=False, tied_embeddings=False, settings={"gated_delta_net": given},
    )  # fmt: skip


def test_the_module_is_that_of_transformers() -> None:
    """Heads in groups, so in transformers' order: query, key, values, gates of a group together."""
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        hidden_size=128, linear_num_value_heads=8, linear_num_key_heads=4, linear_value_head_dim=16,
        linear_key_head_dim=32, num_hidden_layers=1,
    )  # fmt: skip
    theirs = Qwen3NextGatedDeltaNet(config, 0)
    mine: Any = make_sublayer(sp.scheme("xavier")(architecture(1)), 0, 0, torch.float32, None).branch.function
    rows = torch.split(theirs.in_proj_qkvz.weight.view(4, 128, 128), [32, 32, 32, 32], 1)
    few = theirs.in_proj_ba.weight.view(4, 4, 128).split(2, 1)
    with torch.no_grad():
        for role, weight in zip(("query", "key", "value", "gate", "write", "decay"), (*rows, *few), strict=True):
            getattr(mine, f"delta_{role}").weight.copy_(weight.reshape(-1, 128))
        mine.delta_out.weight.copy_(theirs.out_proj.weight)
        mine.delta_filter.weight.copy_(theirs.conv1d.weight)
        mine.A_log.copy_(theirs.A_log)
        torch.testing.assert_close(mine.dt_bias, theirs.dt_bias)
        x = torch.randn(2, 70, 128)
        torch.testing.assert_close(mine(x, Surroundings()), theirs(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_predictions_against_networks() -> None:
    """One layer: branches within 5 %, correlations within .02, gradients within 10 %, plus what networks scatter."""
    shape = {"n_heads": 4, "n_groups": 2, "d_value": 64, "d_key": 64}
    table = sp.scheme("xavier")(architecture(1, **shape)).with_columns(weight__delta_filter=0.4)
    ids = torch.randint(0, 500, (4, 32), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens=ids.numpy(), targets=ids.roll(-1, 1).numpy())
    models = [sp.build(table, seed=seed) for seed in range(12)]
    assert count_parameters(table)["total"] == sum(x.numel() for x in models[0].parameters())
    profiles = [sp.measure(model, batch) for model in models]
    measured = sp.average(profiles)
    logs = np.log([p.gradient["stream_in"].variance for p in profiles if p.gradient])
    scatter = logs.std(0, ddof=1) / len(logs) ** 0.5
    predicted = sp.predict(table, batch.statistics(table.architecture))
    here, there = predicted.forward["branch"], measured.forward["branch"]
    np.testing.assert_allclose(here.variance, there.variance, rtol=0.05)
    np.testing.assert_allclose(here.token_correlation, there.token_correlation, atol=0.02)
    ratio = predicted.gradient["stream_in"].variance / measured.gradient["stream_in"].variance
    assert (np.abs(np.log(ratio)) < 0.1 + 3 * scatter).all(), (ratio, scatter)
    assert any("gradients through gated DeltaNets" in note for note in predicted.notes)


def test_what_is_refused() -> None:
    with pytest.raises(sp.InputError, match="not a multiple of n_groups 3"):
        architecture(1, n_groups=3)

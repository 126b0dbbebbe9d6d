"""Mamba-2 and Gated DeltaNet as kinds: modules against transformers', draws against networks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

import signalprop as sp
from signalprop.data.batches import Batch
from signalprop.models.sublayers import make_sublayer
from signalprop.models.surroundings import Surroundings
from signalprop.network.moments import FloatArray
from signalprop.results.cost import count_parameters
from signalprop.results.series import Series

SMALL = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 8, "num_hidden_layers": 2, "vocab_size": 40,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip


def theirs(**changes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**{**SMALL, "n_groups": 2, **changes})).eval()


def test_the_module_is_that_of_transformers() -> None:
    """Also over a border of chunks, 64 tokens."""
    model = theirs()
    mixer = model.backbone.layers[0].mixer
    table = sp.read_parametrization(model)
    mine: Any = make_sublayer(table, 0, 0, torch.float32, None).branch.function
    rows = torch.split(mixer.in_proj.weight, [64, 64, 16, 16, 4])
    with torch.no_grad():
        for role, weight in zip(("gate", "value", "key", "query", "step"), rows, strict=True):
            getattr(mine, f"scan_{role}").weight.copy_(weight)
        mine.scan_out.weight.copy_(mixer.out_proj.weight)
        mine.scan_filter.load_state_dict(mixer.conv1d.state_dict())
        for name in ("A_log", "dt_bias", "D"):
            getattr(mine, name).copy_(getattr(mixer, name))
        x = torch.randn(2, 70, 32)
        torch.testing.assert_close(mine(x, Surroundings()), mixer(x), rtol=2e-5, atol=2e-6)


def test_transformers_draw_what_the_scheme_says() -> None:
    a = sp.Architecture.from_hf(theirs(hidden_size=128, num_heads=16, initializer_range=0.05).config)
    model = theirs(hidden_size=128, num_heads=16, initializer_range=0.05)
    read, said = sp.read_parametrization(model), sp.scheme("huggingface")(a)
    for role, std in said.weights.items():
        np.testing.assert_allclose(read.weights[role], std, rtol=0.1, err_msg=role)
    assert count_parameters(said)["total"] == sum(p.numel() for p in model.parameters())
    mixer = model.backbone.layers[1].mixer
    given = a.settings["mamba2"]
    torch.testing.assert_close(mixer.A_log.exp(), torch.tensor(given.rate()).float())  # type: ignore[attr-defined]
    steps = torch.nn.functional.softplus(mixer.dt_bias)
    assert bool((steps > 0.00099).all()) and bool((steps < 0.101).all())
    assert sp.check(model, "huggingface").ok


def test_predictions_without_its_norm_against_networks() -> None:
    """Two layers of width 128; 6 networks. Branches within 3 %, correlations within .02, gradients within 15 %.

    All beside 3 standard errors of both: without a norm single networks scatter by 40 %.
    """
    a = sp.Architecture(
        kind="decoder", n_layers=2, d_model=128, branches=("mamba2",), norm="rmsnorm", positions="none",
        vocab_size=500, seq_len=32, bias=False, tied_embeddings=False,
        settings={"mamba2": {"n_heads": 8, "d_head": 32, "d_state": 32, "normed": False}},
    )  # fmt: skip
    table = sp.scheme("xavier")(a).with_columns(weight__scan_filter=0.4)
    ids = torch.randint(0, 500, (4, 32), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens=ids.numpy(), targets=ids.roll(-1, 1).numpy())
    measured = sp.average([sp.measure(sp.build(table, seed=seed), batch) for seed in range(6)])
    predicted = sp.predict(table, batch.statistics(a))
    here, there = predicted.forward["branch"], measured.forward["branch"]
    assert (np.abs(np.log(here.variance / there.variance)) < 0.03 + 3 * uncertain(here, there)).all()
    np.testing.assert_allclose(here.token_correlation, there.token_correlation, atol=0.02)
    assert predicted.gradient is not None and measured.gradient is not None
    here, there = predicted.gradient["stream_in"], measured.gradient["stream_in"]
    assert (np.abs(np.log(here.variance / there.variance)) < 0.15 + 3 * uncertain(here, there)).all()


def uncertain(*means: Series) -> FloatArray:
    """Standard error of ln of the ratio of two variances."""
    return np.sqrt(sum(np.square(x.variance_se) for x in means if x.variance_se is not None))


# --- gated DeltaNet as a kind: its module against transformers', its draws against networks


def architecture(n_layers: int, **changes: Any) -> sp.Architecture:
    given = {"n_heads": 8, "n_groups": 4, "d_value": 16, "d_key": 32} | changes
    return sp.Architecture(
        kind="decoder", n_layers=n_layers, d_model=128, branches=("gated_delta_net",), norm="rmsnorm", positions="none",
        vocab_size=500, seq_len=32, bias=False, tied_embeddings=False, settings={"gated_delta_net": given},
    )  # fmt: skip


def test_gated_delta_nets_are_those_of_transformers() -> None:
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
def test_gated_delta_nets_against_networks() -> None:
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


def test_heads_that_groups_do_not_divide_are_refused() -> None:
    with pytest.raises(sp.InputError, match="not a multiple of n_groups 3"):
        architecture(1, n_groups=3)

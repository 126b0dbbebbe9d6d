"""Mamba-2 as a kind: its module against transformers', its formulas against networks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

import signalprop as sp
from signalprop.data.batches import Batch
from signalprop.models.sublayers import make_sublayer
from signalprop.models.surroundings import Surroundings
from signalprop.network.kinds import kind_named
from signalprop.results.cost import count_parameters
from signalprop.sublayers.mamba2.scan import Gains, scan

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


@pytest.mark.parametrize(("normed", "rtol"), [(True, 0.03), (False, 0.15)])
def test_predictions_against_networks(normed: bool, rtol: float) -> None:
    """Two layers of width 128; 6 networks. Branches within 3 %, correlations within .02, gradients within 15 %.

    Without a norm branches of 6 networks scatter by 5 %, and only kernels see that early tokens' are smaller.
    """
    a = sp.Architecture(
        kind="decoder", n_layers=2, d_model=128, branches=("mamba2",), norm="rmsnorm", positions="none",
        vocab_size=500, seq_len=32, bias=False, tied_embeddings=False,
        settings={"mamba2": {"n_heads": 8, "d_head": 32, "d_state": 32, "normed": normed}},
    )  # fmt: skip
    table = sp.scheme("xavier")(a).with_columns(weight__scan_filter=0.4)
    ids = torch.randint(0, 500, (4, 32), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens=ids.numpy(), targets=ids.roll(-1, 1).numpy())
    measured = sp.average([sp.measure(sp.build(table, seed=seed), batch) for seed in range(6)])
    for fidelity in ("moments", "kernel")[not normed :]:
        predicted = sp.predict(table, batch.statistics(a), fidelity=fidelity)
        here, there = predicted.forward["branch"], measured.forward["branch"]
        np.testing.assert_allclose(here.variance, there.variance, rtol=rtol)
        np.testing.assert_allclose(here.token_correlation, there.token_correlation, atol=0.02)
        ratio = predicted.gradient["stream_in"].variance / measured.gradient["stream_in"].variance
        np.testing.assert_allclose(ratio, 1, rtol=0.15)


def test_kernels_of_many_tokens_are_refused() -> None:
    a = sp.Architecture(n_layers=1, d_model=64, branches=("mamba2",), seq_len=300)
    of = kind_named("mamba2").part("kernel").of(sp.scheme("xavier")(a), 0, ())
    with pytest.raises(sp.InputError, match=r"worked out up to 256 tokens, these are 300"):
        of.forward(0, np.eye(300))


def test_filters_send_back_more_where_they_made_the_input_large() -> None:
    """Large taps make steep silus: without a scan and a norm the gradient at values is 9 % larger by that."""
    tokens, rng = 8, np.random.default_rng(0)
    settings = {"steps": (1e-9, 1e-8), "normed": False, "conv_bias": False}
    a = sp.Architecture(n_layers=1, d_model=64, branches=("mamba2",), seq_len=tokens, settings={"mamba2": settings})
    s = a.settings["mamba2"]
    kernel, none = 0.5 * np.eye(tokens) + 0.5, Gains(*(0.0,) * len(Gains._fields))
    of_values = none._replace(value=1.0, filter=0.25)
    read = of_values._replace(gate=1.0, key=1.0, query=1.0, step=1.0)
    predicted = [scan(s, kernel, read, none, uniform=False, layer=n).back(np.eye(tokens), of_values) for n in range(8)]
    taps = torch.tensor(0.5 * rng.standard_normal((40_000, 4, 1)))
    x = torch.tensor(rng.standard_normal((40_000, tokens)) @ np.linalg.cholesky(kernel).T, requires_grad=True)
    before = torch.nn.functional.pad(x, (3, 0))
    value = torch.nn.functional.silu(sum(taps[:, k] * before[:, 3 - k : 3 - k + tokens] for k in range(4)))
    gate, sent = torch.tensor(rng.standard_normal((2, 40_000, tokens)))
    found = torch.autograd.grad(value, x, torch.nn.functional.silu(gate) * sent)[0]
    here = np.trace(np.mean(predicted, 0)) / tokens
    np.testing.assert_allclose(here, float(found.square().mean()), rtol=0.03)

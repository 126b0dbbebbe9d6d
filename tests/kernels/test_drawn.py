"""Drawn sublayers: closed forms against draws, draws against random networks, and what a prediction says of them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

import signalprop as sp
from choice import some
from signalprop.data.batches import Batch
from signalprop.errors import InputError, MissingExtra
from signalprop.kernels.mean_over_draws import standard_error
from signalprop.kernels.stack import Stack
from signalprop.models.sublayers import make_sublayer
from signalprop.models.transformer import surroundings
from signalprop.network.kinds import KINDS, kind_named
from signalprop.network.moments import FloatArray
from signalprop.results.profile import DRAWN
from signalprop.sublayers import drawn as drawn_sublayers
from signalprop.sublayers.drawn import DrawnSublayers
from signalprop.theory.signals import Signal

TOKENS, WIDTH = 24, 128
SETTINGS: dict[str, dict[str, Any]] = {
    "mamba2": {"n_heads": 8, "d_head": 16, "d_state": 16, "n_groups": 2},
    "gated_delta_net": {"n_heads": 4, "n_groups": 2, "d_value": 32, "d_key": 32, "eps": 1e-2, "rates": (2.0, 6.0)},
    "global_attention": {"d_head": 32, "n_kv_heads": 2, "rotary_fraction": 0.5, "proportional": True},
    "experts": {"n_experts": 8, "top_k": 2, "width": 64},
    "latent_attention": {"rank": 64, "query_rank": 64, "d_rotary": 16, "d_value": 32},
} | {
    name: {"window": 6, "query_rank": 64, "groups": 2, "group_rank": 64, "d_rotary": 8, **more}
    for name, more in (
        ("shared_kv_attention", {}), ("heavily_compressed_attention", {"rate": 6}),
        ("compressed_sparse_attention", {"rate": 4}),
    )
}  # fmt: skip
ALONE = [name for name in KINDS if kind_named(name).roles and not kind_named(name).reads_memory]
CLOSED = [name for name in ALONE if kind_named(name).closed]
OPEN = [name for name in ALONE if not kind_named(name).closed]


def table(name: str, **changes: Any) -> sp.Parametrization:
    """One such sublayer, with weights that make it do something."""
    fields: dict[str, Any] = {
        "kind": "decoder", "n_layers": 1, "d_model": WIDTH, "n_heads": 4, "d_head": 32, "d_ff": 256, "bias": False,
        "norm": "rmsnorm", "norm_bias": False, "positions": "rotary", "vocab_size": 300, "seq_len": TOKENS,
        "branches": (name,), "settings": {name: SETTINGS[name]} if name in SETTINGS else {}, "attention_dropout": 0.0,
    }  # fmt: skip
    a = sp.Architecture(**(fields | changes))
    biased = {role.name for role in kind_named(name).roles if role.exists(a) and role.biased(a)} if a.bias else set()
    p = sp.scheme("xavier")(a).with_columns(**{f"bias__{role}": 0.3 for role in biased})
    return p.with_columns(**{f"weight__{role}": 0.4 for role in p.weights if role.endswith("filter")})


def kernels() -> tuple[FloatArray, FloatArray]:
    """Of tokens of which some are equal, and of a gradient, (tokens, tokens)."""
    at = np.arange(TOKENS)
    words = np.random.default_rng(0).integers(0, 12, TOKENS)
    read = np.where(at[:, None] == at, 1.0, 0.2 + 0.6 * (words[:, None] == words))
    return read, 0.3 + 0.7 * np.eye(TOKENS)


def sizes(kernel: FloatArray) -> list[float]:
    """Mean over tokens, and over pairs of them."""
    n, trace = len(kernel), float(np.trace(kernel))
    return [trace / n, (float(kernel.sum()) - trace) / (n * (n - 1))]


def means(several: list[list[float]]) -> tuple[FloatArray, FloatArray]:
    """With standard errors."""
    return np.mean(several, 0), np.std(several, 0, ddof=1) / len(several) ** 0.5


def drawn(p: sp.Parametrization, networks: int) -> tuple[FloatArray, FloatArray]:
    """(variance, covariance) forward and back over draws, with standard errors; (4,) each."""
    made, (read, gradient), found = DrawnSublayers(p, int(p.stack[0])), kernels(), []
    for number in range(networks):
        made.network = number
        found.append(sizes(made.forward(0, read)) + sizes(made.backward(0, read, gradient)))
    return means(found)


def close(one: FloatArray, other: FloatArray, se: FloatArray, rtol: float) -> bool:
    """Within 4 standard errors and `rtol` of the variances."""
    return bool((np.abs(one - other) < 4 * se + rtol * np.repeat(other[::2], 2)).all())


# What a kind can be beside its usual self: fields, or its settings by its name.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in CLOSED),
    *((name, {"bias": True, "kind": "encoder", "positions": "none"}) for name in CLOSED if name != "gated_convolution"),
    ("gated_convolution", {"bias": True}),
    ("attention", {"kind": "encoder"}),
    ("latent_attention", {"kind": "encoder"}),
    ("attention", {"settings": {"attention": {"gate": "features"}}, "n_kv_heads": 1, "bias": True}),
    ("attention", {"settings": {"attention": {"gate": "heads", "window": 7}}}),
    ("attention", {"settings": {"attention": {"sink": 1.0, "score_cap": 2.0}}}),
    ("attention", {"settings": {"attention": {"value_norm": True}}, "qk_norm": True}),
    ("feed_forward", {"gated": True, "activation": "silu", "bias": True}),
    ("experts", {"gated": True, "settings": {"experts": SETTINGS["experts"] | {
        "scores": "sigmoid", "scale": 1.7, "shared_width": 64, "shared_gated": True, "router_bias": True,
    }}}),
    ("experts", {"gated": True, "bias": True, "settings": {"experts": SETTINGS["experts"] | {
        "normalised": False, "up_shift": 1.0,
    }}}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes"), VARIANTS)
def test_closed_forms_are_what_draws_say(name: str, changes: dict[str, Any]) -> None:
    """The one test that every closed form has to pass: within 3 % of the variance, beside 4 standard errors."""
    p, (read, gradient) = table(name, **changes), kernels()
    closed = Stack(p).branches[0]
    found = np.array(sizes(closed.forward(0, read)) + sizes(closed.backward(0, read, gradient)))
    there, se = drawn(p, 24)
    assert close(found, there, se, 0.03), (found, there, se)


@pytest.mark.parametrize(("name", "changes"), VARIANTS)
def test_one_node_is_the_average_of_tokens_that_are_equivalent(name: str, changes: dict[str, Any]) -> None:
    """Of tokens that all have one correlation, forward and back; averages over causal rows differ, most with sinks."""
    p = table(name, **changes)
    same = np.full((TOKENS, TOKENS), 0.4) + 0.8 * np.eye(TOKENS)
    gradient = np.full((TOKENS, TOKENS), 0.2) + 0.5 * np.eye(TOKENS)
    closed = Stack(p).branches[0]
    every = np.array(sizes(closed.forward(0, same)) + sizes(closed.backward(0, same, gradient)))
    one = kind_named(name).part("signal").of(p, int(p.stack[0]), None)
    x, g = Signal(1.2, 0.4), Signal(0.7, 0.2)
    out, sent = one.forward(0, x), one.backward(0, x, g).stream
    found = np.array([out.per_token, out.shared, sent.per_token, sent.shared])
    allowed = 1e-9 if not kind_named(name).attends else 0.1 if p.architecture.causal else 0.01
    np.testing.assert_allclose(found, every, rtol=allowed)


@pytest.mark.parametrize("name", some(OPEN, set(OPEN) - {"shared_kv_attention", "heavily_compressed_attention"}))
def test_draws_are_what_random_networks_do(name: str) -> None:
    """Whole modules of random weights on tokens of that kernel: what a draw leaves out is of order 1 / width."""
    p, (read, gradient) = table(name), kernels()
    roots = [torch.from_numpy(np.linalg.cholesky(x)).float() for x in (read, gradient)]
    found = []
    for seed in range(12):
        function = make_sublayer(p, 0, seed, torch.float32, None).branch.function
        rng = torch.Generator().manual_seed(seed)
        x, g = (root @ torch.randn(TOKENS, WIDTH, generator=rng) for root in roots)
        x = x[None].requires_grad_()
        y = function(x, surroundings(p.architecture, x, "decoder"))
        (sent,) = torch.autograd.grad(y, x, g[None])
        grams = [(z.detach()[0] @ z.detach()[0].mT / WIDTH).double().numpy() for z in (y, sent)]
        found.append(sizes(grams[0]) + sizes(grams[1]))
    there, there_se = means(found)
    here, se = drawn(p, 12)
    assert close(here, there, np.hypot(se, there_se), 0.04), (here, there, se, there_se)


def test_hard_attention_is_drawn() -> None:
    """Scores of variance 32: against networks that are built. Their token correlations to .02, gradients to 20 %."""
    a = table("attention", n_layers=2, qk_norm=True, attention_scale=1.0, norm_placement="sandwich").architecture
    p = sp.scheme("xavier")(a)
    assert kind_named("attention").drawn(p).all() and Stack(p).draws
    soft = sp.scheme("xavier")(a.replace(attention_scale=32**-0.5))
    assert not kind_named("attention").drawn(soft).any()
    ids = torch.randint(0, 300, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens=ids.numpy(), targets=ids.roll(-1, 1).numpy())
    measured = sp.average([sp.measure(sp.build(p, seed=seed), batch) for seed in range(8)])
    predicted = sp.predict(p, batch.statistics(a))
    here, there = predicted.forward["stream_out"], measured.forward["stream_out"]
    np.testing.assert_allclose(here.token_correlation, there.token_correlation, atol=0.02)
    assert predicted.gradient is not None and measured.gradient is not None
    ratio = predicted.gradient["stream_in"].variance / measured.gradient["stream_in"].variance
    np.testing.assert_allclose(ratio, 1, atol=0.2)


def test_a_prediction_says_how_sure_it_is() -> None:
    """The same draws each time; standard errors over networks, and their number by the error."""
    p = table("mamba2")
    predicted = sp.predict(p)
    assert predicted == sp.predict(p)
    assert predicted.gradient is not None
    se = predicted.gradient["stream_in"].variance_se
    assert se is not None and (se > 0).all() and (se < 0.2).all()
    networks = predicted.statistics[DRAWN]
    assert networks == 16 or (networks in (4, 8) and standard_error(predicted) <= 0.01)
    assert any(f"the mean over {networks} random networks" in note for note in predicted.notes)
    with pytest.raises(InputError, match="averages through Mamba-2 have no closed form"):
        sp.predict(p, fidelity="moments")


def test_long_sequences_are_drawn_on_their_first_tokens() -> None:
    long = table("global_attention", seq_len=2048)
    predicted = sp.predict(long)
    assert any("the first 256 of 2,048 tokens" in note for note in predicted.notes)
    assert predicted.architecture == long.architecture
    short = sp.predict(table("global_attention", seq_len=256))
    np.testing.assert_array_equal(predicted.forward["branch"].variance, short.forward["branch"].variance)


def test_without_pytorch_one_line_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match=r"signalprop\[models\]"):
        Stack(table("mamba2"))


def test_wide_sublayers_are_drawn_with_fewer_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equal gains: 16 of 64 heads stand for all, within 1 % of the variance and the scatter of draws."""
    settings = {"mamba2": {"n_heads": 64, "d_head": 64, "d_state": 16}}
    narrower, p = kind_named("mamba2").narrower, table("mamba2", settings=settings)
    assert narrower is not None and narrower(p.architecture)["settings"]["mamba2"].n_heads == 16
    few = table("mamba2").architecture
    assert few.replace(**narrower(few)) == few
    here, se = drawn(p, 12)
    monkeypatch.setattr("signalprop.sublayers.recurrent_settings._FEATURES", 64 * 64)
    there, there_se = drawn(p, 12)
    assert close(here, there, np.hypot(se, there_se), 0.01), (here, there, se, there_se)


@pytest.mark.parametrize("least", [0.0, -1e-3])
def test_roots_of_kernels_that_have_no_inverse(least: float) -> None:
    """Two tokens that are one, but for rounding that makes a direction negative: what is left is the kernel."""
    kernel = np.full((2, 2), 4.0) + least * np.array([[1.0, -1.0], [-1.0, 1.0]]) / 2
    root = drawn_sublayers._root(kernel).double().numpy()
    np.testing.assert_allclose(root @ root.T, np.full((2, 2), 4.0), atol=1e-6)

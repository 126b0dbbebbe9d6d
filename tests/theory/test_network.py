"""The whole-network recursion: against independent recursions, against itself (sweeps), and against random networks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from signalprop.data.batches import Batch, image_batch, text_batch
from signalprop.errors import InputError
from signalprop.kernels.embedding_and_loss import input_kernel
from signalprop.kernels.scaled_kernel import State
from signalprop.kernels.stack import Stack
from signalprop.measurement.simulation import simulate
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics
from signalprop.network.kinds import kind_named
from signalprop.network.parametrization import Parametrization
from signalprop.prediction import predict
from signalprop.schemes import scheme
from signalprop.theory import attention
from signalprop.theory.network import log_of_row, predict_moments, token_share

STREAM = InputStatistics(kind="stream", token_correlation=0.227, target_correlation=0.3)


def independent_pre_norm(
    n_layers: int, p: float, length: int, d: int, r: float, r_g: float
) -> tuple[list[float], list[float]]:
    """Xavier, ReLU, pre-norm, written out from the block formulas: (variance after, gradient before) each sublayer."""

    def f(r: float) -> float:
        return r + (math.sqrt(1 - r * r) - r * math.acos(r)) / math.pi

    variance, correlation, states = 1.0, r, []
    for _ in range(n_layers):
        t, k = attention.forward(attention.Sizes(length, length, d, p).on_itself(correlation, 1.0))
        states.append(("attention", variance, correlation))
        new = variance + t / (1 - p)
        correlation = (variance * correlation + k) / new
        variance = new
        states.append(("feed_forward", variance, correlation))
        new = variance + 0.32 / (1 - p)
        correlation = (variance * correlation + 0.32 * f(correlation)) / new
        variance = new
    forward = [s[1] for s in states[1:]] + [variance]
    g, gamma, backward = 1.0, r_g, []
    for kind, v, c in reversed(states):
        if kind == "feed_forward":
            back_g, back_gamma = 0.32 / (1 - p) * g, 0.32 * (0.5 + math.asin(c) / math.pi) * gamma
        else:
            read = attention.Sizes(length, length, d, p).on_itself(c, 1.0, r_g=(1 - p) * gamma / g)
            t, k = attention.backward(read)
            back_g, back_gamma = t * g / (1 - p), k * g / (1 - p)
        g, gamma = g + back_g / v, gamma + back_gamma / v
        backward.append(g)
    return forward, backward[::-1]


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_pre_norm_recursion_written_out(p: float) -> None:
    a = Architecture.preset("tgs", n_layers=24, d_model=1024, seq_len=1024, dropout=p, norm_eps=0.0)
    profile = predict_moments(scheme("xavier")(a), STREAM)
    forward, backward = independent_pre_norm(24, p, 1024, 1024, 0.227, 0.3)
    np.testing.assert_allclose(profile.forward["stream_out"].variance, forward, rtol=1e-9)
    np.testing.assert_allclose(profile.gradient["stream_in"].variance, backward, rtol=1e-6)


def test_the_gain_of_an_encoders_last_norm_is_one_of_what_reads_it() -> None:
    """Times 3, with the maps that read it and the head over 3: every number stays."""
    a = Architecture(
        kind="encoder-decoder", n_layers=2, d_model=64, n_heads=4, seq_len=16, tied_embeddings=False, positions="none",
    )  # fmt: skip
    p = scheme("xavier")(a)
    over = np.where(kind_named("cross_attention").of(p), 3.0, 1.0)
    read = {f"weight__{role}": p.weights[role] / over for role in ("key", "value")}
    head = p.head.model_copy(update={"final_norm_gain": 3 * p.head.final_norm_gain, "weight": p.head.weight / 3})
    one, other = (predict_moments(x, STREAM) for x in (p, replace(p.with_columns(**read), head=head)))
    np.testing.assert_allclose(other.forward["branch"].variance, one.forward["branch"].variance, rtol=1e-9)
    np.testing.assert_allclose(other.gradient["stream_in"].variance, one.gradient["stream_in"].variance, rtol=1e-9)


def test_the_row_of_a_token_in_the_stream_that_enters() -> None:
    """Two positions of one word share its row alone: alpha^2 times its size, after scale and norm."""
    a = Architecture(kind="decoder", n_layers=1, d_model=64, n_heads=4, seq_len=2, embedding_norm=True, norm_eps=0.1)
    p = scheme("xavier")(a)
    sizes = {"token": 0.5, "position": 0.7, "scale": 1.3, "norm_gain": 1.8}
    p = replace(p, embedding=p.embedding.model_copy(update=sizes))
    kernel = input_kernel(p, InputStatistics(tokens=np.array([[3, 3]]), token_correlation=1.0))
    assert math.exp(log_of_row(p)) * 0.5**2 == pytest.approx(kernel[0, 1])


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_the_row_of_a_token_in_the_last_stream(placement: Any) -> None:
    """Without branches two positions of one word still share its row alone, through skips and norms after them."""
    a = Architecture(
        kind="decoder", n_layers=2, d_model=64, n_heads=4, seq_len=2, norm_placement=placement, norm_eps=0.1
    )
    p = scheme("xavier")(a).with_columns(branch=0.0, skip=[0.8, 1.2, 0.9, 1.1], norm_gain=[1.5, 0.7, 0.6, 1.3])
    p = replace(p, embedding=p.embedding.model_copy(update={"token": 0.5, "position": 0.7}))
    kernel = input_kernel(p, InputStatistics(tokens=np.array([[3, 3]]), token_correlation=1.0))
    stack = Stack(p)
    last = stack.run(State(kernel), range(stack.n)).absolute()
    divisors = [float(np.mean(stack.sum_divisors.get(i, 1.0))) for i in range(stack.n)]
    assert math.exp(token_share(p, np.log(divisors))) * 0.5**2 == pytest.approx(last[0, 1])


def test_a_layer_norm_after_a_sum_leaves_no_mean() -> None:
    """Nor with a bias, whose features have mean 0."""
    a = Architecture(n_layers=2, d_model=64, n_heads=4, seq_len=8, norm_placement="post", positions="none")
    inputs = InputStatistics(kind="stream", mean=0.7, token_correlation=0.2)
    for bias in (0.0, 0.3):
        forward = predict_moments(scheme("xavier")(a).with_columns(norm_bias=bias), inputs).forward
        assert forward["stream_in"].mean[0] == 0.7
        np.testing.assert_array_equal(forward["stream_out"].mean, 0.0)


def test_a_gain_after_a_sum_is_the_size_of_the_stream() -> None:
    """Its square, whatever the sum; the next sum starts from it."""
    a = Architecture.preset("tgs", n_layers=2, d_model=64, seq_len=16, norm_placement="post", norm_eps=0.0)
    profile = predict_moments(scheme("xavier")(a).with_columns(norm_gain=3.0), STREAM)
    np.testing.assert_allclose(profile.forward["stream_out"].variance, 9.0, rtol=1e-12)
    np.testing.assert_allclose(profile.forward["stream_in"].variance[1:], 9.0, rtol=1e-12)


def test_a_sweep_is_its_members() -> None:
    a = Architecture.preset("tgs", n_layers=5, d_model=64, seq_len=32)
    items = [scheme("xavier", gain=g, qk_gain=q)(a) for g, q in ((0.5, 1.0), (1.0, 2.0), (1.5, 0.3))]
    together = predict_moments(Parametrization.sweep(items), STREAM)
    assert together.gradient is not None
    for k, item in enumerate(items):
        alone = predict_moments(item, STREAM)
        assert alone.gradient is not None
        for point in ("stream_in", "branch", "stream_out"):
            for mine, theirs in ((together.forward, alone.forward), (together.gradient, alone.gradient)):
                np.testing.assert_allclose(
                    mine[point].log_variance[k], theirs[point].log_variance, rtol=1e-9, atol=1e-9
                )
                np.testing.assert_allclose(mine[point].token_correlation[k], theirs[point].token_correlation, atol=1e-9)


BASE = {"n_layers": 4, "d_model": 192, "n_heads": 6, "seq_len": 64, "vocab_size": 5000}
VARIANTS: dict[str, tuple[dict[str, Any], str]] = {
    "pre": ({"dropout": 0.1}, "xavier"),
    "post": ({"dropout": 0.1, "norm_placement": "post"}, "xavier"),
    "sandwich": ({"norm_placement": "sandwich"}, "xavier"),
    "mixture": ({"norm_placement": ("post", "post", "pre", "pre")}, "xavier"),
    "none": ({"norm_placement": "none", "activation": "relu"}, "deepscalelm"),
    "parallel": ({"parallel": True}, "xavier"),
    "gated, grouped heads": ({"gated": True, "activation": "silu", "n_kv_heads": 2, "norm": "rmsnorm"}, "xavier"),
    "biases": ({"head": "none"}, "pytorch"),
    "decoder": ({"kind": "decoder", "dropout": 0.1}, "gpt2"),
    "rotary decoder": ({"kind": "decoder", "positions": "rotary", "norm": "rmsnorm"}, "xavier"),
    "parallel decoder": ({"kind": "decoder", "positions": "rotary", "parallel": True}, "xavier"),
    "sinusoidal decoder": ({"kind": "decoder", "positions": "sinusoidal", "tied_embeddings": False}, "xavier"),
    "post-norm decoder": ({"kind": "decoder", "norm_placement": "post"}, "deepscalelm"),
    "encoder-decoder": ({"kind": "encoder-decoder", "target_len": 48}, "xavier"),
    "post-norm encoder-decoder": ({"kind": "encoder-decoder", "norm_placement": "post"}, "deepscalelm"),
    "norm on the branch": ({"norm_placement": "res-post", "dropout": 0.1, "activation": "relu"}, "xavier"),
    # without QK-norm the scores grow with the stream, beyond what token kernels can follow
    "norm on a decoder's branch": (
        {"kind": "decoder", "norm_placement": "res-post", "norm": "rmsnorm", "qk_norm": True},
        "xavier",
    ),
    "image": ({"input": "patches", "patch_dim": 48, "class_token": True, "seq_len": 17, "head": "classes"}, "xavier"),
}


# Two of these, or those with value skips and fixed scales below, show what the others do.
FAST = ("none", "rotary decoder", "norm on the branch", "image")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in VARIANTS]
)
def test_variants_agree_with_random_networks(name: str, word_stream: np.ndarray) -> None:
    fields, chosen = VARIANTS[name]
    agrees(scheme(chosen)(Architecture(**{**BASE, **fields})), word_stream)


@pytest.mark.parametrize("placement", [pytest.param("post", marks=pytest.mark.slow), "sandwich"])
def test_a_fixed_scale_on_the_norm_agrees_with_random_networks(placement: Any, word_stream: np.ndarray) -> None:
    """Layer by layer another one, as in LayerNorm Scaling; in a parametrization of its own the gain does the same."""
    a = Architecture(**BASE, norm_placement=placement, final_norm=True)
    scale = 1 / np.sqrt(1 + np.arange(8) // 2)
    p = scheme("xavier")(a)
    agrees(p.with_columns(norm_scale=scale), word_stream)
    scaled, gained = (predict_moments(p.with_columns(**{name: scale}), STREAM) for name in ("norm_scale", "norm_gain"))
    np.testing.assert_array_equal(scaled.gradient["stream_in"].log_variance, gained.gradient["stream_in"].log_variance)


@pytest.mark.parametrize(
    ("skip", "gain", "fields"),
    [
        (0.6, 0.8, {"kind": "decoder", "dropout": 0.1, "qkv_bias": True}),
        pytest.param(0.6, 0.8, {"norm_placement": "post", "n_kv_heads": 2}, marks=pytest.mark.slow),
        (0.5, 1.0, {"kind": "encoder-decoder", "target_len": 48}),
    ],
)
@pytest.mark.slow
def test_value_skips_agree_with_random_networks(
    skip: float, gain: float, fields: dict[str, Any], word_stream: np.ndarray
) -> None:
    p = scheme("xavier")(Architecture(**{**BASE, **fields}))
    if "qkv_bias" in fields:
        p = p.with_columns(bias__value=0.3)
    own = p.kind == 0
    agrees(p.with_columns(value_skip=np.where(own, skip, 0.0), attention_gain=gain), word_stream)


def test_a_value_skip_across_is_refused() -> None:
    p = scheme("xavier")(Architecture(**BASE, kind="encoder-decoder")).with_columns(value_skip=0.5)
    with pytest.raises(InputError, match="value_skip of a cross-attention is not 0"):
        predict(p)


def agrees(p: Parametrization, word_stream: np.ndarray) -> None:
    """Median error over sublayers within 3 standard errors plus 4 % (width 192: terms of order 1/d are left out)."""
    a = p.architecture
    batch: Batch = image_batch(a, 4, 0) if a.input == "patches" else text_batch(a, word_stream, 2, 0)
    measured = simulate(p, batch=batch, n_seeds=12)
    predicted = predict(p, batch.statistics(a))
    assert math.isclose(predicted.input["variance"], measured.input["variance"], rel_tol=0.03)
    for what, ours, theirs in (
        ("forward", predicted.forward["stream_out"], measured.forward["stream_out"]),
        ("branch", predicted.forward["branch"], measured.forward["branch"]),
        ("gradient", predicted.gradient["stream_in"], measured.gradient["stream_in"]),
    ):
        errors = np.abs(np.expm1(ours.log_variance - theirs.log_variance))
        assert theirs.variance_se is not None
        allowed = 0.04 + 3 * float(np.median(theirs.variance_se))
        assert float(np.median(errors)) < allowed, f"{what} variance off by {errors.round(3)}"
    r_error = np.abs(
        predicted.forward["stream_out"].token_correlation - measured.forward["stream_out"].token_correlation
    )
    r_se = measured.forward["stream_out"].token_correlation_se
    assert r_se is not None
    assert float(np.median(r_error)) < 0.015 + 3 * float(np.median(r_se)), r_error.round(3)

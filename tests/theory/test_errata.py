"""The print of the papers against the computed values, where no other test compares them: docs/papers/."""

from __future__ import annotations

import math

import numpy as np
import pytest

import signalprop as sp
from signalprop.theory import attention
from signalprop.theory.attention import Sizes
from signalprop.theory.softmax import softmax_moments
from signalprop_lab.reproductions.correlation import ffn_map, ffn_polynomial

# --- Transformers Get Stable ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("s", "excess"), [(0.1, 0.004), (1.0, 0.038), (2.0, 0.21), (4.0, 1.86)])
def test_the_printed_variance_of_a_softmax_is_for_small_scores(s: float, excess: float) -> None:
    """Table 1: (e^s - 1)/L^2, here of 300 scores."""
    exact = float(softmax_moments(s, 300).second) / 300 - 1 / 300**2
    assert (math.exp(s) - 1) / 300**2 / exact - 1 == pytest.approx(excess, rel=0.02, abs=1e-3)


@pytest.mark.parametrize(
    ("r", "r_g", "missing"), [(0.5, 0.5, 0.385), (0.5, 0.1, 0.40), (0.2, 0.5, 0.28), (0.5, 0, 0.68)]
)
def test_attention_sends_gradient_back_through_queries_and_keys(r: float, r_g: float, missing: float) -> None:
    """v1 B.8 knows uniform weights and values alone: too little at the scores of Xavier weights (300 tokens)."""
    length, width = 300, 300
    whole, _ = attention.backward(Sizes(length, length, width).on_itself(r, 1.0, r_g=r_g))
    printed = (1 + (length - 1) * r_g) / length
    assert 1 - printed / whole == pytest.approx(missing, abs=0.01)
    uniform, _ = attention.backward(Sizes(length, length, width).on_itself(r, 0.0, r_g=r_g))
    assert uniform == pytest.approx(printed)  # and right without scores


def test_dropout_on_weights_also_meets_what_tokens_share() -> None:
    """v1 B.8 leaves r p/(1-p) P out of the variance: 3 % at p = 0.9 and 300 tokens of correlation 0.5."""
    r, p, length = 0.5, 0.9, 300
    whole, _ = attention.forward(Sizes(length, length, 300, p).on_itself(r, 0.0))
    printed = r + (1 - r) / (length * (1 - p))
    assert whole - printed == pytest.approx(r * p / (1 - p) / length)
    assert printed / whole - 1 == pytest.approx(-0.0285, abs=1e-3)


def test_formulas_of_an_encoder_miss_half_of_a_decoders_gradient() -> None:
    """All attention formulas of TGS are bidirectional; a causal head returns twice the variance, and half the rest."""
    both, shared = attention.backward(Sizes(1000, 1000, 300).on_itself(0.3, 0.0, r_g=0.5))
    causal, causal_shared = attention.backward(Sizes(1000, 1000, 300, causal=True).on_itself(0.3, 0.0, r_g=0.5))
    assert causal / both == pytest.approx(2, abs=0.01)
    assert causal_shared / causal == pytest.approx(0.5 * shared / both, rel=0.02)


def test_deepscalelm_keeps_correlations_below_the_printed_bound_with_dropout_only() -> None:
    """Section 3.4: below 1 - e^-2 = 0.865."""
    ends = {}
    for p in (0.0, 0.1):
        architecture = sp.Architecture.preset("tgs", n_layers=192, dropout=p)
        profile = sp.predict(sp.scheme("deepscalelm")(architecture), backward=False)
        ends[p] = float(profile.forward["stream_out"].token_correlation[-1])
    bound = 1 - math.exp(-2)
    assert ends[0.1] == pytest.approx(0.79, abs=0.005) and ends[0.1] < bound
    assert ends[0.0] == pytest.approx(0.924, abs=0.002) and ends[0.0] > bound


def test_where_a_feed_forward_makes_tokens_less_alike() -> None:
    """Section 3.4, p = 0.1: 0.64 to 0.65 is the polynomial's root, the exact one is 0.627."""
    r = np.linspace(0.3, 0.95, 65_001)
    roots = [float(r[np.argmax(0.9 * mapped < r)]) for mapped in (ffn_map(r), ffn_polynomial(r))]
    assert roots == pytest.approx([0.627, 0.644], abs=1e-3)


# --- Deep Transformers without Shortcuts ------------------------------------------------------------------------------


# --- The Curse of Depth -----------------------------------------------------------------------------------------------


def test_the_scale_meets_a_gated_branch_twice() -> None:
    """(46) has 1/l^2 for the feed-forward: so it is with SwiGLU; with ReLU, the form of (17), it is 1/l."""
    layers = np.array([8, 16, 32, 64])
    for activation, gated, power in (("relu", False, 1), ("silu", True, 2)):
        architecture = sp.Architecture(
            kind="decoder", n_layers=64, d_model=256, n_heads=4, vocab_size=500, seq_len=32, norm_placement="pre",
            activation=activation, gated=gated, dropout=0.0,
        )  # fmt: skip
        profile = sp.predict(sp.scheme("lns")(architecture), fidelity="moments", backward=False)
        scaled = profile.forward["branch"].variance[2 * layers - 1] * layers**power
        np.testing.assert_allclose(scaled, scaled[-1], rtol=0.01)

"""Shaped attention in whole tables: token kernels against dense recursions, dropout, JSON and errors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import solve_triangular

from signalprop.errors import InputError
from signalprop.kernels.causal_shaping import exponential_kernel, uniform_kernel
from signalprop.kernels.predicting import predict_token_kernels
from signalprop.kernels.scaled_kernel import State
from signalprop.kernels.schedules import decay_schedule, rho_schedule
from signalprop.kernels.stack import Stack
from signalprop.kernels.transforms import dks
from signalprop.network.architecture import Architecture
from signalprop.network.duals import dual
from signalprop.network.inputs import InputStatistics
from signalprop.network.parametrization import Parametrization, Shaping
from signalprop.results.profile import Profile
from signalprop.schemes import scheme

LAYERS, TOKENS = 6, 24
DKS = dks("gelu", 36)
SPA: dict[str, Shaping] = {kind: Shaping(kind=kind) for kind in ("e-spa", "u-spa")}  # type: ignore[arg-type]


def table(shaping: Shaping, *, feed_forward: bool = False, **fields: Any) -> Parametrization:
    """No skips and no norms, weights that keep the variance at 1, scores of 0; feed-forwards taken out or left in."""
    defaults: dict[str, Any] = {
        "kind": "decoder", "n_layers": LAYERS, "d_model": 32, "n_heads": 2, "vocab_size": 40, "seq_len": TOKENS,
        "norm_placement": "none", "final_norm": False, "positions": "none", "activation": DKS, "head": "none",
    }  # fmt: skip
    a = Architecture(**(defaults | fields))
    p = scheme("xavier")(a)
    d, attends = a.d_model, p.kind == 0
    out = 1 / math.sqrt(a.d_ff * float(dual(a.activation, 1.0, 1.0).second_moment))
    p = p.with_columns(
        weight__query=0.0,
        **{f"weight__{role}": 1 / math.sqrt(d) for role in ("key", "value", "output", "up")},
        weight__down=out if feed_forward else 0.0,
        skip=0.0 if feed_forward else np.where(attends, 0.0, 1.0),
        branch=1.0 if feed_forward else np.where(attends, 1.0, 0.0),
    )
    before, after = np.zeros(p.n_sublayers), np.zeros(p.n_sublayers)
    numbers = decay_schedule(a.n_layers, 0.02) if shaping.kind == "e-spa" else rho_schedule(a.n_layers, 0.8)
    if shaping.kind == "u-spa" and shaping.repeats:
        numbers = rho_schedule(a.n_layers, 0.8, shaping.repeats)
    if shaping.kind != "none":
        before[attends], after[attends] = numbers[:-1], numbers[1:]
    return replace(p.with_columns(shape_in=before, shape_out=after), shaping=shaping)


def kernels(p: Parametrization, start: np.ndarray) -> list[np.ndarray]:
    """The stream's kernel behind every sublayer."""
    out: list[np.ndarray] = []
    Stack(p).run(State(start), range(p.n_sublayers), lambda *found: out.append(found[3].absolute()))
    return out


def uniform(correlation: float = 0.0, target: float = 0.0) -> InputStatistics:
    return InputStatistics("stream", token_correlation=correlation, target_correlation=target)


def moments(kernel: np.ndarray) -> tuple[float, float]:
    """Mean of the diagonal, and of the rest relative to it."""
    n, own = len(kernel), float(np.trace(kernel)) / len(kernel)
    return own, (float(kernel.sum()) / n - own) / (n - 1) / own if n > 1 else 0.0


def quotient(after: np.ndarray, before: np.ndarray) -> np.ndarray:
    return solve_triangular(np.linalg.cholesky(before), np.linalg.cholesky(after).T, lower=True, trans="T").T


def check(profile: Profile, forward: list[np.ndarray], back: list[np.ndarray] | None = None) -> None:
    """Profile against kernels behind every sublayer, and gradient kernels at what every sublayer reads."""
    found = profile.forward["stream_out"]
    wanted = np.array([moments(kernel) for kernel in forward])
    np.testing.assert_allclose(found.variance, wanted[:, 0], rtol=1e-9)
    np.testing.assert_allclose(found.token_correlation, wanted[:, 1], atol=1e-9)
    if back is not None:
        wanted = np.array([moments(kernel) for kernel in back])
        np.testing.assert_allclose(profile.gradient["stream_in"].variance, wanted[:, 0], rtol=1e-9)
        np.testing.assert_allclose(profile.gradient["stream_in"].token_correlation, wanted[:, 1], atol=1e-9)


# --- attention alone -----------------------------------------------------------------------------------------------


@given(
    kind=st.sampled_from(["e-spa", "u-spa"]),
    tokens=st.integers(1, 20),
    skip=st.just(0.0) | st.floats(0.01, 1.5),
    branch=st.floats(0.1, 1.5),
    value_skip=st.floats(0, 1),
    gain=st.floats(0.1, 2),
    # un-normed streams below 1e-12 are computed at that size, where a bias of 1e-6 comes out wrong: none, or a real one
    bias=st.just(0.0) | st.floats(0.01, 1),
    dropout=st.sampled_from([0.0, 0.3]),
    correlation=st.floats(0, 0.9),
    target=st.floats(0, 1),
)
def test_attention_alone_is_the_dense_recursion(
    kind: str, tokens: int, skip: float, branch: float, value_skip: float, gain: float, bias: float,
    dropout: float, correlation: float, target: float,
) -> None:  # fmt: skip
    """Cholesky factors, skips, value skips, value biases and dropout on the weights."""
    p = table(SPA[kind], seq_len=tokens, attention_dropout=dropout, n_segments=0)
    attends = p.kind == 0
    p = p.with_columns(
        skip=np.where(attends, skip, 1.0),
        branch=np.where(attends, branch, 0.0),
        value_skip=np.where(attends, value_skip, 0.0),
        attention_gain=np.where(attends, gain, 1.0),
        bias__value=bias,
    )
    kernel_of = exponential_kernel if kind == "e-spa" else uniform_kernel
    extra = dropout / (1 - dropout) * gain**2
    kernel, ahead, mixes = uniform_kernel(correlation, tokens), [], []
    for i in range(0, p.n_sublayers, 2):
        before, after = (kernel_of(float(column[i]), tokens) for column in (p.shape_in, p.shape_out))
        a = quotient(after, before)
        mixed, values = value_skip * np.eye(tokens) + gain * a, kernel + bias**2
        out = mixed @ values @ mixed.T + extra * np.diag(a**2 @ np.diagonal(values))
        kernel = skip**2 * kernel + branch**2 * out
        ahead += [kernel, kernel]
        mixes.append((mixed, a))
    gradient, back = uniform_kernel(target, tokens), []
    for mixed, a in reversed(mixes):
        sent = mixed.T @ gradient @ mixed + extra * np.diag(np.diagonal(gradient) @ a**2)
        into = skip**2 * gradient + branch**2 * sent
        back += [gradient, into]  # the feed-forward's, which does nothing, and the attention's
        gradient = into
    top = moments(uniform_kernel(target, tokens))[0]
    check(predict_token_kernels(p, uniform(correlation, target)), ahead, [g / top for g in back[::-1]])


# --- dropout and biases against a network --------------------------------------------------------------------------


def haar(rng: np.random.Generator, d: int) -> np.ndarray:
    q, r = np.linalg.qr(rng.normal(size=(d, d)))
    return np.asarray(q * np.sign(np.diagonal(r)))


@pytest.mark.parametrize("which", ["e-spa", "alibi", pytest.param("u-spa", marks=pytest.mark.slow)])
def test_dropout_and_value_bias_agree_with_a_network(which: str) -> None:
    """One attention, width 32, two heads, orthogonal weights, masks on attention weights: five standard errors.

    With W_V and W_O uniform on orthogonal matrices the expectation is the theory at any width.
    """
    rng, n, d, draws, p_drop, skip, gain, bias = np.random.default_rng(3), 7, 32, 800, 0.3, 0.4, 0.9, 0.5
    fields: dict[str, Any] = {"n_segments": 0}
    if which == "alibi":
        fields["positions"] = "alibi"
    shaping = Shaping() if which == "alibi" else SPA["u-spa" if which == "u-spa" else "e-spa"]
    p = table(shaping, seq_len=n, d_model=d, attention_dropout=p_drop, **fields)
    attends = p.kind == 0
    p = p.with_columns(
        value_skip=np.where(attends, skip, 0.0), attention_gain=np.where(attends, gain, 1.0), bias__value=bias
    )
    stack, i = Stack(p), 2
    matrices = [shape.matrix(n) for shape in stack.shapes[i]]
    matrices = matrices if len(matrices) == 2 else matrices * 2
    x, g = rng.normal(size=(2, n, d))
    outs, backs = np.empty((draws, n, n)), np.empty((draws, n, n))
    for draw in range(draws):
        w_v, w_o, b = haar(rng, d), haar(rng, d), bias * rng.normal(size=d)
        heads, returned = [], np.zeros((n, d))
        at_heads = g @ w_o.T
        for head, a in enumerate(matrices):
            part = slice(head * d // 2, (head + 1) * d // 2)
            mixed = skip * np.eye(n) + gain * a * (rng.random((n, n)) > p_drop) / (1 - p_drop)
            heads.append(mixed @ (x @ w_v[:, part] + b[part]))
            returned += mixed.T @ at_heads[:, part] @ w_v[:, part].T
        out = np.concatenate(heads, 1) @ w_o
        outs[draw], backs[draw] = out @ out.T / d, returned @ returned.T / d
    kernel, gradient = x @ x.T / d, g @ g.T / d
    for samples, theory in (
        (outs, stack.branches[i].forward(i, kernel)),
        (backs, stack.branches[i].backward(i, kernel, gradient)),
    ):
        error = samples.std(0, ddof=1) / math.sqrt(draws)
        assert (np.abs(samples.mean(0) - theory) < 5 * error + 1e-12).all()


# --- JSON and errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "message"),
    [
        (table(SPA["e-spa"]).with_columns(shape_in=0.9, shape_out=0.5), "decays have to fall with depth"),
        (table(SPA["e-spa"]).with_columns(shape_in=0.5, shape_out=1.0), "pole is 1.0; expected a number from 0"),
        (table(SPA["u-spa"]).with_columns(shape_in=0.9, shape_out=0.5), "rho has to grow with depth"),
        (table(SPA["e-spa"]).with_columns(shape_gain=-1.0), "gain is -1.0; expected a positive number"),
        (table(Shaping(kind="e-spa", repeats=0.1)).with_columns(shape_gain=0.5), "leave one of them out"),
        (table(SPA["u-spa"]).with_columns(shape_out=1.5), "rho is 1.5"),
        (table(SPA["e-spa"], kind="encoder"), "choose a decoder"),
        (table(SPA["u-spa"]).with_columns(shape_gain=0.5), "shape_gain of sublayer 0 is 0.5; only E-SPA has one"),
    ],
)
def test_errors(p: Parametrization, message: str) -> None:
    with pytest.raises(InputError) as caught:
        predict_token_kernels(p, uniform())
    assert message in str(caught.value) and "\n" not in str(caught.value)

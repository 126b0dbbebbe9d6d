"""Traces of token kernels against dense matrices, exact arithmetic and an independent simulation of SPA's figures."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import signalprop as sp
from signalprop.data.batches import default_batch
from signalprop.errors import InputError
from signalprop.kernels.causal_shaping import exponential_kernel, uniform_kernel
from signalprop.kernels.gallery import alibi, e_spa, figure_6, figure_7, u_spa
from signalprop.kernels.given_kernels import checked_kernel
from signalprop.kernels.kernel_statistics import distances, effective_rank
from signalprop.kernels.predicting import predict_token_kernels
from signalprop.kernels.scaled_kernel import State
from signalprop.kernels.trace import attention_only, trace
from signalprop.network.inputs import InputStatistics, collision_probability, from_tokens
from signalprop.report import kernel_tables
from signalprop_lab.reproductions.kernels import sampled_tokens

REFERENCE: dict[str, Any] = json.loads((Path(__file__).parents[2] / "records" / "kernels.json").read_text())
LENGTH, REPEATS = 100, 0.02
NETWORKS = figure_7() | {"E-SPA, repeats ignored": e_spa(100, LENGTH, 0.0)}


def random_kernel(t: int, seed: int, d: int = 7) -> np.ndarray:
    x = np.random.default_rng(seed).normal(size=(t, d))
    return x @ x.T / d


def quick(p: sp.Parametrization, kernel: np.ndarray | None = None, **options: Any) -> sp.Trace:
    return trace(p, kernel, **{"backward": False, "rank": False, "matrices": "none"} | options)


# --- against the independent simulation -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (i % 2)) for i, name in enumerate(REFERENCE["configurations"])],
)
def test_average_kernels_of_figure_7_are_those_of_the_independent_simulation(name: str) -> None:
    p = NETWORKS[name]
    found = quick(p, uniform_kernel(REPEATS, LENGTH)).forward.distance[REFERENCE["depths"]]
    for ours, cosine in zip(found, REFERENCE["configurations"][name]["average"], strict=True):
        wanted = 1 - cosine
        # four digits of a cosine, two of what it lacks to 1, and nothing but rounding where that is all that is left
        tolerance = 1e-4 if wanted > 1e-4 else max(0.06 * wanted, 1e-15)
        assert ours == pytest.approx(wanted, abs=tolerance)


@pytest.mark.slow
def test_the_diagonals_of_figure_6() -> None:
    wanted = REFERENCE["figure_6"]
    inputs = from_tokens(sampled_tokens(LENGTH, 0.05, wanted["sequences"]), causal=True)
    for name, p in figure_6().items():
        forward = quick(p, inputs=inputs).forward
        np.testing.assert_allclose(forward.diagonal_mean[wanted["depths"]], wanted[name]["mean"], atol=0.03)
        np.testing.assert_allclose(forward.diagonal_sd[wanted["depths"]], wanted[name]["sd"], atol=0.03)


def test_average_diagonals_of_figure_6_in_closed_form() -> None:
    """SPA eq. 13: without the correction 1 - r + r m_i^2 at the last position; with it 1 everywhere."""
    ignored, corrected = (trace(p, uniform_kernel(0.05, LENGTH), at=[36]) for p in figure_6().values())
    own = np.diagonal(ignored.kernels[36])
    np.testing.assert_allclose(own[[0, 1, 49, 99]], [1, 1.019410, 3.142746, 4.784708], atol=1e-6)
    np.testing.assert_allclose(np.diagonal(corrected.kernels[36]), 1, atol=1e-12)
    np.testing.assert_allclose(corrected.cosines(36), ignored.cosines(36), atol=1e-12)


# --- against dense matrices -------------------------------------------------------------------------------------------


def dense(p: sp.Parametrization, kernel: np.ndarray, matrices: list[list[np.ndarray]]) -> list[np.ndarray]:
    """The recursion of attention-only blocks as SPA appendix H.3 writes it, with norms of eps 0."""

    def norm(k: np.ndarray) -> np.ndarray:
        return k / np.sqrt(np.outer(np.diagonal(k), np.diagonal(k)))

    out, k = [kernel], kernel
    for block in range(p.architecture.n_layers):
        row = 2 * block
        read = norm(k) if p.architecture.norm_placement == "pre" else k
        branch = sum(a @ read @ a.T for a in matrices[block]) / len(matrices[block])
        k = p.skip[row] ** 2 * k + p.branch[row] ** 2 * branch
        if p.architecture.norm_placement == "post":
            k = norm(k)
        out.append(k)
    return out


def alibi_matrices(t: int) -> list[np.ndarray]:
    lag = np.subtract.outer(np.arange(t), np.arange(t))
    weights = [np.where(lag >= 0, np.exp(-(2.0 ** -(h + 1)) * np.maximum(lag, 0)), 0.0) for h in range(8)]
    return [w / w.sum(1, keepdims=True) for w in weights]


@given(
    placement=st.sampled_from(["none", "pre", "post"]),
    skip=st.sampled_from([0.0, 0.6, 1.0]),
    t=st.integers(2, 40),
    layers=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_alibi_stacks_are_the_dense_recursion(placement: Any, skip: float, t: int, layers: int, seed: int) -> None:
    p = alibi(layers, t, placement, skip, 0.9)
    kernel = random_kernel(t, seed)
    found = trace(p, kernel, at=range(layers + 1), backward=False)
    for depth, wanted in enumerate(dense(p, kernel, [alibi_matrices(t)] * layers)):
        np.testing.assert_allclose(found.kernels[depth], wanted, rtol=1e-10, atol=1e-12 * np.abs(wanted).max())


@given(
    gamma=st.floats(0.01, 1), t=st.integers(2, 60), layers=st.integers(1, 6), repeats=st.sampled_from([0.0, 0.02, 0.3])
)
def test_spa_stacks_end_at_their_targets(gamma: float, t: int, layers: int, repeats: float) -> None:
    """Telescoping: from independent tokens E-SPA ends at e^(-gamma |i - j|); U-SPA from r at (1 - rho) I + rho."""
    found = trace(e_spa(layers, t, 0.0, gamma), np.eye(t), at=[layers], backward=False)
    np.testing.assert_allclose(found.kernels[layers], exponential_kernel(math.exp(-gamma), t), atol=1e-10)
    found = trace(u_spa(layers, t, repeats), uniform_kernel(repeats, t), at=[layers], backward=False)
    np.testing.assert_allclose(found.kernels[layers], uniform_kernel(0.8, t), atol=1e-10)


def test_gradients_return_by_the_transposed_matrices() -> None:
    t, layers = 30, 4
    p = alibi(layers, t, "none", 0.5, 0.8)
    top = random_kernel(t, 1)
    found = trace(p, random_kernel(t, 0), top=top, at=range(layers + 1))
    wanted = top
    for depth in reversed(range(layers)):
        back = sum(a.T @ wanted @ a for a in alibi_matrices(t)) / 8
        wanted = 0.25 * wanted + 0.64 * back
        np.testing.assert_allclose(found.gradients[depth] * np.trace(top) / t, wanted, rtol=1e-10, atol=1e-12)


# --- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [1e-2, 1e-9, 1e-15, 1e-25])
def test_distances_do_not_cancel(apart: float) -> None:
    """1 - cosine of nearly equal tokens of different sizes, against 60 digits, as far as the kernel itself holds it."""
    rng = np.random.default_rng(0)
    with mpmath.workdps(60):
        root = [mpmath.mpf(float(v)) for v in rng.uniform(0.5, 2, 12)]
        side = [mpmath.mpf(float(v)) for v in rng.normal(size=12)]
        exact = mpmath.matrix(12, 12)
        for i in range(12):
            for j in range(12):
                exact[i, j] = root[i] * root[j] * (1 + apart * side[i] * side[j])
        gaps = [
            1 - exact[i, j] / mpmath.sqrt(exact[i, i] * exact[j, j]) for i in range(12) for j in range(i)
        ]  # fmt: skip
        mean, largest = float(sum(gaps) / len(gaps)), float(max(gaps))
        kernel = np.array([[float(exact[i, j]) for j in range(12)] for i in range(12)])
    found = distances(kernel)
    np.testing.assert_allclose(found, (mean, largest), rtol=1e-9, atol=5e-16)


def test_effective_ranks() -> None:
    assert effective_rank(np.eye(9) * 3) == pytest.approx(9)
    assert effective_rank(np.ones((9, 9)) * 3) == pytest.approx(1)
    groups = np.kron(np.eye(3), np.ones((4, 4)))
    assert effective_rank(groups) == pytest.approx(3)
    t, rho = 50, 0.3  # one eigenvalue 1 - rho + T rho, T - 1 of 1 - rho
    shares = np.array([1 - rho + t * rho] + [1 - rho] * (t - 1)) / t
    assert effective_rank(uniform_kernel(rho, t)) == pytest.approx(math.exp(-np.sum(shares * np.log(shares))))


def test_the_profile_is_that_of_predict() -> None:
    a = sp.Architecture.preset("gpt2", n_layers=3, d_model=64, seq_len=24, vocab_size=90)
    p = sp.scheme("xavier")(a)
    batch = default_batch(a, batch_size=3).statistics(a)
    found = trace(p, inputs=batch)
    assert found.sequences == 3
    assert found.profile == predict_token_kernels(p, batch)
    assert sp.trace is trace
    average = trace(p, at=[1, 2, 3])
    stream = average.profile.forward["stream_out"]
    for depth, kernel in average.kernels.items():  # the profile has the mean covariance over the mean variance
        mean = (kernel.sum() - np.trace(kernel)) / (24 * 23)
        assert mean / np.diagonal(kernel).mean() == pytest.approx(stream.token_correlation[2 * depth - 1], rel=1e-9)
    np.testing.assert_allclose(average.forward.log_diagonal[1:], stream.log_variance[1::2], atol=1e-12)
    back = average.profile.gradient["stream_in"].log_variance[::2]
    np.testing.assert_allclose(average.gradient.log_diagonal[:-1], back, atol=1e-12)
    assert average.gradient.diagonal_mean[-1] == pytest.approx(1)


def test_several_sequences_are_pooled() -> None:
    ids = sampled_tokens(30, 0.1, 3)
    p = figure_7(4, 30)["Pre-LN"]
    single = [trace(p, inputs=from_tokens(ids[[i]]), at=[4]) for i in range(3)]
    found = trace(p, inputs=from_tokens(ids), at=[4])
    columns = [item.forward.columns() for item in single]
    assert found.forward_sd is not None and found.gradient_sd is not None
    for name, column in found.forward.columns().items():
        values = np.stack([item[name] for item in columns])
        if name != "log_diagonal":  # the logarithm of the mean
            np.testing.assert_allclose(column, values.mean(0), rtol=1e-12)
        np.testing.assert_allclose(found.forward_sd[name], values.std(0, ddof=1), rtol=1e-9, atol=1e-15)
    np.testing.assert_array_equal(found.kernels[4], single[0].kernels[4])


def test_padding_does_not_count() -> None:
    p = figure_7(3, 20)["Pre-LN"]
    ids = np.arange(20)[None]
    padded = np.where(ids < 12, ids, -1)
    short = quick(replace(p, architecture=p.architecture.replace(seq_len=12)), inputs=from_tokens(ids[:, :12]))
    found = quick(p, inputs=from_tokens(padded))
    np.testing.assert_allclose(found.forward.mean_cosine, short.forward.mean_cosine, rtol=1e-12)
    np.testing.assert_allclose(found.forward.diagonal_max, short.forward.diagonal_max, rtol=1e-12)


def test_deep_stacks_leave_no_numbers_undefined() -> None:
    """Growth beyond the range of a double: the logarithm goes on, the raw diagonal ends at infinity."""
    a = sp.Architecture(kind="decoder", n_layers=400, d_model=16, seq_len=6, norm_placement="none", activation="relu")
    p = attention_only(sp.scheme("xavier", gain=3.0)(a))
    found = trace(p.with_columns(weight__query=0.0), np.eye(6) * 1e-3)
    assert found.forward.log_diagonal[-1] > 710
    assert np.isfinite(found.forward.log_diagonal).all()
    assert np.isfinite(found.forward.mean_cosine).all()
    assert found.gradient is not None and found.gradient.log_diagonal[0] > 710
    assert np.isfinite(found.forward.diagonal_mean).all() and np.isfinite(found.kernels[400]).all()
    assert "deep" in kernel_tables.table({"deep": found})


def test_stored_kernels_are_in_the_unit_of_the_first() -> None:
    found = trace(figure_7(3, 10)["Pre-LN"], 3 * np.eye(10) + 1, backward=False, matrices="forward")
    for depth, kernel in found.kernels.items():
        assert math.log(np.trace(kernel) / 10) == pytest.approx(found.forward.log_diagonal[depth])
        cosines = (kernel / np.sqrt(np.outer(np.diag(kernel), np.diag(kernel))))[np.triu_indices(10, 1)]
        assert cosines.mean() == pytest.approx(found.forward.mean_cosine[depth], abs=1e-12)
    assert found.forward.log_diagonal[-1] > 0.1


def test_rounding_does_not_pass_a_correlation_of_one() -> None:
    beyond = 1 + 1e-9
    assert State(np.array([[1, -beyond], [-beyond, 1]])).moments() == (0.0, -1.0)
    assert State(np.array([[1, beyond], [beyond, 1]])).moments() == (0.0, 1.0)


# --- networks without feed-forwards -----------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich", "res-post", "none"])
def test_attention_only_networks_hand_the_stream_through(placement: Any) -> None:
    a = sp.Architecture(kind="decoder", n_layers=3, d_model=32, seq_len=12, norm_placement=placement, bias=False)
    p = attention_only(sp.scheme("xavier")(a))
    profile = trace(p, rank=False).profile
    for direction in (profile.forward, profile.gradient):
        before, after = direction["stream_in"], direction["stream_out"]
        np.testing.assert_allclose(before.log_variance[1::2], after.log_variance[1::2], atol=1e-12)
        np.testing.assert_allclose(before.token_correlation[1::2], after.token_correlation[1::2], atol=1e-12)
    assert sp.Parametrization.from_json(json.loads(json.dumps(p.to_json()))) == p


def test_attention_only_takes_the_feed_forward_s_part_out() -> None:
    """Without scores a block of attention with a skip makes K + M K M^T of K, M a running mean."""
    a = sp.Architecture(kind="decoder", n_layers=1, d_model=32, seq_len=9, norm_placement="none", bias=False)
    p = attention_only(sp.scheme("xavier")(a)).with_columns(
        weight__query=0.0, weight__value=32**-0.5, weight__output=32**-0.5
    )
    kernel = random_kernel(9, 0)
    mean = np.tril(np.ones((9, 9))) / np.arange(1, 10)[:, None]
    found = trace(p, kernel, backward=False).kernels[1]
    np.testing.assert_allclose(found, kernel + mean @ kernel @ mean.T, rtol=1e-10, atol=1e-12)


# --- inputs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("repeats", [0.005, 0.02, 0.03, 0.3, 0.5, 0.9])
def test_sampled_tokens_repeat_as_often_as_asked(repeats: float) -> None:
    ids = sampled_tokens(50, repeats, 4000, seed=3)
    shares = np.array([collision_probability(row[None]) for row in ids[:1000]])
    error = shares.std() / math.sqrt(len(shares))
    assert abs(shares.mean() - repeats) < 4 * error
    counts = np.bincount(ids.ravel())
    assert len(counts) == math.ceil(1 / repeats - 1e-9)
    assert counts[:-1].std() < 4 * math.sqrt(counts.mean())  # all but the last are equally frequent


def test_kernels_of_live_models() -> None:
    import torch

    from signalprop.measurement import input_kernels
    from tiny import gpt2

    model = gpt2(vocab_size=40).eval()
    ids = torch.randint(0, 40, (3, 12))
    found = input_kernels(model, {"input_ids": ids})
    x = (model.transformer.wte(ids) + model.transformer.wpe(torch.arange(12))).detach().double()
    np.testing.assert_allclose(found, (x @ x.transpose(1, 2) / 16).numpy(), rtol=1e-5, atol=1e-9)
    p = sp.scheme("gpt2")(sp.Architecture.from_hf(model))
    begun = trace(p, found[0], at=[0], backward=False).kernels[0]
    np.testing.assert_allclose(begun, found[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"at": [4]}, "from 0 to 3"),
        ({"at": []}, "list is empty"),
        ({"matrices": "all"}, "both, forward, none"),
        ({"top": np.eye(3)}, "of 3 tokens, the input of 10"),
        ({"kernel": np.ones((2, 3))}, "square matrix"),
    ],
)
def test_mistakes(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        trace(figure_7(3, 10)["Pre-LN"], **options)


def test_correlations_that_so_many_tokens_cannot_have() -> None:
    """Of five vectors no more than pairs can point away from each other: Sum |x|^2 >= 0 bounds the average."""
    p = sp.scheme("xavier")(sp.Architecture(n_layers=1, d_model=8, n_heads=2, seq_len=5, dropout=0.0))
    assert (trace(p, inputs=InputStatistics(kind="stream", token_correlation=-0.25)).forward.distance <= 2).all()
    with pytest.raises(InputError, match=r"a token correlation of -0\.3 is not possible among 5 tokens: .* -0\.25 at"):
        trace(p, inputs=InputStatistics(kind="stream", token_correlation=-0.3))


def test_skips_and_branches_of_a_figure_sum_to_one() -> None:
    p = figure_7(3, 10)["Pre-LN, skips 0.98"]
    np.testing.assert_allclose(p.skip**2 + p.branch**2, 1)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_rounding_of_a_kernel_is_taken_as_such(size: float) -> None:
    """Of eigenvalues and of symmetry, over the largest entry, to 1e-5."""
    plain, negative = np.ones((2, 2)), np.array([[-1.0, 1.0], [1.0, -1.0]])
    uneven = np.array([[0.0, 1.0], [-1.0, 0.0]])
    for off in (2e-6 * negative, 2e-6 * uneven):
        np.testing.assert_allclose(checked_kernel(size * (plain + off)), size * plain, rtol=1e-5)
    for off, says in ((1e-4 * negative, "not positive semi-definite"), (1e-4 * uneven, "not symmetric")):
        with pytest.raises(InputError, match=says):
            checked_kernel(size * (plain + off))


@pytest.mark.parametrize("symbols", [2, 3, 7, 49])
def test_whole_numbers_of_symbols_are_drawn_evenly(symbols: int) -> None:
    ids = sampled_tokens(20_000, 1 / symbols)
    counts = np.bincount(ids[0], minlength=symbols)
    assert len(counts) == symbols and counts.min() > 0

"""Token kernels of encoder-decoders: one cross-attention against sampling, whole networks against built ones."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import signalprop as sp
from signalprop.kernels import cross_attention, passes
from signalprop.kernels.cross_attention import GridCrossAttention, TokenCrossAttention
from signalprop.kernels.position_grid import EqualTokens, Grid
from signalprop.kernels.scaled_kernel import State
from signalprop.kernels.stack import Stack
from signalprop.network.inputs import from_tokens
from signalprop.theory.branch_inputs import LARGEST_MEMORY

D, QUERIES, KEYS = 96, 12, 16
ALIKE = {"asks": 0.4, "keys": 0.2, "gradient": 0.3}


def stream(length: int, shared: float, generator: torch.Generator) -> torch.Tensor:
    """(length, D) of mean square 1, tokens of which so much is alike."""
    common, own = (torch.randn(n, D, generator=generator, dtype=torch.float64) for n in (1, length))
    x = shared**0.5 * common + (1 - shared) ** 0.5 * own
    return x / x.square().mean(1, keepdim=True).sqrt()


def kernel(length: int, shared: float) -> np.ndarray:
    """The mean over such streams of their kernels."""
    return (1 - shared) * np.eye(length) + shared


def test_one_head_agrees_with_sampling() -> None:
    """Forward and back to both streams: sum of variances, sum over pairs of tokens; within 4 standard errors and the
    error at this width that `TokenCrossAttention` states."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, list[tuple[float, float]]] = {"out": [], "asks": [], "keys": []}
    for _ in range(150):
        x, y = (stream(n, ALIKE[of], generator).requires_grad_() for n, of in ((QUERIES, "asks"), (KEYS, "keys")))
        q, k, v = (torch.randn(D, D, generator=generator, dtype=torch.float64) / D**0.5 for _ in range(3))
        out = torch.softmax((x @ q) @ (y @ k).T / D**0.5, -1) @ (y @ v)
        (out * stream(QUERIES, ALIKE["gradient"], generator)).sum().backward()
        assert x.grad is not None and y.grad is not None
        for name, tensor in (("out", out.detach()), ("asks", x.grad), ("keys", y.grad)):
            both = tensor @ tensor.T / D
            found[name].append((float(both.trace()), float(both.sum())))
    made = TokenCrossAttention(
        kernel=kernel(KEYS, ALIKE["keys"]), asks=kernel(QUERIES, ALIKE["asks"]), qk=1.0, d_model=D
    )
    to_queries, to_keys = made.backward_to_both(kernel(QUERIES, ALIKE["gradient"]))
    stated = {"out": (made.forward(), 0.04), "asks": (to_queries, 0.15), "keys": (to_keys, 0.04)}
    for name, (predicted, off) in stated.items():
        samples = np.array(found[name])
        mean, error = samples.mean(0), samples.std(0) / len(samples) ** 0.5
        expected = np.array([np.trace(predicted), predicted.sum()])
        assert (np.abs(mean - expected) < 4 * error + off * mean).all(), (name, mean, expected)


def test_a_memory_without_a_final_norm_has_the_size_of_its_stream() -> None:
    """Whose logarithm stands apart from the kernel: e^1.5 times it, and not beyond what products can hold."""
    a = sp.Architecture(kind="encoder-decoder", n_layers=1, n_decoder_layers=1, d_model=32, n_heads=2, d_ff=64,
                     norm_placement="none", final_norm=False, seq_len=4, target_len=3)  # fmt: skip
    assert not a.has_final_norm
    stack, last = Stack(sp.scheme("xavier")(a)), kernel(4, 0.3)
    np.testing.assert_allclose(stack.read_memory(State(last, 1.5)), math.exp(1.5) * last)
    np.testing.assert_allclose(stack.read_memory(State(last, 900.0)), math.exp(LARGEST_MEMORY) * last)


@pytest.mark.parametrize("qk", [0.5, 8.0])
def test_one_node_stands_for_equivalent_keys(qk: float) -> None:
    """Entry by entry, of queries that are all equally alike; a bias, dropout and a gain beside them."""
    root = np.random.default_rng(0).normal(size=(QUERIES, 40)) + 0.5
    asks, gradient = kernel(QUERIES, ALIKE["asks"]), root @ root.T / 40
    fields: dict[str, Any] = {
        "qk": qk, "d_model": D, "dropout": 0.2, "query_bias": 0.3, "gain": 0.7,
    }  # fmt: skip
    whole = TokenCrossAttention(kernel=1.5 * kernel(KEYS, ALIKE["keys"]), asks=asks, **fields)
    queries, keys = Grid(QUERIES, np.arange(QUERIES)), EqualTokens(KEYS)
    node = GridCrossAttention(
        kernel=np.full((1, 1), 1.5 * ALIKE["keys"]), per_token=np.full(1, 1.5), grid=keys, queries=queries, asks=asks,
        asks_per_token=np.diagonal(asks), **fields,
    )  # fmt: skip
    to_queries, to_keys = node.backward_to_both(queries.joined(gradient, np.diagonal(gradient)))
    expected = whole.forward(), *whole.backward_to_both(gradient)
    for found, of, grid in zip((node.forward(), to_queries, to_keys), expected, (queries, queries, keys), strict=True):
        apart, per_token = grid.split(found)
        every = np.broadcast_to(apart, of.shape).copy()
        np.fill_diagonal(every, per_token)
        np.testing.assert_allclose(every, of, rtol=1e-10)


BASE: dict[str, Any] = {
    "kind": "encoder-decoder", "n_layers": 3, "d_model": 128, "n_heads": 4, "vocab_size": 400, "seq_len": 48,
    "target_len": 32, "tied_embeddings": False,
}  # fmt: skip


def test_the_memory_is_the_normed_last_stream() -> None:
    """x / sqrt(x^2 + epsilon) of every token, of any scale."""
    table = sp.scheme("xavier")(sp.Architecture(**BASE, norm_placement="pre", final_norm=True, norm_eps=0.7))
    last = 2.0 * kernel(4, 0.3) * np.outer(sizes := np.array([1.0, 2.0, 0.5, 0.1]), sizes)
    root = abs(table.head.final_norm_gain) / np.sqrt(np.diagonal(last) + 0.7)
    found = Stack(table).read_memory(State(last / 5.0, np.log(5.0)))
    np.testing.assert_allclose(found, last * np.outer(root, root))


def test_a_final_norm_takes_away_the_gain_of_the_last_post_norm() -> None:
    """The gradient before that post-norm stays, so relative to the one after it all rise by the gain squared."""
    table = sp.scheme("xavier")(sp.Architecture(**BASE, norm_placement="post", final_norm=True))

    def gradient(gain: float) -> np.ndarray:
        gains = np.append(table.norm_gain[:-1], gain)
        profile = sp.predict(table.with_columns(norm_gain=gains), fidelity="kernel")
        return profile.gradient["stream_in"].log_variance

    assert gradient(3.0) - gradient(1.0) == pytest.approx(np.log(9.0), abs=1e-3)


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_whole_networks_agree_with_built_ones(placement: Any) -> None:
    """Where averages over positions are 20 % and more off at the decoder's first gradient, kernels are not."""
    table = sp.scheme("xavier" if placement == "post" else "deepscalelm")(
        sp.Architecture(**BASE, norm_placement=placement)
    )
    generator = torch.Generator().manual_seed(1)
    weights = 1 / torch.arange(1, 401.0)
    read = torch.multinomial(weights, 6 * 48, True, generator=generator).view(6, 48)
    written = torch.multinomial(weights, 6 * 33, True, generator=generator).view(6, 33)
    batch = {"inputs": read, "targets": written[:, 1:], "decoder_tokens": written[:, :-1]}
    measured = sp.average([sp.measure(sp.build(table, seed=seed), batch) for seed in range(5)])
    inputs = replace(
        from_tokens(read.numpy()), decoder=from_tokens(written[:, :-1].numpy(), targets=written[:, 1:].numpy())
    )
    found = sp.predict(table, inputs, fidelity="kernel")
    error = found.gradient["stream_in"].log_variance - measured.gradient["stream_in"].log_variance
    assert np.abs(error).max() < 0.16 and np.median(np.abs(error)) < 0.08
    out = found.forward["stream_out"], measured.forward["stream_out"]
    assert np.abs(out[0].log_variance - out[1].log_variance).max() < 0.1
    apart = np.abs(out[0].token_correlation - out[1].token_correlation)
    assert (apart < 0.03 + 4 * out[1].token_correlation_se).all()
    averages = sp.predict(table, inputs, fidelity="moments")
    first = 6  # the decoder's first sublayer
    of_moments = averages.gradient["stream_in"].log_variance[first] - measured.gradient["stream_in"].log_variance[first]
    assert abs(of_moments) > 0.2 > abs(error[first])


def test_the_way_back_takes_attention_as_the_pass_before_left_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(**fields: Any) -> TokenCrossAttention:
        made.append(1)
        return TokenCrossAttention(**fields)

    monkeypatch.setattr(cross_attention, "TokenCrossAttention", counted)
    a = sp.Architecture(n_layers=2, d_model=32, n_heads=2, seq_len=12, target_len=10, kind="encoder-decoder")
    p = sp.scheme("xavier")(a)
    found, counts = [], []
    for name in (None, "_ALL_STORED", "_STORED_LENGTH"):  # all kept, those of a segment, none
        if name is not None:
            monkeypatch.setattr(passes, name, 0)
        found.append(sp.predict(p, fidelity="kernel").gradient["stream_in"].variance)
        counts.append(len(made) - sum(counts))
    assert counts == [2, 4, 6]  # each time once more for each layer
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_averages_send_gradients_to_the_encoder_through_a_norm_on_the_branch() -> None:
    """In averages and by position alike, where all positions are; the norm multiplies gradients by 1.7 here."""
    a = sp.Architecture(
        kind="encoder-decoder", n_layers=2, d_model=64, n_heads=2, d_ff=128, vocab_size=500, seq_len=16,
        norm_placement="sandwich", dropout=0.0,
    )  # fmt: skip
    one, other = (sp.predict(sp.scheme("xavier")(a), fidelity=f).gradient for f in ("moments", "kernel"))
    assert np.abs(one["stream_in"].log_variance - other["stream_in"].log_variance)[:4].max() < 0.1

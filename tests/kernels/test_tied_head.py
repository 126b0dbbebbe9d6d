"""A tied head's gradient has a part along the stream, which goes back through the weights that made the stream."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import signalprop as sp
from signalprop.data.batches import default_batch
from signalprop.kernels import passes
from signalprop.kernels.scaled_kernel import State
from signalprop.kernels.stack import Stack
from signalprop.kernels.tied_head import Along
from signalprop.measurement.simulation import simulate
from signalprop.network.kinds import kind_named

SHALLOW: dict[str, Any] = {
    "n_layers": 2, "d_model": 192, "n_heads": 4, "d_ff": 256, "vocab_size": 500, "seq_len": 32, "dropout": 0.0,
}  # fmt: skip
DECODER = sp.Architecture(kind="decoder", positions="rotary", n_kv_heads=2, gated=True, activation="silu", **SHALLOW)
BOTH = sp.Architecture(kind="encoder-decoder", n_decoder_layers=2, target_len=32, positions="none", **SHALLOW)


@pytest.mark.parametrize("a", [DECODER, BOTH], ids=["decoder", "encoder-decoder"])
def test_first_gradients(a: sp.Architecture, monkeypatch: pytest.MonkeyPatch) -> None:
    p, batch = sp.scheme("xavier")(a), default_batch(a, batch_size=2)
    measured = simulate(p, batch=batch, n_seeds=24).gradient["stream_in"]
    assert measured.variance_se[0] < 0.05

    def first() -> tuple[float, float]:
        found = sp.predict(p, batch.statistics(a), fidelity="kernel").gradient["stream_in"]
        apart = np.abs(found.token_correlation - measured.token_correlation)
        return float(measured.log_variance[0] - found.log_variance[0]), float(np.median(apart))

    above, apart = first()
    monkeypatch.setattr(passes, "along_of", lambda *_: None)
    above_alone, apart_alone = first()
    assert above_alone > 0.2 and abs(above) < above_alone / 2
    assert apart < apart_alone


def test_what_arrives_at_an_encoder_by_vectors() -> None:
    """Sums of outputs of one length, less what lies along the output at which they arrive; and what comes beside."""
    rng = np.random.default_rng(0)
    outputs, sent, root = rng.normal(size=(5, 7)), rng.normal(size=(5, 5)), rng.normal(size=(5, 5))
    outputs /= np.linalg.norm(outputs, axis=1, keepdims=True)
    arrives = sent @ outputs
    arrives -= (arrives * outputs).sum(1, keepdims=True) * outputs
    along = Along(None, np.zeros((5, 5)), np.zeros((5, 5)), sent, root @ root.T)  # type: ignore[arg-type]
    found = along.at_memory(outputs @ outputs.T, State(np.eye(5), np.log(2.0)))
    np.testing.assert_allclose(found, (arrives @ arrives.T + root @ root.T) / 2)


def test_what_lies_along_the_stream_below_maps_that_made_it() -> None:
    """Linear sublayers (means over tokens; two maps), by networks of width 256: what of a gradient along the
    last stream lies along the first, position by position."""
    a = sp.Architecture(
        kind="decoder", n_layers=1, d_model=64, n_heads=2, d_ff=64, seq_len=4, vocab_size=9, activation="identity",
        norm="rmsnorm", norm_eps=0.0,
    )  # fmt: skip
    p = sp.scheme("xavier")(a)
    p = p.with_columns(weight__query=0.0, branch=[0.9, 0.8], norm_gain=[1.2, 0.8])
    stack, reads = Stack(p), []
    rng = np.random.default_rng(0)
    kernel = np.full((4, 4), 0.3) + np.diag([0.7, 0.9, 1.1, 1.3])
    stack.run(State(kernel), range(stack.n), lambda i, read, branch, left: reads.append(read))
    top = np.diag([1.0, 0.6, 0.8, 1.2])
    along = Along(stack, np.zeros((4, 4)), top)
    for i in reversed(range(stack.n)):
        along.added(i, stack.what_is_read(i, reads[i]), reads[i], State(np.eye(4)))

    width, found, draws = 256, [], torch.Generator().manual_seed(0)
    mean = np.tril(np.ones((4, 4))) / np.arange(1, 5)[:, None]
    for _ in range(64):
        x = torch.tensor(np.linalg.cholesky(kernel) @ rng.normal(size=(4, width)), requires_grad=True)
        stream = x
        for i in range(stack.n):
            two = (torch.randn(2, width, width, generator=draws) / width**0.5).double()
            attends = kind_named("attention").of(p)[i]
            gain = p.weights["value" if attends else "up"][i] * p.weights["output" if attends else "down"][i] * 64
            normed = stream / stream.square().mean(-1, keepdim=True).sqrt() * p.norm_gain[i]
            read = torch.tensor(mean) @ normed if attends else normed
            stream = stream + float(p.branch[i]) * float(gain) * read @ two[0] @ two[1]
        (sent,) = torch.autograd.grad(stream, x, torch.tensor(top) @ stream.detach())
        rows = x.detach().numpy()
        found.append(sent.numpy() @ rows.T @ np.linalg.inv(rows @ rows.T))
    assert np.abs(along.curve - top).max() > 0.1
    there, se = np.mean(found, 0), np.std(found, 0, ddof=1) / len(found) ** 0.5
    assert se.max() < 0.04 and (np.abs(along.curve - there) < 3.5 * se).all()


@pytest.mark.parametrize("log_scale", [-5.0, 0.0, 5.0])
def test_what_is_beyond_independent_weights_has_the_scale_of_the_share(log_scale: float) -> None:
    a = sp.Architecture(kind="decoder", n_layers=1, d_model=64, n_heads=2, seq_len=4, vocab_size=9)
    stack, read = Stack(sp.scheme("xavier")(a)), State(np.full((4, 4), 0.3) + 0.7 * np.eye(4))
    shares = []
    for scale in (0.0, log_scale):
        along = Along(stack, 0.1 * np.eye(4), np.diag([1.0, 0.6, 0.8, 1.2]))
        share = along.added(0, stack.what_is_read(0, read), read, State(np.eye(4) * np.exp(-scale), scale))
        shares.append(share.absolute())
    np.testing.assert_allclose(shares[1], shares[0], rtol=1e-9)
    assert np.abs(shares[0] - np.eye(4)).max() > 0.05


def notes_of(a: sp.Architecture, **how: Any) -> int:
    """How many notes say that a tied head favours the token that is read."""
    notes = sp.predict(sp.scheme("xavier")(a), **({"fidelity": "kernel"} | how)).notes
    return sum("predicts the input token with probability" in note for note in notes)


@pytest.mark.parametrize("a", [DECODER, BOTH], ids=["decoder", "encoder-decoder"])
def test_a_note_says_so_where_it_is_not_followed(a: sp.Architecture) -> None:
    ids = default_batch(a, batch_size=2).statistics(a)
    assert notes_of(a) == notes_of(a, inputs=ids, fidelity="moments") == 1
    assert notes_of(a, inputs=ids) == notes_of(a.replace(tied_embeddings=False)) == 0


def test_a_head_without_a_norm_is_not_followed() -> None:
    a = DECODER.replace(norm_placement="post", n_layers=1)
    assert notes_of(a, inputs=default_batch(a, batch_size=2).statistics(a)) == 1

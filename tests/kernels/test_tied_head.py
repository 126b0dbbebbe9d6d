"""A tied head's gradient has a part along the stream, which goes back through the weights that made the stream."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import signalprop as sp
from signalprop.data.batches import default_batch
from signalprop.kernels import passes
from signalprop.kernels.scaled_kernel import State
from signalprop.kernels.tied_head import Along
from signalprop.measurement.simulation import simulate

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

"""Data drawn from InputStatistics, where nobody brought real data."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from signalprop.data.batches import Batch
from signalprop.errors import InputError
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics, IntArray
from signalprop.network.moments import FloatArray


@lru_cache(maxsize=8)
def zipf_probabilities(vocab_size: int, collision: float) -> FloatArray:
    """Probabilities p_i ~ i^-s of a vocabulary, with s such that two tokens are equal with probability `collision`.

    `inputs.zipf` asks for s = 1. Below 1 / vocab_size, which no distribution reaches, the uniform one (s = 0).
    """
    logs = np.log(np.arange(1, vocab_size + 1))

    def probabilities(s: float) -> FloatArray:
        weights = np.exp(-s * logs)
        return np.asarray(weights / weights.sum())

    low, high = 0.0, 64.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (probabilities(middle) ** 2).sum() < collision else (low, middle)
    return probabilities(low)


def gaussian(
    shape: tuple[int, int, int], statistics: tuple[float, float, float], rng: np.random.Generator
) -> FloatArray:
    """Gaussian array (batch, tokens, features) of given (mean, variance, token_correlation); negative ones count as 0.

    The part that the tokens of a sequence share is rescaled to its expected norm: with few sequences its chance length
    would dominate the scatter.
    """
    mean, variance, correlation = statistics
    r = min(max(correlation, 0.0), 1.0)
    common = rng.standard_normal((shape[0], 1, shape[2]))
    common /= np.sqrt(np.mean(common**2))
    values = np.sqrt(r) * common + np.sqrt(1 - r) * rng.standard_normal(shape)
    return np.asarray(mean + np.sqrt(variance) * values)


def synthetic_batch(architecture: Architecture, inputs: InputStatistics, batch_size: int, seed: int) -> Batch:
    """A batch with the given statistics: the ids themselves where `inputs` has them, drawn ones elsewhere.

    Tokens are independent draws of Zipf's law with the exponent that gives the asked collision probability, targets
    likewise and independent of the tokens; segments have a uniform boundary. Patches and frames are Gaussian.
    """
    a = architecture
    if seed < 0:
        raise InputError(f"seed is {seed}; expected a number from 0 on")
    rng = np.random.default_rng([seed, 3])
    if inputs.kind == "patches":
        shape = (batch_size, a.seq_len - a.n_class_tokens, a.patch_dim)
        patches = gaussian(shape, (inputs.mean, inputs.variance, inputs.token_correlation), rng)
        targets = _targets(a, inputs, (batch_size, a.seq_len), rng)
        return Batch(tokens=None, patches=patches, targets=targets, source="Gaussian patches")
    if inputs.kind == "frames":
        shape = (batch_size, a.n_frames, a.frame_dim)
        frames = gaussian(shape, (inputs.mean, inputs.variance, inputs.token_correlation), rng)
        if a.kind == "encoder":
            targets = _targets(a, inputs, (batch_size, a.seq_len), rng)
            return Batch(None, targets, frames=frames, source="Gaussian frames")
        read = np.maximum(_ids(a, inputs.of_decoder, (batch_size, a.target_len or a.seq_len), rng), 0)
        targets = _targets(a, inputs.of_decoder, (read.shape[0], read.shape[1]), rng)
        return Batch(None, targets, frames=frames[: len(read)], decoder_tokens=read, source="Gaussian frames")
    ids = _ids(a, inputs, (batch_size, a.seq_len), rng)
    decoder_ids, last, reader = None, ids, inputs
    if a.kind == "encoder-decoder":
        reader = inputs.decoder or replace(inputs, tokens=None, targets=None)
        last = decoder_ids = np.maximum(_ids(a, reader, (len(ids), a.target_len or a.seq_len), rng), 0)
    boundary = rng.integers(0, ids.shape[1] + 1, (len(ids), 1))
    return Batch(
        tokens=np.maximum(ids, 0),
        targets=_targets(a, reader, (last.shape[0], last.shape[1]), rng),
        segments=(np.arange(ids.shape[1]) >= boundary).astype(np.int64) if a.n_segments > 1 else None,
        keep=None if (ids >= 0).all() else ids >= 0,
        decoder_tokens=decoder_ids,
        source=inputs.source or "drawn by Zipf's law",
    )


def _ids(a: Architecture, inputs: InputStatistics, shape: tuple[int, int], rng: np.random.Generator) -> IntArray:
    """The ids that the statistics hold (-1 at padding), or drawn ones."""
    return _draw(a, inputs.token_correlation, shape, rng) if inputs.tokens is None else inputs.tokens


def _targets(a: Architecture, inputs: InputStatistics, shape: tuple[int, int], rng: np.random.Generator) -> IntArray:
    if a.head == "classes":
        return rng.integers(0, a.n_classes, shape[0])
    if inputs.targets is not None:
        return inputs.targets
    chosen = rng.random(shape) < inputs.loss_fraction
    chosen[0, 0] |= not chosen.any()
    return np.where(chosen, _draw(a, inputs.target_correlation, shape, rng), -1)


def _draw(a: Architecture, collision: float, shape: tuple[int, int], rng: np.random.Generator) -> IntArray:
    edges = np.cumsum(zipf_probabilities(a.vocab_size, float(collision)))
    return np.minimum(np.searchsorted(edges, rng.random(shape), side="right"), a.vocab_size - 1)

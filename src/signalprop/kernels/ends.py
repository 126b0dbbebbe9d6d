"""The two ends of the token-kernel recursion: the stream that enters, and the gradient that arrives at the top."""

from __future__ import annotations

import numpy as np

from signalprop.inputs import InputStatistics, IntArray
from signalprop.kernels.state import State
from signalprop.moments import FloatArray
from signalprop.parametrization import Parametrization
from signalprop.theory.embedding import embed
from signalprop.theory.head import coincidences, top_gradient


def input_kernel(parametrization: Parametrization, inputs: InputStatistics) -> FloatArray:
    """Kernel of the stream that enters the first sublayer: coincidences of real ids, or the average correlation."""
    p, a = parametrization, parametrization.architecture
    start = embed(a, p.embedding, inputs)
    t = a.seq_len
    kernel = np.full((t, t), float(start.covariance))
    np.fill_diagonal(kernel, float(start.variance))
    if inputs.kind == "patches":
        return _patch_kernel(parametrization, inputs, kernel)
    if inputs.kind == "tokens" and inputs.tokens is not None and inputs.tokens.shape[1] == t:
        equal = _coincidences(inputs.tokens, inputs.tokens)
        e = p.embedding
        segment = inputs.segment_correlation * e.segment**2 if a.n_segments > 1 else e.segment**2
        positions = np.eye(t)
        if a.positions == "sinusoidal":
            # rows of the table are alike; what is the same for all features of a token is not part of its variance
            angle = np.arange(t)[:, None] * 10_000.0 ** (-np.arange(0, a.d_model, 2) / a.d_model)
            table = np.sqrt(2) * np.concatenate([np.sin(angle), np.cos(angle)], 1)
            table -= table.mean(1, keepdims=True)
            positions = table @ table.T / table.shape[1]
        shared = (e.token**2 * equal + segment + e.position**2 * positions) * e.scale**2
        np.fill_diagonal(shared, (e.token**2 + e.segment**2 + e.position**2 * np.diagonal(positions)) * e.scale**2)
        total = np.diagonal(shared)
        if a.embedding_norm:
            shared = shared / np.sqrt(np.maximum(np.outer(total, total), 1e-300)) * e.norm_gain**2
        kept = 1 - (a.embedding_dropout or 0.0)
        np.fill_diagonal(shared, np.diagonal(shared) / kept)
        seen = (inputs.tokens >= 0).any(0)
        kernel = np.where(np.outer(seen, seen), shared, kernel)
    return kernel


def _patch_kernel(p: Parametrization, inputs: InputStatistics, average: FloatArray) -> FloatArray:
    """Kernel of embedded patches, position by position where second moments are known, with class tokens first."""
    a, e = p.architecture, p.embedding
    t, first = a.seq_len, a.n_class_tokens
    moments = inputs.second_moments
    if a.embedding_norm or moments is None or len(moments) != t - first:
        return average
    kernel = np.zeros((t, t))
    kernel[first:, first:] = (a.patch_dim * e.token**2 * moments + e.patch_bias**2) * e.scale**2
    own: FloatArray = np.diagonal(kernel) + (e.position * e.scale) ** 2
    if a.class_token:  # independent of the patches, each made of two rows of the position table's size
        own[:first] = 2 * (e.position * e.scale) ** 2
    np.fill_diagonal(kernel, own / (1 - (a.embedding_dropout or 0.0)))
    return kernel


def top_kernel(
    parametrization: Parametrization, inputs: InputStatistics, last: State, log_token_share: float
) -> FloatArray:
    """Kernel of the gradient that cross-entropy sends to the head's input, in units of one position's gradient.

    Positions i and j share what equal targets and overlapping softmax outputs give (`signalprop.theory.head`); real ids
    enter position by position. Position 0 alone where a class token is read.
    """
    p, a, t = parametrization, parametrization.architecture, parametrization.architecture.seq_len
    if a.head == "classes" and a.class_token:
        return np.outer(np.arange(t) == 0, np.arange(t) == 0).astype(np.float64)
    if a.head == "none" or inputs.kind == "stream":
        f = inputs.loss_fraction
        kernel = np.full((t, t), f * f * max(0.0, inputs.target_correlation))
        np.fill_diagonal(kernel, f)
        return kernel
    own = np.diagonal(last.kernel)
    scale = np.sqrt(np.maximum(np.outer(own, own), 1e-300))
    variance = np.log(np.maximum(scale, 1e-300)) + last.log_scale
    top = top_gradient(p, variance, np.clip(last.kernel / scale, 0.0, 1.0), log_token_share)
    mean = coincidences(a, inputs)
    if inputs.targets is not None and inputs.tokens is not None and inputs.targets.shape[1] == t:
        y, x = inputs.targets, inputs.tokens
        both = ((y >= 0)[:, :, None] & (y >= 0)[:, None, :]).mean(0)
        one = (y >= 0).mean(0)
        read = np.where(y >= 0, x, -1)
        crossed = _coincidences(read, y)
        pairs = (_coincidences(y, y), _coincidences(read, read), (crossed + crossed.T) / 2)
    else:
        f = inputs.loss_fraction
        both, one = np.full((t, t), f * f), np.full(t, f)
        pairs = (np.full((t, t), mean.targets), np.full((t, t), mean.tokens), np.full((t, t), mean.crossed))
    kernel = both * np.asarray(top.covariance(*pairs)) / np.asarray(top.variance(mean.copied))
    np.fill_diagonal(kernel, one)
    return np.asarray(kernel)


def _coincidences(left: IntArray, right: IntArray) -> FloatArray:
    """Share of sequences in which `left` at i equals `right` at j, of those where both count (>= 0)."""
    t = left.shape[1]
    equal, counted = np.zeros((t, t)), np.zeros((t, t))
    for x, y in zip(left, right, strict=True):
        both = np.outer(x >= 0, y >= 0)
        counted += both
        equal += both & (x[:, None] == y[None, :])
    return np.asarray(equal / np.maximum(counted, 1))

"""The two ends of the token-kernel recursion: the stream that enters, and the gradient that arrives at the top."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from signalprop.errors import InputError
from signalprop.kernels.position_grid import Grid
from signalprop.kernels.scaled_kernel import State, on_both_sides
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics, IntArray, collision_probability, evenly_spaced
from signalprop.network.moments import Array, FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.theory.embedding import embed
from signalprop.theory.log_arithmetic import inverse_roots, safe_exp
from signalprop.theory.loss_gradient import coincidences, norm_leaves, top_gradient

_LONG = 512  # tokens beyond which fewer sequences are followed
_SEQUENCES, _LONG_SEQUENCES = 4, 2
Sequence = tuple[InputStatistics, NDArray[np.bool_] | None]


def each(architecture: Architecture, inputs: InputStatistics) -> list[Sequence]:
    """The statistics of every sequence or image by itself, each with which of its positions are real (None: all).

    Statistics without real ids, or second moments of single images, are those of every sequence.
    """
    if _of_images(inputs):
        return [(replace(inputs, second_moments=one), None) for one in np.asarray(inputs.second_moments)]
    if not _has_ids(inputs, architecture.seq_len):
        return [(inputs, None)]
    return [_one(inputs, row) for row in range(len(np.asarray(inputs.tokens)))]


def sequences(architecture: Architecture, inputs: InputStatistics) -> tuple[list[Sequence], str]:
    """Those of `each` that are followed, and a note.

    Of more than 4 sequences (2 of more than 512 tokens) those are taken that stand evenly spaced in the order of their
    token correlation, and the note says so; sequences without loss are left out where others have some.
    """
    every = each(architecture, inputs)
    if _of_images(inputs):
        return every, f"token kernels of {len(every)} images, one by one"
    if not _has_ids(inputs, architecture.seq_len):
        return every, ""
    rows, note = _chosen(inputs)
    return [every[row] for row in rows], note


def sequences_of_both(
    architecture: Architecture, inputs: InputStatistics
) -> tuple[list[tuple[Sequence, Sequence]], str]:
    """`sequences` of what the encoder and what the decoder of an encoder-decoder read, side by side."""
    a, decoder = architecture, inputs.of_decoder
    if not _has_ids(decoder, a.target_len or a.seq_len):
        return [((inputs, None), (decoder, None))], ""
    rows, note = _chosen(decoder)
    read = each(a, inputs)
    aligned = _has_ids(inputs, a.seq_len) and len(read) == len(np.asarray(decoder.tokens))
    return [(read[row] if aligned else (inputs, None), _one(decoder, row)) for row in rows], note


def _of_images(inputs: InputStatistics) -> bool:
    return inputs.kind == "patches" and inputs.second_moments is not None and inputs.second_moments.ndim == 3


def _has_ids(inputs: InputStatistics, length: int) -> bool:
    return inputs.kind == "tokens" and inputs.tokens is not None and inputs.tokens.shape[1] == length


def _chosen(inputs: InputStatistics) -> tuple[list[int], str]:
    """Which sequences of real ids are followed, and a note where that is not all."""
    x, y = inputs.tokens, inputs.targets
    assert x is not None
    carry = np.ones(len(x), bool) if y is None or y.shape != x.shape else (y >= 0).any(1)
    rows = np.flatnonzero(carry if carry.any() else ~carry)
    most = _SEQUENCES if x.shape[1] <= _LONG else _LONG_SEQUENCES
    if len(rows) <= most:
        return rows.tolist(), ""
    collisions = [collision_probability(x[row]) for row in rows]
    note = f"token kernels of {most} of the {len(rows)} sequences, evenly spaced by their token correlation"
    return rows[evenly_spaced(collisions, most)].tolist(), note


def _one(inputs: InputStatistics, row: int) -> Sequence:
    """One of several sequences of real ids, and which of its positions are real."""
    x = inputs.tokens
    assert x is not None
    real = x[row] >= 0
    targets, segments = (
        ids[[row]] if ids is not None and len(ids) == len(x) else ids for ids in (inputs.targets, inputs.segments)
    )
    one = replace(inputs, tokens=x[[row]], targets=targets, segments=segments)
    return one, None if real.all() or not real.any() else real


def input_kernel(
    parametrization: Parametrization, inputs: InputStatistics, rows: int | None = None, *, decoder: bool = False
) -> FloatArray:
    """Kernel of the stream that enters the first sublayer: coincidences of real ids, or the average correlation.

    Args:
        rows: of the kernel, where it is of averages and stands on a grid; else of every position.
        decoder: the stream is the decoder's of an encoder-decoder.

    Raises:
        InputError: a correlation that so many tokens cannot have: n vectors of one length sum to one whose square is
            n (1 + (n - 1) r) of theirs, so that r is -1 / (n - 1) at least.
    """
    p, a = parametrization, parametrization.architecture
    start = embed(a, p.embedding, inputs, decoder=decoder)
    t = (a.target_len or a.seq_len) if decoder else a.seq_len
    if (t - 1) * start.covariance < -start.variance * (1 + 1e-9):
        raise InputError(
            f"a token correlation of {start.token_correlation:.4g} is not possible among {t} tokens: on average it is "
            f"{-1 / (t - 1):.4g} at least; correct it, or take fidelity moments"
        )
    kernel = np.full((rows or t, rows or t), float(start.covariance))
    np.fill_diagonal(kernel, float(start.variance))
    if rows is not None:
        return kernel
    if inputs.kind == "patches":
        return _patch_kernel(parametrization, inputs, kernel)
    if inputs.kind == "tokens" and inputs.tokens is not None and inputs.tokens.shape[1] == t:
        equal = _coincidences(inputs.tokens, inputs.tokens)
        e, segment2 = p.embedding, 0.0 if decoder else p.embedding.segment**2
        segment: Array = inputs.segment_correlation * segment2 if a.n_segments > 1 else segment2
        if a.n_segments > 1 and inputs.segments is not None and inputs.segments.shape == inputs.tokens.shape:
            segment = segment2 * _coincidences(inputs.segments, inputs.segments)
        position = e.position_of(decoder=decoder)
        positions = np.eye(t)
        if a.positions_of(decoder=decoder) == "sinusoidal":
            # rows of the table are equal; what is the same for all features of a token is not part of its variance
            angle = np.arange(t)[:, None] * 10_000.0 ** (-np.arange(0, a.d_model, 2) / a.d_model)
            table = np.sqrt(2) * np.concatenate([np.sin(angle), np.cos(angle)], 1)
            table -= table.mean(1, keepdims=True)
            positions = table @ table.T / table.shape[1]
        shared = (e.token**2 * equal + segment + position**2 * positions) * e.scale**2
        np.fill_diagonal(shared, (e.token**2 + segment2 + position**2 * np.diagonal(positions)) * e.scale**2)
        if a.embedding_norm:
            root = inverse_roots(np.diagonal(shared) + a.norm_eps) * e.norm_gain
            shared = shared * np.outer(root, root)
        remaining = 1 - (a.embedding_dropout or 0.0)
        np.fill_diagonal(shared, np.diagonal(shared) / remaining)
        is_word = (inputs.tokens >= 0).any(0)
        kernel = np.where(np.outer(is_word, is_word), shared, kernel)
    return kernel


def _patch_kernel(p: Parametrization, inputs: InputStatistics, average: FloatArray) -> FloatArray:
    """Kernel of embedded patches, position by position where second moments are known, with class tokens first."""
    a, e = p.architecture, p.embedding
    t, first = a.seq_len, a.n_class_tokens
    if a.embedding_norm:
        return average
    moments = inputs.second_moments
    if moments is None or len(moments) != t - first:
        moments = np.full((t - first, t - first), inputs.variance * inputs.token_correlation + inputs.mean**2)
        np.fill_diagonal(moments, inputs.variance + inputs.mean**2)
    kernel = np.zeros((t, t))
    kernel[first:, first:] = (a.patch_dim * e.token**2 * moments + e.patch_bias**2) * e.scale**2
    per_token: FloatArray = np.diagonal(kernel) + (e.position * e.scale) ** 2
    if a.class_token:  # independent of the patches, each the sum of two rows of the position table's size
        per_token[:first] = 2 * (e.position * e.scale) ** 2
    np.fill_diagonal(kernel, per_token / (1 - (a.embedding_dropout or 0.0)))
    return kernel


def top_kernel(
    parametrization: Parametrization,
    inputs: InputStatistics,
    last: State,
    log_token_share: float,
    grid: Grid | None = None,
) -> tuple[FloatArray, FloatArray]:
    """Kernel of the gradient that cross-entropy sends to the head's input, in units of d times a head weight's
    variance; and of what is orthogonal to the stream, all that a post-norm after the last sublayer sends back.

    Positions i and j share what equal targets and overlapping softmax outputs give (`signalprop.theory.loss_gradient`);
    real ids enter position by position. Of a class head, the position alone that it reads.
    """
    p, a, t = parametrization, parametrization.architecture, len(last.kernel)
    per_token = np.diagonal(last.kernel)
    scale = np.sqrt(np.maximum(np.outer(per_token, per_token), 1e-300))
    r = np.clip(last.kernel / scale, 0.0, 1.0)

    def across(kernel: FloatArray, along: Array = 0.0) -> FloatArray:
        leaves = np.broadcast_to(norm_leaves(a, r), (t, t)).copy()
        np.fill_diagonal(leaves, norm_leaves(a, 1.0, along))
        return np.asarray(kernel * leaves)

    if a.head == "classes":
        kernel = np.diag(_answering(a, t, inputs, grid))
        return kernel, across(kernel)
    if a.head == "none" or inputs.kind == "stream":
        f = inputs.loss_fraction
        kernel = np.full((t, t), f * f * max(0.0, inputs.target_correlation))
        np.fill_diagonal(kernel, f)
        return kernel, across(kernel)
    variance = np.log(np.maximum(scale, 1e-300)) + last.log_scale
    top = top_gradient(p, variance, r, log_token_share)
    if (
        grid is None
        and inputs.targets is not None
        and inputs.tokens is not None
        and inputs.targets.shape[1] == t == inputs.tokens.shape[1]
    ):
        y, x = inputs.targets, inputs.tokens
        both = ((y >= 0)[:, :, None] & (y >= 0)[:, None, :]).mean(0)
        one = (y >= 0).mean(0)
        read = np.where(y >= 0, x, -1)
        crossed = _coincidences(read, y)
        pairs = [_coincidences(y, y), _coincidences(read, read), crossed, np.diagonal(crossed)[:, None]]
    else:
        f = inputs.loss_fraction
        both, one = np.full((t, t), f * f), np.full(t, f)
        pairs = [np.full((t, t), c) for c in coincidences(a, inputs)]

    def kernel_of(normed: bool) -> FloatArray:
        kernel = np.asarray(both * top.covariance(*pairs, normed=normed))
        variance = np.broadcast_to(np.asarray(top.variance(pairs[3], normed=normed)), (t, t))
        np.fill_diagonal(kernel, one * np.diagonal(variance))
        return kernel

    kernel = kernel_of(a.has_final_norm)
    if a.has_final_norm:
        return kernel, kernel
    return kernel, across(kernel_of(True), np.diagonal(top.along))


def read_and_asked(inputs: InputStatistics) -> tuple[FloatArray, FloatArray]:
    """Whether the token that position k reads, and the one that is asked for there, stands at k', (T, T) each; of
    several sequences in how many. 0 where no token is asked for."""
    y, x = inputs.targets, inputs.tokens
    assert y is not None and x is not None
    return _coincidences(np.where(y >= 0, x, -1), x), _coincidences(y, x)


def _answering(a: Architecture, t: int, inputs: InputStatistics, grid: Grid | None) -> FloatArray:
    """The share of class heads that read each of t rows of a kernel: the first, in decoders the last real one."""
    if grid is not None:  # the last node stands for several positions
        return np.asarray(np.tile(np.arange(t // 2) == t // 2 - 1, 2) / grid.weights[-1])
    if a.kind == "encoder":
        return np.asarray(np.arange(t) == 0, dtype=np.float64)
    if inputs.tokens is None or inputs.tokens.shape[1] != t:
        return np.asarray(np.arange(t) == t - 1, dtype=np.float64)
    lasts = (inputs.tokens >= 0).cumsum(1).argmax(1)
    return np.asarray(np.bincount(lasts, minlength=t) / len(lasts))


def _coincidences(left: IntArray, right: IntArray) -> FloatArray:
    """Share of sequences in which `left` at i equals `right` at j, of those where both count (>= 0)."""
    t = left.shape[1]
    equal, counted = np.zeros((t, t)), np.zeros((t, t))
    for x, y in zip(left, right, strict=True):
        both = np.outer(x >= 0, y >= 0)
        counted += both
        equal += both & (x[:, None] == y[None, :])
    return np.asarray(equal / np.maximum(counted, 1))


def through_final_norm(p: Parametrization, last: State, kernel: FloatArray) -> State:
    """A gradient kernel before the final norm that the last stream goes through, if there is one."""
    a, log_scale = p.architecture, 0.0
    if a.has_final_norm:
        root = inverse_roots(np.diagonal(last.kernel) + a.norm_eps * safe_exp(-last.log_scale))
        kernel, log_scale = on_both_sides(kernel, root), -last.log_scale
    return State(kernel, log_scale).rescaled()

"""From input statistics to the stream that enters the first sublayer (TGS v1 B.1; docs/theory/components.md)."""

from __future__ import annotations

import math

import numpy as np

from signalprop.errors import InputError
from signalprop.network.architecture import Architecture
from signalprop.network.duals import central_dual, dual
from signalprop.network.inputs import InputStatistics
from signalprop.network.moments import Moments, ratio
from signalprop.network.parametrization import Embedding


def embed(
    architecture: Architecture, embedding: Embedding, inputs: InputStatistics, *, decoder: bool = False
) -> Moments:
    """Moments of the stream that enters the first sublayer.

    Token tables: variance is the sum of the tables' variances, covariance sum of r_t sigma_t^2 with r_t the probability
    that two positions look up the same row (positions: 0; sinusoids: see `sinusoidal_moments`). Patches: the linear map
    sees second moments. Frames: see `front_end`. Then scale, norm, and embedding dropout, which divides the variance
    by 1 - p and leaves the covariance. Exact, but for the norm, which is that of infinite width, and for frames.

    Args:
        decoder: the stream is the decoder's of an encoder-decoder (it has no segments).
    """
    a = architecture
    if inputs.kind == "stream":
        return Moments(inputs.mean, inputs.variance, inputs.token_correlation)
    token, mean = embedding.token**2, 0.0
    if inputs.kind == "frames":
        mean, variance, shared = front_end(a, embedding, inputs)
    elif inputs.kind == "patches":
        second = inputs.variance + inputs.mean**2
        covariance = inputs.variance * inputs.token_correlation + inputs.mean**2
        variance = a.patch_dim * token * second + embedding.patch_bias**2
        shared = a.patch_dim * token * covariance + embedding.patch_bias**2
        if a.class_token:  # more tokens, independent of the patches, drawn with the same variance as the positions
            share = a.n_class_tokens / a.seq_len
            variance = (1 - share) * variance + share * embedding.position**2
            shared *= (1 - share) * (1 - a.n_class_tokens / max(a.seq_len - 1, 1))
    else:
        variance, shared = token, token * inputs.token_correlation
    position = embedding.position_of(decoder=decoder)
    if a.positions_of(decoder=decoder) == "sinusoidal":
        offset, mean_square = sinusoidal_moments((a.target_len or a.seq_len) if decoder else a.seq_len, a.d_model)
        mean += position * offset
        variance += position**2 * (1 - offset**2)
        shared += position**2 * (mean_square - offset**2)
    else:
        variance += position**2
    if not decoder:
        variance += embedding.segment**2
        segment = inputs.segment_correlation if a.n_segments > 1 else 1.0
        shared += segment * embedding.segment**2
    mean, variance, shared = mean * embedding.scale, variance * embedding.scale**2, shared * embedding.scale**2
    if a.embedding_norm:
        mean_in_norm = mean if a.norm == "rmsnorm" else 0.0
        factor = float(ratio(embedding.norm_gain**2, variance + mean_in_norm**2 + a.norm_eps))
        mean, variance, shared = mean_in_norm * math.sqrt(factor), variance * factor, shared * factor
    p = a.embedding_dropout or 0.0
    variance = (variance + p * mean**2) / (1 - p)
    return Moments(mean, variance, float(ratio(shared, variance)))


def front_end(a: Architecture, embedding: Embedding, inputs: InputStatistics) -> tuple[float, float, float]:
    """(mean, variance, covariance of two tokens) after the convolutions that read frames.

    A convolution is a linear map of kernel * inputs numbers, so its outputs are Gaussian of variance fan_in sigma^2
    E x^2; two of them share the average E x_i x_j, which is dominated by frames that lie apart. The activation acts on
    that pair as in a feed-forward sublayer; a gated linear unit is a Gaussian times the sigmoid of another. Not
    counted: zeros beyond the ends, where a convolution reads kernel // 2 fewer frames, and differences between frames.

    Raises:
        InputError: the table has no standard deviation per convolution.
    """
    n = len(a.conv_kernels)
    if len(embedding.convolutions) != n or a.input != "frames":
        raise InputError(
            f"these are statistics of frames; the architecture reads {a.input}, and the table has "
            f"{len(embedding.convolutions)} convolutions where {n} are needed"
        )
    mean, variance, covariance = inputs.mean, inputs.variance, inputs.variance * inputs.token_correlation
    for i, std in enumerate(embedding.convolutions):
        channels, _, kernel = a.convolution(i)
        weight, bias = kernel * channels * std**2, embedding.convolution_bias(i) ** 2
        s = weight * (variance + mean**2) + bias
        shared = weight * (covariance + mean**2) + bias
        mean, variance, covariance = activated(a.conv_activation, s, float(ratio(shared, s)))
    return mean, variance, covariance


def activated(name: str, variance: float, correlation: float) -> tuple[float, float, float]:
    """(mean, variance, covariance) after an activation, or `glu`, of a pair of Gaussians with mean 0."""
    if name == "glu":
        gate = dual("sigmoid", variance, correlation)
        first = variance * float(gate.second_moment)
        return 0.0, first, correlation * variance * float(gate.covariance_moment)
    mean, second, shared, *_ = central_dual(name, variance, correlation)
    return float(mean), float(second), float(shared)


def sinusoidal_moments(length: int, d_model: int) -> tuple[float, float]:
    """(mean, E x_i x_j over pairs of positions i != j) of Vaswani et al.'s sines and cosines, scaled to mean square 1.

    The table is not random: slow features are almost equal everywhere, 0.42 at 512 positions and d_model 256. With
    D(t) = (1/L) sum_k e^(ikt) and the frequencies t_f: mean = sqrt(2)/d sum_f (Re D + Im D), and the pairs give
    (L w - 1)/(L - 1) with w = 2/d sum_f |D|^2. Exact for even d_model.
    """
    half = (d_model + 1) // 2
    angle = 0.5 * 10_000.0 ** (-np.arange(half) / half)
    size = np.sin(length * angle) / (length * np.sin(angle))
    phase = (length - 1) * angle
    mean = float(np.mean(size * (np.sin(phase) + np.cos(phase)))) / math.sqrt(2)
    mean_square = float(np.mean(size**2))
    return mean, (length * mean_square - 1) / (length - 1) if length > 1 else 0.0

"""From input statistics to the stream that enters the first sublayer (TGS v1 section B.1; docs/theory/inputs.md)."""

from __future__ import annotations

import math

import numpy as np

from signalprop.architecture import Architecture
from signalprop.inputs import InputStatistics
from signalprop.moments import Moments, ratio
from signalprop.parametrization import Embedding


def embed(
    architecture: Architecture, embedding: Embedding, inputs: InputStatistics, *, decoder: bool = False
) -> Moments:
    """Moments of the stream that enters the first sublayer.

    Token tables: variance is the sum of the tables' variances, covariance sum of r_t sigma_t^2 with r_t the probability
    that two positions look up the same row (positions: 0; sinusoids: see `sinusoidal_moments`). Patches: the linear map
    sees second moments. Then scale, norm, and embedding dropout, which divides the variance by 1 - p and leaves the
    covariance. Exact, but for the norm, which is that of infinite width.

    Args:
        decoder: the stream is the decoder's of an encoder-decoder (it has no segments).
    """
    a = architecture
    if inputs.kind == "stream":
        return Moments(inputs.mean, inputs.variance, inputs.token_correlation)
    token = embedding.token**2
    if inputs.kind == "patches":
        second = inputs.variance + inputs.mean**2
        covariance = inputs.variance * inputs.token_correlation + inputs.mean**2
        variance = a.patch_dim * token * second + embedding.patch_bias**2
        shared = a.patch_dim * token * covariance + embedding.patch_bias**2
        if a.class_token:  # one more token, independent of the patches, drawn with the same variance as the positions
            share = 1 / a.seq_len
            variance = (1 - share) * variance + share * embedding.position**2
            shared *= (1 - share) * (1 - 1 / max(a.seq_len - 1, 1))
    else:
        variance, shared = token, token * inputs.token_correlation
    mean = 0.0
    if a.positions == "sinusoidal":
        offset, alike = sinusoidal_moments((a.target_len or a.seq_len) if decoder else a.seq_len, a.d_model)
        mean = embedding.position * offset * embedding.scale
        variance += embedding.position**2 * (1 - offset**2)
        shared += embedding.position**2 * (alike - offset**2)
    else:
        variance += embedding.position**2
    if not decoder:
        variance += embedding.segment**2
        segment = inputs.segment_correlation if a.n_segments > 1 else 1.0
        shared += segment * embedding.segment**2
    variance, shared = variance * embedding.scale**2, shared * embedding.scale**2
    if a.embedding_norm:
        kept_mean = mean if a.norm == "rmsnorm" else 0.0
        factor = float(ratio(embedding.norm_gain**2, variance + kept_mean**2))
        mean, variance, shared = kept_mean * math.sqrt(factor), variance * factor, shared * factor
    p = a.embedding_dropout or 0.0
    variance = (variance + p * mean**2) / (1 - p)
    return Moments(mean, variance, float(ratio(shared, variance)))


def sinusoidal_moments(length: int, d_model: int) -> tuple[float, float]:
    """(mean, E x_i x_j over pairs of positions i != j) of Vaswani et al.'s sines and cosines, scaled to mean square 1.

    The table is not random: slow features are alike at all positions, 0.42 at 512 positions and d_model 256. With
    D(t) = (1/L) sum_k e^(ikt) and the frequencies t_f: mean = sqrt(2)/d sum_f (Re D + Im D), and the pairs give
    (L w - 1)/(L - 1) with w = 2/d sum_f |D|^2. Exact for even d_model.
    """
    half = (d_model + 1) // 2
    angle = 0.5 * 10_000.0 ** (-np.arange(half) / half)
    size = np.sin(length * angle) / (length * np.sin(angle))
    phase = (length - 1) * angle
    mean = float(np.mean(size * (np.sin(phase) + np.cos(phase)))) / math.sqrt(2)
    alike = float(np.mean(size**2))
    return mean, (length * alike - 1) / (length - 1) if length > 1 else 0.0

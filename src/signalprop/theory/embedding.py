"""From input statistics to the stream that enters the first sublayer (TGS v1 section B.1)."""

from __future__ import annotations

from signalprop.architecture import Architecture
from signalprop.inputs import InputStatistics
from signalprop.moments import Moments, ratio
from signalprop.parametrization import Embedding


def embed(
    architecture: Architecture, embedding: Embedding, inputs: InputStatistics, *, decoder: bool = False
) -> Moments:
    """Moments of the stream that enters the first sublayer.

    Token tables: variance is the sum of the tables' variances, covariance sum of r_t sigma_t^2 with r_t the probability
    that two positions look up the same row (positions: 0). Patches: the linear map sees second moments. Then scale, norm,
    and embedding dropout, which divides the variance by 1 - p and leaves the covariance.

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
    variance += embedding.position**2
    if not decoder:
        variance += embedding.segment**2
        segment = inputs.segment_correlation if a.n_segments > 1 else 1.0
        shared += segment * embedding.segment**2
    variance, shared = variance * embedding.scale**2, shared * embedding.scale**2
    if a.embedding_norm:
        variance, shared = embedding.norm_gain**2, embedding.norm_gain**2 * float(ratio(shared, variance))
    kept = 1 - (a.embedding_dropout or 0.0)
    variance = variance / kept
    return Moments(0.0, variance, float(ratio(shared, variance)))

"""What goes into attention: the variance of a score, and what rotations leave of it."""

from __future__ import annotations

import numpy as np

from signalprop.network.moments import Array


def score_variance(
    d: Array,
    query_variance: Array,
    key_variance: Array,
    d_head: Array,
    *,
    scale: Array | None = None,
    query_second_moment: Array = 1.0,
    key_second_moment: Array = 1.0,
    query_bias_variance: Array = 0.0,
    qk_norm: tuple[Array, Array] | None = None,
) -> Array:
    """s0, the variance of one raw attention score.

    Args:
        d: width of the attention input (of both streams, in cross-attention).
        query_variance, key_variance: variance of an entry of W_Q and of W_K.
        d_head: width of one head.
        scale: what scores are multiplied with; 1/√d_head unless given.
        query_second_moment, key_second_moment: of the attention input (1 after a norm without gain).
        query_bias_variance: mean square of the query bias. A key bias adds the same number to every score of a row and
            drops out.
        qk_norm: the mean squares of the gains (γ_q², γ_k²) of an RMSNorm on every query and key head; the weights
            then do not matter.
    """
    per_feature = 1.0 if scale is None else scale * scale * d_head
    if qk_norm is not None:
        return qk_norm[0] * qk_norm[1] * per_feature
    query = d * query_variance * query_second_moment + query_bias_variance
    return query * d * key_variance * key_second_moment * per_feature


def rotary_coherence(
    length: int, d_head: int, base: float = 1e4, fraction: float = 1.0, *, causal: str | None = None
) -> float:
    """ω, the share of a common key vector's score that rotary embeddings leave equal along a row.

    ω = 1 - fraction + fraction (2/d_rot) Σ_f |(1/L) Σ_k e^(ikθ_f)|², θ_f = base^(-2f/d_rot), where the first
    d_rot = fraction d_head features of a head are rotated. The inner sum is (sin(Lθ/2) / L sin(θ/2))².

    Args:
        length: tokens L.
        causal: average over rows of length 1 to L: "pairs" weighs all rows alike (for `omega`), "rows" weighs a row of
            length i by (1 - 1/i)/i, the squared softmax Jacobian of uniform weights (for `omega_rows`).
    """
    rotated = 2 * round(fraction * d_head / 2)
    if rotated == 0:
        return 1.0
    half = 0.5 * base ** (-np.arange(0, rotated, 2) / rotated)[:, None]
    n, weight = np.array([float(length)]), np.ones(1)
    if causal is not None:
        n = np.unique(np.round(np.geomspace(1, length, 256)))  # each stands for the rows half-way to its neighbours
        edges = np.concatenate([[0.5], 0.5 * (n[1:] + n[:-1]), [length + 0.5]])
        weight = np.diff(edges) if causal == "pairs" else np.diff(edges) * (n - 1.0) / n**2
    if not weight.any():  # a single token
        return 1.0
    coherence = np.mean((np.sin(n * half) / (n * np.sin(half))) ** 2, axis=0)
    return float(1.0 - rotated / d_head * (1.0 - coherence @ weight / weight.sum()))

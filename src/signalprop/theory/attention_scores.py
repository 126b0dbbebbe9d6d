"""What rotations leave of attention scores."""

from __future__ import annotations

import numpy as np


def rotary_coherence(
    length: int, d_head: int, base: float = 1e4, fraction: float = 1.0, *, causal: str | None = None
) -> float:
    """ω, the share of a common key vector's score that rotary embeddings leave equal along a row.

    ω = 1 - fraction + fraction (2/d_rot) Σ_f |(1/L) Σ_k e^(ikθ_f)|², θ_f = base^(-2f/d_rot), where the first
    d_rot = fraction d_head features of a head are rotated. The inner sum is (sin(Lθ/2) / L sin(θ/2))².

    Args:
        length: tokens L.
        causal: average over rows of length 1 to L: "pairs" weighs rows equally (for `omega`), "rows" weighs a row of
            length i by (1 - 1/i)/i, the squared softmax Jacobian of uniform weights (for `omega_rows`).
    """
    rotated = 2 * round(fraction * d_head / 2)
    if rotated == 0:
        return 1.0
    half = 0.5 * base ** (-np.arange(0, rotated, 2) / rotated)[:, None]
    n, weight = np.array([float(length)]), np.ones(1)
    if causal is not None:
        n = np.array(sorted(set(np.round(np.geomspace(1, length, 256)).tolist())))  # np.unique would import numpy.ma
        # each stands for the rows half-way to its neighbours
        edges = np.concatenate([[0.5], 0.5 * (n[1:] + n[:-1]), [length + 0.5]])
        weight = np.diff(edges) if causal == "pairs" else np.diff(edges) * (n - 1.0) / n**2
    if not weight.any():  # a single token
        return 1.0
    coherence = np.mean((np.sin(n * half) / (n * np.sin(half))) ** 2, axis=0)
    return float(1.0 - rotated / d_head * (1.0 - coherence @ weight / weight.sum()))

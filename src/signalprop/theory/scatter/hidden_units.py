"""How far one feed-forward lies from the mean by its hidden units' draws. Derivation: `docs/theory/network.md`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from signalprop.network.activations import activation
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.theory.branches import ForwardState

_TERMS = 24  # of Hermite's series of squared activations


def hidden_units(
    p: Parametrization, state: ForwardState, r: FloatArray, r_g: FloatArray, *, one_sequence: bool = True
) -> FloatArray:
    """Relative variance of what a feed-forward gives, and of what it sends back, (sublayers, 2).

    Args:
        state: what branches read. r, r_g: correlation of two tokens there, and of their gradients.
        one_sequence: tokens are also paired with themselves; not between two sequences.
    """
    a = p.architecture
    first = "gate" if a.gated else "up"
    size, r = a.d_model * p.weights[first] ** 2 * state.second + p.biases[first] ** 2, np.clip(r, -1.0, 1.0)
    f = activation(a.activation)
    z = _nodes()[0]
    x = np.sqrt(np.maximum(size, 1e-30))[:, None] * z
    values, slopes = f.function(x) ** 2, f.derivative(x) ** 2
    forward_of, back_of = _square_dual(values), _square_dual(slopes)
    sizes = []
    for pair, pair_g in ((np.ones_like(r), np.ones_like(r)), (r, r_g)):
        forward, back = forward_of(pair), back_of(pair)
        if a.gated:  # times a second map, forward; back through both, in halves
            forward, back = forward * (1 + 2 * pair**2), 0.5 * forward + 0.5 * back * (1 + 2 * pair**2)
        sizes.append((forward - 1, back * (1 + 2 * pair_g**2) - 1))
    share = one_sequence / a.seq_len
    mixed = [share * alone + (1 - share) * two for alone, two in zip(*sizes, strict=True)]
    return np.stack(mixed, -1) / a.d_ff


@cache
def _nodes() -> tuple[FloatArray, FloatArray, FloatArray]:
    """Nodes and weights of Gauss-Hermite quadrature, and Hermite's polynomials, of norm 1, there."""
    z, w = np.polynomial.hermite_e.hermegauss(80)
    factorials = np.cumprod(np.maximum(np.arange(_TERMS + 1.0), 1.0))
    return z, w / w.sum(), np.polynomial.hermite_e.hermevander(z, _TERMS) / np.sqrt(factorials)


def _square_dual(y: FloatArray) -> Callable[[FloatArray], FloatArray]:
    """r -> E y(z) y(z') / (E y)^2 of two Gaussians of correlation r, from values at the nodes, (sublayers, nodes)."""
    _, weights, basis = _nodes()
    squares = ((y * weights) @ basis) ** 2
    rest = y**2 @ weights - squares.sum(-1)  # what the terms leave, as one of the next power

    def dual(r: FloatArray) -> FloatArray:
        total = rest
        for column in squares.T[::-1]:
            total = total * r + column
        return np.asarray(total / np.maximum(squares[:, 0], 1e-300))

    return dual

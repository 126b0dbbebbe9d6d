"""What changes in attention because its tokens have one length, as norms leave them: terms of order 1/d.

Tokens of Gaussian features differ in length, by 2/d of their mean square. On a sphere, of d features and token
correlation r, the angle θ to what all tokens share varies in turn, and no score is far from the others. QK-norm does
the same to queries and keys. Derivation and measured errors: docs/theory/attention.md, "Tokens of one length" and
"Queries and keys of one length". Numbers, or arrays.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from signalprop.network.moments import Array


class HeadNorms(NamedTuple):
    """Over how many features norms make queries, and keys, one length: of a head, or of all; infinite without norms."""

    queries: float = math.inf
    keys: float = math.inf


NO_NORMS = HeadNorms()


def score_spread(d: Array, d_head: Array, norms: HeadNorms, *, one_length: bool) -> Array:
    """Relative variance of the score variance of a row, over heads and queries."""
    return 2.0 / d_head - 2.0 / norms.queries + (2.0 if one_length else 4.0) / d


def turns(d: Array, norms: HeadNorms) -> Array:
    """Variance of the cosine of two queries that share nothing, beyond half of `score_spread`."""
    return 1.0 / d + 1.0 / norms.queries


def flatness(r: Array, key_part: Array, d: Array, norms: HeadNorms) -> Array:
    """ε: scores within a row have the fourth cumulant -6 ε s². key_part: the keys' own share of their variance s."""
    near = (1.0 - r) * key_part
    return near * near * (1.0 / d + 1.0 / norms.keys)


def of_two_rows(near: Array) -> Array:
    """How much of what flatness does to ln P it does to ln Λ_V of two rows whose scores have that correlation."""
    return (1.0 + (4.0 + 2.0 * near) * near) / 7.0


def crowding(r: Array, key_part: Array, d: Array) -> tuple[Array, Array]:
    """-Cov(ln of the variance of a key's scores, its product with the mean key) / 2: keys near the others get less.

    Returns that of all keys, and what a mean of n keys adds n times, as a key is one of them.
    """
    whole = key_part * (1.0 - r) / d
    return whole * r * (1.0 - 0.5 * r), whole * (1.0 + r - 0.5 * r * r)


def shorter(s: Array, tilt: Array, d: Array) -> Array:
    """By what factor squared distances of keys from a row's output, weighted by A², are smaller: to first order in 1/d
    1 - 4 s κ/d, κ being how far these weights are tilted."""
    return 1.0 / (1.0 + 4.0 * s * tilt / d)


def along_query(d: Array, d_head: Array, norms: HeadNorms) -> Array:
    """Times s κ, how much longer keys that a query's gradient sums up are, tilted along the query: of that part a norm
    on it sends nothing back."""
    return 1.0 / d_head - 1.0 / norms.queries + 2.0 / d


def through_key_norm(s: Array, tilt: Array, share: Array, norms: HeadNorms) -> Array:
    """Factor on what one query's score sends to a key: a norm takes out what lies along the key, whose score is large.

    tilt: of keys that get J. share: s over the raw score variance. Keys of one feature count as of two.
    """
    return 1.0 / np.maximum(1.0 + (4.0 * share * s * tilt - 1.0) / norms.keys, 0.5)


def by_chance(d: Array, d_head: Array, norms: HeadNorms) -> Array:
    """The share of E c Λ_J beyond c Λ_J, what two queries send to a key that they like by chance, that its norm lets
    through: what they have in common along that key it takes out."""
    return 1.0 - 1.0 / (norms.keys * (1.0 / d_head + 2.0 / d))


def of_varying_length(r: Array, rescaling: Array, *, one_length: bool) -> Array:
    """d times what E |δ|⁴/(E |δ|²)² of keys about their mean is above that of infinite width."""
    return (4.0 * r if one_length else 2.0) * rescaling - 1.0

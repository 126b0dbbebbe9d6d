"""What a branch reads of a stream, through a norm or as it is, held where a double holds it."""

from __future__ import annotations

import numpy as np

from signalprop.errors import InputError
from signalprop.network.architecture import Architecture
from signalprop.network.moments import Array, Moments
from signalprop.network.parametrization import Parametrization
from signalprop.theory.log_arithmetic import HELD, exp, log, log_add, plain, safe_exp, within
from signalprop.theory.signals import normed

LARGEST_MEAN = 1e150  # of a stream's entries; its square is a double


LARGEST_MEMORY = 200.0  # log of a memory's variance up to which its products with others fit a double


def check_norms_divide(a: Architecture) -> None:
    """Refuse an activation in a norm's place.

    Raises:
        InputError: the norm is DyT or Derf.
    """
    if a.squash:
        raise InputError(f"norm {a.norm!r} divides nothing by its size, and no formula here follows it; take simulate")


def read_normed(
    a: Architecture, gain2: Array, log_epsilon: float, log_v: Array, r: Array, mean: Array
) -> tuple[Array, Array, Array]:
    """What a branch reads after a norm: second moment, its correlation; and log of what the norm divides by."""
    if a.norm == "layernorm" or (isinstance(mean, float) and mean == 0):  # which takes a mean away
        out, divisor = normed(log_v, log_epsilon)
        return safe_exp(out) * gain2, r, divisor
    log_mean2 = log(mean**2)
    log_second = log_add(log_v, log_mean2)
    out, divisor = normed(log_second, log_epsilon)
    return plain(safe_exp(out) * gain2), _with_mean(log_second, log_mean2, r), divisor


def with_bias(second: Array, r: Array, bias2: Array) -> tuple[Array, Array]:
    """Second moment and correlation of what a norm gives plus its bias, of mean square `bias2`.

    The bias is the same for all tokens and independent of them. Where it is 0 both are as they were, bit for bit.
    """
    if isinstance(bias2, float) and bias2 == 0:
        return second, r
    total = second + bias2
    return plain(total), plain(np.where(np.asarray(bias2) > 0, 1 - second / np.maximum(total, 1e-300) * (1 - r), r))


def as_stream(moments: Moments, lead: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """Log variance, token correlation and mean of what enters a stack, with the leading axes of a sweep."""
    log_v = log(float(moments.variance))
    values = (log_v, float(moments.token_correlation), float(moments.mean))
    return tuple(np.full(lead, v) if lead else v for v in values)  # type: ignore[return-value]


def read_raw(a: Architecture, log_v: Array, r: Array, mean: Array) -> tuple[Array, Array, Array]:
    """What a branch reads without a norm: second moment, its correlation; and log of what it was divided by.

    A stream of extreme size is held at e^+-HELD, and the branch scaled: there the activations that can be reached are
    homogeneous of degree 1 or bounded (squared ReLU and gated blocks are not: their growth is a lower bound, and no
    double holds their streams anyway).
    """
    log_mean2 = log(mean**2)
    log_second = log_add(log_v, log_mean2)
    held = within(log_second, HELD)
    return plain(safe_exp(held)), _with_mean(log_second, log_mean2, r), log_second - held


def _with_mean(log_second: Array, log_mean2: Array, r: Array) -> Array:
    """Correlation of second moments: a mean is shared by all tokens."""
    share = exp(log_mean2 - log_second)
    return share + (1 - share) * r


def read_memory(p: Parametrization, log_v: Array, r: Array) -> tuple[tuple[Array, Array], Array]:
    """What a decoder reads of the encoder's last stream: second moment, correlation; and ln of what its norm divides
    by, over its gain."""
    a = p.architecture
    if not a.has_final_norm:  # of any size; held where products with other variances still fit a double
        return (safe_exp(within(log_v, LARGEST_MEMORY)), r), log_v * 0.0
    out, divisor = normed(log_v, log(float(a.norm_eps)))
    return (safe_exp(out) * p.head.final_norm_gain**2, r), divisor - log(p.head.final_norm_gain**2)

"""The linear response of gradients on their way back, and what token kernels know of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from signalprop.network.moments import FloatArray
from signalprop.results.series import Series
from signalprop.theory.signals import BranchBackward

_HELD = 50.0  # ln of a ratio that is still a double when it is squared


class WayBack(NamedTuple):
    """The linear response of the gradient, (sublayers, ...).

    Attributes:
        r: correlation of what arrives at a sublayer. v: variance of what it makes of 1. sent: the branch's share of it.
        through: derivative by what arrives, by_signal: by the stream that is read, z: by that and all above, by_sums:
            by the noise of sums, in (ln variance, correlation). to_state: as the function.
        noise, beyond: as of sums, of the gradient: all, and what is beyond averages.
    """

    r: FloatArray
    v: FloatArray
    sent: FloatArray
    through: FloatArray
    by_signal: FloatArray
    z: FloatArray
    by_sums: FloatArray
    to_state: FloatArray
    noise: FloatArray
    beyond: FloatArray


def recalibrate(
    through: FloatArray, r: FloatArray, gradient: Mapping[str, Series], maps: BranchBackward, skip: FloatArray
) -> None:
    """What averages over positions get wrong in a causal stack, from what its kernels say of the same step.

    There the gradient's variance and correlation become known numbers; the parts that come from the correlation
    are given the size that makes it so.
    """
    inner, outer = gradient["stream_in"], gradient["stream_out"]
    v = np.exp(np.clip(inner.log_variance - outer.log_variance, -_HELD, _HELD))
    r_in = inner.token_correlation
    by_v, by_c = maps.vc * r, maps.cc * r
    v_scale = np.where(by_v > 1e-9, np.clip((v - skip - maps.vv) / by_v, 0.0, 3.0), 1.0)
    c_scale = np.where(by_c > 1e-9, np.clip((r_in * v - skip * r - maps.cv) / by_c, 0.0, 3.0), 1.0)
    to_v, to_c = maps.vc * v_scale, skip + maps.cc * c_scale
    through[:, 0, 1] = to_v / v
    through[:, 1, 1] = (to_c - r_in * to_v) / v

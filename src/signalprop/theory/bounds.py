"""Laws of deep stacks: how near layers are to the identity, and how the stream and gradients can grow.

Distance of every layer's Jacobian from the identity at initialisation, for any Parametrization; the exponent of
variances over depth; the range that branches of given sizes leave to them. What
Sun et al. 2025, "The Curse of Depth in Large Language Models" (arXiv:2502.05795v1), print of all this, where it holds,
and measured accuracy: `docs/papers/curse-of-depth.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.network.layout import PLACEMENTS, layer_ends, layer_starts
from signalprop.network.moments import Array, FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.results.profile import Profile
from signalprop.theory.branches import Returned, returned
from signalprop.theory.log_arithmetic import NO_SIGNAL, log, log_add
from signalprop.theory.network import is_shaped
from signalprop.theory.signals import Rowset

PRE, POST = PLACEMENTS.index("pre"), PLACEMENTS.index("post")
__all__ = ["variance_range"]

_LARGEST = 1e60  # factor of one sublayer on a gradient's variance; a layer's three together still fit a double


# --- laws at initialisation ----------------------------------------------------------------------------------------


def identity_distances(parametrization: Parametrization, profile: Profile) -> FloatArray:
    """|J - I|_F / sqrt(n) of the Jacobian J of every layer over the whole sequence, (..., layers); encoder first.

    n = tokens x features; a root mean square over random networks, at the forward signal of a profile.

    A branch is random and of mean 0 at initialisation, so with the factors a of the skip path and b_v of what the
    branch turns a white gradient into, both after the layer's norms, |J - I|_F^2 / n = (1 - a)^2 + b_v. For pre-norm
    layers of few and small branches that is j_A / sigma^2 + j_F / sigma'^2. A post-norm also removes the stream's
    direction, one feature of d. Of trained weights it says what random ones of their size would do. With dropout: of
    the network in training mode. In a decoder after an encoder: with respect to the decoder's stream.

    Raises:
        InputError: attention is shaped or has ALiBi, kinds are drawn, or the profile is of another number of sublayers.
    """
    p = _as_run(parametrization, profile)
    back = returned(p, profile)
    places = _places(p)
    skip, noise = _layers(p, back, places)
    left = 1.0 - np.minimum(_removed(p, back, places) / p.architecture.d_model, 1.0)
    return np.asarray(np.sqrt((1 - left) + left * (1 - skip) ** 2 + noise[..., 0, 0]))


def _as_run(p: Parametrization, profile: Profile) -> Parametrization:
    """The parametrization at the sequence lengths of a profile."""
    if is_shaped(p):
        raise InputError(
            "distances from the identity and bounds need attention by scores alone; attention here is "
            f"{p.shaping.kind if p.shaping.kind != 'none' else 'ALiBi'}: measure its Jacobians instead"
        )
    if profile.n_sublayers != p.n_sublayers:
        raise InputError(
            f"the profile has {profile.n_sublayers} sublayers, the parametrization {p.n_sublayers}; "
            "give a profile of the same architecture"
        )
    lengths = {"seq_len": profile.architecture.seq_len, "target_len": profile.architecture.target_len}
    if all(getattr(p.architecture, name) == length for name, length in lengths.items()):
        return p
    return replace(p, architecture=p.architecture.replace(**lengths))


def _places(p: Parametrization) -> list[tuple[Rowset, Rowset]]:
    """(layers, their sublayers) at the first place within a layer, the second, the third."""
    starts = layer_starts(p)
    sizes = np.diff(starts, append=p.n_sublayers)
    return [(np.flatnonzero(sizes > k), starts[sizes > k] + k) for k in range(int(sizes.max()))]


def _layers(
    p: Parametrization, back: Returned, places: Sequence[tuple[Rowset, Rowset]]
) -> tuple[FloatArray, FloatArray]:
    """The map of whole layers on a gradient's (variance, token covariance): skip^2 times it, plus a 2 x 2 matrix.

    The two stay apart, since what branches send back can be small beside 1.
    """
    maps = np.moveaxis(np.array([[back.maps.vv, back.maps.vc], [back.maps.cv, back.maps.cc]]), (0, 1), (-2, -1))
    skip = np.ones((*p.skip.shape[:-1], len(places[0][0])))
    noise, held = (np.zeros((*skip.shape, 2, 2)) for _ in range(2))
    for layers, i in reversed(places):
        branch = np.clip(maps[..., i, :, :] + held[..., layers, :, :], -_LARGEST, _LARGEST)
        if p.parallel[i].all():  # reads the gradient of the sublayer before it
            held[..., layers, :, :] = branch
            continue
        skip2, after = np.minimum(back.skip[..., i] ** 2, _LARGEST), noise[..., layers, :, :]
        later = skip[..., layers] ** 2
        noise[..., layers, :, :] = skip2[..., None, None] * after + later[..., None, None] * branch + branch @ after
        skip[..., layers] *= np.sign(back.skip[..., i]) * np.sqrt(skip2)
    return skip, noise


def _removed(p: Parametrization, back: Returned, places: Sequence[tuple[Rowset, Rowset]]) -> FloatArray:
    """How many of the d features the post-norms of every layer take out of the skip path, or as good as.

    Each removes the direction of the sum before it. Two of one layer remove the same one as far as the later sum is
    the skip path. LayerNorm removes the mean as well, in all of them the same. The first layer of a stack reads
    embeddings whose sizes scatter by 1 / sqrt(2d), as does the factor of its skip path.
    """
    layer_norm = p.architecture.norm == "layernorm"
    removed = np.zeros((*p.skip.shape[:-1], len(places[0][0])))
    for place, (layers, i) in enumerate(places):
        share = back.skip_share[..., i]
        if place == 0:
            uneven = (p.layer[i] == 0) & (not p.architecture.embedding_norm)
            directions = 1.0 + layer_norm + 0.5 * uneven * share**2
        else:
            directions = 1.0 - share
        removed[..., layers] += (p.placement[i] == POST) * directions
    return removed


def growth_exponent(variances: ArrayLike) -> float:
    """p of variance ~ layer^p after layers 1, 2, ... of a stack: least squares of logarithms, deeper three quarters.

    The first quarter is left out since what the embedding holds bends the curve there. Fresh pre-norm stacks have 1,
    branches aligned with the stream 2; with LayerNorm Scaling about 0 and 1 (docs/papers/curse-of-depth.md).

    Raises:
        InputError: fewer than three, or one that is not positive.
    """
    y = np.asarray(variances, np.float64)
    if y.ndim != 1 or len(y) < 3 or not (y > 0).all() or not np.isfinite(y).all():
        raise InputError("a growth law needs the positive variances of three or more layers, one number each")
    deep = slice(len(y) // 4, None)
    return float(np.polyfit(np.log(np.arange(1.0, len(y) + 1))[deep], np.log(y[deep]), 1)[0])


# --- how far branches can move the stream's variance ---------------------------------------------------------------


@typed
def variance_range(parametrization: Parametrization, profile: Profile) -> tuple[FloatArray, FloatArray]:
    """ln of every layer's output variance, (lowest, highest), each (..., layers): if the profile's branches were
    uncorrelated with the stream, as at initialisation, and if they were parallel to it (no weights can do more).

    Args:
        parametrization: also of a live or trained model, by `sp.read_parametrization`.
        profile: predicted or measured.

    Raises:
        InputError: attention is shaped, another placement than pre-norm or post-norm, or the profile is of another
            number of sublayers.
    """
    low, high = sublayer_variance_range(parametrization, profile)
    last = layer_ends(parametrization)
    return low[..., last], high[..., last]


def sublayer_variance_range(parametrization: Parametrization, profile: Profile) -> tuple[FloatArray, FloatArray]:
    """As `variance_range`, after every sublayer: each (..., sublayers)."""
    p = _as_run(parametrization, profile)
    others = sorted({PLACEMENTS[k] for k in set(p.placement.tolist()) - {PRE, POST}})
    if others:
        raise InputError(f"variances have a range for norm placement pre or post; this network has {', '.join(others)}")
    return _extremes(p, profile)


def _extremes(p: Parametrization, profile: Profile) -> tuple[FloatArray, FloatArray]:
    """ln of every stream_out's variance, with uncorrelated branches and with aligned ones."""
    stream, after = profile.forward["stream_in"].log_variance, profile.forward["stream_out"].log_variance
    log_skip = log(np.where(p.parallel, 1.0, p.skip**2))
    log_branch = log(p.branch**2) + np.maximum(profile.forward["branch"].log_variance, NO_SIGNAL)
    low, high = np.empty(stream.shape), np.empty(stream.shape)
    least: Array
    most: Array
    for i in range(p.n_sublayers):
        if i == 0 or p.stack[i] != p.stack[i - 1]:
            least = most = np.maximum(stream[..., i], NO_SIGNAL)
        least = log_add(log_skip[..., i] + least, log_branch[..., i])
        most = 2 * log_add((log_skip[..., i] + most) / 2, log_branch[..., i] / 2)
        if p.placement[i] == POST:
            least = most = after[..., i]
        low[..., i], high[..., i] = least, most
    return low, high

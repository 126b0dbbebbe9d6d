"""The bands of a prediction: how far single networks of a given width lie from the mean that is predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np

from signalprop.network.kinds import drawn_rows, kinds_in
from signalprop.network.layout import PLACEMENTS
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.network.residual import NORM_AFTER, NORM_ON_BRANCH
from signalprop.results.profile import Profile
from signalprop.results.series import BANDS, Series
from signalprop.theory.branches import placed
from signalprop.theory.network import is_shaped
from signalprop.theory.scatter.response import Overlaps, Response

# Measured over 14 networks of 4 to 6 layers (initializer_range 0.05 and 0.1): granitemoe, kolibri1, minimax_m2, gemma3.
NOT_DERIVED = (
    "how single networks scatter is not derived for {}, nor what that adds to their mean: at widths of 64 to 128 first "
    "gradients were up to 1.3 times the prediction"
)


def with_scatter(p: Parametrization, profile: Profile, overlaps: Overlaps | None = None) -> Profile:
    """The profile with the standard deviations of one network of this width in its series.

    `variance_sd` is that of ln of the variance, `token_correlation_sd` absolute, of a network that reads one sequence;
    `variance_excess` is ln of the mean over networks of this width over the prediction, which is that of wide ones.
    Where they are not derived, a note says so and the series stay as they are; the gradient at branches' outputs has
    none. They are derived when one of them is first read, which takes as long as the prediction.

    Args:
        overlaps: of the kernels that the profile was predicted by; None: of its position averages.
    """
    reason = not_derived(p)
    if reason:
        return replace(profile, notes=(*profile.notes, NOT_DERIVED.format(reason)))

    @cache
    def derived() -> Profile:
        with np.errstate(all="ignore"):  # signals that vanish or explode: what is not finite is left out below
            return banded_profile(Response(p, profile, overlaps))

    def of(side: str, name: str) -> Callable[[], Series]:
        return lambda: getattr(derived(), side)[name]

    forward = {name: series.awaiting(of("forward", name)) for name, series in profile.forward.items()}
    gradient = profile.gradient and {name: x.awaiting(of("gradient", name)) for name, x in profile.gradient.items()}
    return replace(profile, forward=forward, gradient=gradient)


def banded_profile(x: Response) -> Profile:
    """The profile of a response with its bands."""
    spread, means, profile = x.spread(), x.means(), x.profile
    for name, covariance in spread.forward.items():
        means[name][:, 0] += covariance[:, 0, 0] / 2  # of the mean, not the mean of ln
    forward = {name: banded(profile.forward[name], spread.forward[name], mean.T) for name, mean in means.items()}
    if profile.gradient is None:
        return replace(profile, forward=forward)
    excess = x.mean_of_gradient(spread, means["stream_in"])[None]
    gradient = dict(profile.gradient)
    for name, rows in (("stream_in", slice(None, -1)), ("stream_out", slice(1, None))):
        gradient[name] = banded(gradient[name], spread.gradient[rows], excess[:, rows])
    return replace(profile, forward=forward, gradient=gradient)


def banded(series: Series, covariance: FloatArray, mean: FloatArray) -> Series:
    """The series with its bands; as it is, where one of them is not finite. From the covariance of (ln variance,
    correlation) over networks, (n, 2, 2), and their mean above the prediction, of the correlation where known, (k, n).
    """
    columns = *np.sqrt(np.maximum(np.diagonal(covariance, 0, 1, 2), 0.0)).T, *mean
    return replace(series, **dict(zip(BANDS, columns, strict=False))) if np.isfinite(columns).all() else series


def not_derived(p: Parametrization) -> str:
    """What the scatter is not derived for, in words; '' where it is."""
    kinds = {kind.name for kind in kinds_in(p)}
    on_branch = not NORM_ON_BRANCH.isdisjoint(PLACEMENTS[code] for code in p.placement.tolist())
    reasons = (
        (p.skip.ndim > 1, "sweeps"),
        (p.architecture.several_streams, "several residual streams"),
        (p.architecture.kind == "encoder-decoder", "encoder-decoders"),
        (bool(drawn_rows(p).any()), "sublayers that are drawn"),
        (bool(kinds - {"attention", "feed_forward"}), "other kinds of sublayers than attention and feed-forward"),
        (is_shaped(p), "shaped attention"),
        (bool(np.any(p.parallel)), "parallel branches"),
        (bool((p.norm_bias[placed(p, NORM_AFTER)] != 0).any()), "biases of norms after the sum"),
        (on_branch, "norms on a branch's output"),
        (bool((p.value_skip != 0).any()), "value skips"),
    )
    return next((words for found, words in reasons if found), "")

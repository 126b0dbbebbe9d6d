"""How many networks are drawn where sublayers have no closed form: until standard errors of their mean are small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from signalprop.results.profile import DRAWN, Profile, average

_FEWEST, _MOST = 4, 16
_WANTED = 0.01  # standard error over variances, and over correlations of .1 and more; median over sublayers


def mean_of_networks(predicted: Callable[[int], Profile]) -> Profile:
    """The mean of predictions by number of the network that is drawn, with standard errors in its series.

    Of 4 networks, or 8 or 16 where these leave a standard error above 1 %; the same numbers give the same draws.
    """
    profiles: list[Profile] = []
    while len(profiles) < _MOST:
        profiles += [predicted(number) for number in range(len(profiles), max(_FEWEST, 2 * len(profiles)))]
        mean = average(profiles)
        if standard_error(mean) <= _WANTED:
            break
    return replace(mean, n_seeds=None, statistics={**mean.statistics, DRAWN: len(profiles)})


def standard_error(profile: Profile) -> float:
    """The largest of the medians over sublayers of the relative standard errors of a mean over networks.

    Of variances and correlations (over .1 where these are smaller) where they leave, and where gradients come back.
    """
    series = [profile.forward["stream_out"]] + ([profile.gradient["stream_in"]] if profile.gradient else [])
    found = [0.0]
    for s in series:
        if s.variance_se is not None and s.token_correlation_se is not None:
            over = np.maximum(np.abs(s.token_correlation), 0.1)
            found += [float(np.median(s.variance_se)), float(np.median(s.token_correlation_se / over))]
    return max(found)

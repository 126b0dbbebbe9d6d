"""What holds of every prediction, whatever the network."""

from __future__ import annotations

import json
import math

import numpy as np

from signalprop.results.profile import Profile


def check_prediction(profile: Profile) -> None:
    """Variances >= 0, correlations within [-1, 1], no NaN; statistics of every layer; and JSON gives it back."""
    for series in (*profile.forward.values(), *(profile.gradient or {}).values()):
        assert np.isfinite(series.mean).all() and np.isfinite(series.log_variance).all()
        assert ((series.variance >= 0) & np.isfinite(series.variance)).all()
        assert (np.abs(series.token_correlation) <= 1).all()
    ratios = profile.sensitivity()
    assert 0 <= ratios["median"] < math.inf and 0 <= ratios["mean"] < math.inf
    assert profile.gradient is not None and profile.gradient["stream_out"].variance[-1] == 1.0
    assert Profile.from_json(json.loads(json.dumps(profile.to_json(), allow_nan=False))) == profile

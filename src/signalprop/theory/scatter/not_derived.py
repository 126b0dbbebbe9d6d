"""What the scatter of single networks (`theory/scatter/response.py`) is not derived for."""

from __future__ import annotations

import numpy as np

from signalprop.network.kinds import drawn_rows, kinds_in
from signalprop.network.layout import PLACEMENTS
from signalprop.network.parametrization import Parametrization
from signalprop.network.residual import NORM_AFTER, NORM_ON_BRANCH
from signalprop.theory.branches import placed
from signalprop.theory.network import is_shaped

# Measured over 14 networks of 4 to 6 layers (initializer_range 0.05 and 0.1): granitemoe, kolibri1, minimax_m2, gemma3.
NOT_DERIVED = (
    "how single networks scatter is not derived for {}, nor what that adds to their mean: at widths of 64 to 128 first "
    "gradients were up to 1.3 times the prediction"
)


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

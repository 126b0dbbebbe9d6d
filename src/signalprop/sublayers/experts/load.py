"""How unevenly random experts are loaded: by the pairs of tokens that choose the same ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from signalprop.kernels.grid import Grid
from signalprop.kernels.stack import Stack
from signalprop.kernels.state import State
from signalprop.kernels.tokens import Keep, See
from signalprop.network.kinds import kind_named
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.results.profile import Profile
from signalprop.sublayers.experts.kernel import ExpertsKernel
from signalprop.sublayers.experts.moments import ExpertsMoments
from signalprop.theory.branches import branches_of, met_by
from signalprop.theory.routing import load_variation


def expert_loads(p: Parametrization, profile: Profile) -> FloatArray:
    """Standard deviation of the experts' loads in a sequence over their mean, per layer; 0 without experts.

    Root mean square over networks. From the average pair of tokens.

    Args:
        p: what the profile is of.
    """
    branches, out = branches_of(p), np.zeros(p.architecture.n_layers_total)
    met, _ = met_by(p, branches, profile)
    for i in np.flatnonzero(kind_named("experts").of(p)).tolist():
        branch = branches[i]
        assert isinstance(branch, ExpertsMoments)
        out[_layer(p, i)] = branch.load_variation(i, (met.second[i], met.r_read[i]))
    return out


def _layer(p: Parametrization, i: int) -> int:
    """A sublayer's layer, the decoder's after the encoder's."""
    return int(p.layer[i]) + p.architecture.n_layers * bool(p.stack[i] != p.stack[0])


class ExpertLoads:
    """The same of every pair of tokens, seen on the way of token kernels: a `kernels.tokens.Watch`."""

    def __init__(self, p: Parametrization) -> None:
        self.p = p
        self.passes: list[FloatArray] = []

    def __call__(self, stack: Stack, counted: Sequence[Keep | Grid]) -> See:
        p, a, out = self.p, self.p.architecture, np.zeros(self.p.architecture.n_layers_total)
        self.passes.append(out)

        def see(i: int, stream: State) -> None:
            branch = stack.branches[i] if i < stack.n else None
            if isinstance(branch, ExpertsKernel):
                written = p.stack[i] != p.stack[0]
                keep = counted[int(written)]
                both = State(branch.shared_experts(i, stack.what_is_read(i, stream).kernel))
                log_one, alike = both.moments(keep)
                whole = (a.target_len or a.seq_len) if written else a.seq_len
                tokens = int(keep.sum()) if isinstance(keep, np.ndarray) else whole
                out[_layer(p, i)] = load_variation(branch.made.router, alike * math.exp(log_one), tokens)

        return see

    def variation(self) -> FloatArray:
        """Per layer, root mean square over sequences."""
        return np.asarray(np.sqrt(np.square(self.passes).mean(0)))

"""How unevenly random experts are loaded: by the pairs of tokens that choose the same ones."""

from __future__ import annotations

import math

import numpy as np

from signalprop.kernels.ends import input_kernel, sequences
from signalprop.kernels.grid import Grid
from signalprop.kernels.several import stack_of
from signalprop.kernels.state import State
from signalprop.kernels.tokens import passes
from signalprop.network.inputs import InputStatistics
from signalprop.network.kinds import kind_named
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.results.profile import Profile
from signalprop.sublayers.experts.kernel import ExpertsKernel
from signalprop.sublayers.experts.moments import ExpertsMoments
from signalprop.theory.branches import branches_of, met_by
from signalprop.theory.routing import load_variation


def expert_loads(p: Parametrization, inputs: InputStatistics, profile: Profile, grid: Grid | None = None) -> FloatArray:
    """Standard deviation of the experts' loads in a sequence over their mean, per layer; 0 without experts.

    Root mean square over networks and sequences. From the pairs of tokens in a profile of fidelity `kernel`, else from
    their average.

    Args:
        p, inputs: what the profile is of. grid: that it stands on.
    """
    n_layers = p.architecture.n_layers_total
    if profile.fidelity == "kernel":
        found = [_of_sequence(p, State(start).rescaled(), keep) for start, keep in _starts(p, inputs, grid)]
        return np.asarray(np.sqrt(np.square(found).mean(0)))
    branches, out = branches_of(p), np.zeros(n_layers)
    met, _ = met_by(p, branches, profile)
    for i in np.flatnonzero(kind_named("experts").of(p)).tolist():
        branch = branches[i]
        assert isinstance(branch, ExpertsMoments)
        layer = p.layer[i] + p.architecture.n_layers * (p.stack[i] != p.stack[0])
        out[layer] = branch.load_variation(i, (met.second[i], met.r_read[i]))
    return out


def _starts(p: Parametrization, inputs: InputStatistics, grid: Grid | None) -> list[tuple[FloatArray, object]]:
    rows = None if grid is None else 2 * len(grid.n)
    parts, _ = sequences(p.architecture, inputs)
    return [(input_kernel(p, part, rows), keep if grid is None else grid) for part, keep in parts]


def _of_sequence(p: Parametrization, start: State, keep: object) -> FloatArray:
    stack, out = stack_of(p, keep if isinstance(keep, Grid) else None), np.zeros(p.architecture.n_layers_total)
    counted = keep if isinstance(keep, (Grid, np.ndarray)) else None
    tokens = int(counted.sum()) if isinstance(counted, np.ndarray) else p.architecture.seq_len

    def see(i: int, stream: State) -> None:
        branch = stack.branches[i] if i < stack.n else None
        if isinstance(branch, ExpertsKernel):
            both = State(branch.shared_experts(i, stack.what_is_read(i, stream).kernel))
            log_one, alike = both.moments(counted)
            out[p.layer[i]] = load_variation(branch.made.router, alike * math.exp(log_one), tokens)

    passes(stack, start, None, counted, see)
    return out

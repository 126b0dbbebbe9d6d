"""How unevenly random experts are loaded: by the pairs of tokens that choose the same ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from signalprop.kernels.passes import Keep, Record
from signalprop.kernels.position_grid import Grid
from signalprop.kernels.scaled_kernel import State
from signalprop.kernels.stack import OnNodes, Stack
from signalprop.network.kinds import kind_named
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.results.profile import Profile
from signalprop.sublayers.experts.signal import Experts
from signalprop.theory.branches import OneNode, branches_of, forward_state_of, signal_of
from signalprop.theory.routing import load_variation
from signalprop.theory.signals import Signal


def expert_loads(p: Parametrization, profile: Profile) -> FloatArray:
    """Standard deviation of the experts' loads in a sequence over their mean, per layer; 0 without experts.

    Root mean square over networks. From the average pair of tokens.

    Args:
        p: what the profile is of.
    """
    branches, out = branches_of(p), np.zeros(p.architecture.n_layers_total)
    state, _ = forward_state_of(p, branches, profile)
    for i in np.flatnonzero(kind_named("experts").of(p)).tolist():
        branch = branches[i]
        assert isinstance(branch, OneNode) and isinstance(branch.kind, Experts)
        out[_layer(p, i)] = branch.kind.load_variation(i, signal_of((float(state.second[i]), float(state.r_read[i]))))
    return out


def _layer(p: Parametrization, i: int) -> int:
    """A sublayer's layer, the decoder's after the encoder's."""
    return int(p.layer[i]) + p.architecture.n_layers * bool(p.stack[i] != p.stack[0])


class ExpertLoads:
    """The same of every pair of tokens, seen on the way of token kernels: a `kernels.predicting.Watch`."""

    def __init__(self, p: Parametrization) -> None:
        self.p = p
        self.passes: list[FloatArray] = []

    def __call__(self, stack: Stack, counted: Sequence[Keep | Grid]) -> Record:
        p, a, out = self.p, self.p.architecture, np.zeros(self.p.architecture.n_layers_total)
        self.passes.append(out)

        def record(i: int, stream: State) -> None:
            branch = stack.branches[i] if i < stack.n else None
            if isinstance(branch, OnNodes) and isinstance(branch.kind, Experts):
                written = p.stack[i] != p.stack[0]
                keep = counted[int(written)]
                read = branch.nodes.signal(stack.what_is_read(i, stream).kernel)
                one, two = branch.kind.routed(i, read)
                shared = Signal(np.broadcast_to(one.shared, np.shape(read.per_token)), np.asarray(two.shared))
                both = State(branch.nodes.matrix(shared))
                log_one, r = both.moments(keep)
                whole = (a.target_len or a.seq_len) if written else a.seq_len
                tokens = int(keep.sum()) if isinstance(keep, np.ndarray) else whole
                out[_layer(p, i)] = load_variation(branch.kind.router, r * math.exp(log_one), tokens)

        return record

    def variation(self) -> FloatArray:
        """Per layer, root mean square over sequences."""
        return np.asarray(np.sqrt(np.square(self.passes).mean(0)))

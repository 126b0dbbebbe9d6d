"""The branches of a table, all at once: their outputs, and how gradients come back through them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from signalprop.errors import InputError
from signalprop.network.kinds import kind_of
from signalprop.network.layout import stacks_of
from signalprop.network.moments import Array, FloatArray
from signalprop.network.parametrization import PLACEMENTS, Parametrization
from signalprop.network.residual import NORM_AFTER, NORM_BEFORE, NORM_ON_BRANCH
from signalprop.results.profile import Profile
from signalprop.theory.branch_inputs import check_norms_divide, read_memory, read_normed, read_raw, with_bias
from signalprop.theory.log_arithmetic import NO_SIGNAL, correlation, log, row, safe_exp
from signalprop.theory.signals import (
    BranchBackward,
    Pair,
    Rows,
    Rowset,
    SentMaps,
    Signal,
    Sublayers,
    dropped,
)


def placed(p: Parametrization, where: frozenset[str]) -> Any:
    """Which sublayers have a placement of a set, as `signalprop.network.residual` names them, (sublayers,)."""
    return np.isin(p.placement, [PLACEMENTS.index(name) for name in PLACEMENTS if name in where])


@dataclass(frozen=True)
class OneNode:
    """A kind's sublayers in one stack on one node, with dropout; what they read as second moment and correlation."""

    kind: Sublayers
    dropout: float

    def forward(self, i: Rows, read: Pair, memory: Pair | None = None) -> Signal:
        output = self.kind.forward(i, signal_of(read), None if memory is None else signal_of(memory))
        return dropped(output, self.dropout)

    def backward(self, i: Rowset, read: Pair, memory: Pair | None = None) -> SentMaps:
        """By the gradients of two tokens that share nothing, and all."""
        x, across = signal_of(read), None if memory is None else signal_of(memory)
        one = np.ones_like(np.asarray(x.per_token))
        sent = self.kind.backward(i, x, Signal(np.stack([one, one]), np.stack([0 * one, one])), across)
        return SentMaps(*(None if g is None else self._maps(g) for g in sent))  # type: ignore[arg-type]

    def _maps(self, g: Signal) -> BranchBackward:
        (vv, v), (cv, c) = np.asarray(g.per_token), np.asarray(g.shared)
        rescaling = 1 / (1 - self.dropout)
        return BranchBackward(vv * rescaling, v - vv, cv * rescaling, c - cv)


def signal_of(read: Pair) -> Signal:
    """Of a second moment and a correlation."""
    if isinstance(read[0], float) and isinstance(read[1], float):
        return Signal(read[0], read[0] * read[1])
    return Signal(*np.broadcast_arrays(np.asarray(read[0], float), read[0] * read[1]))


def branches_of(p: Parametrization) -> list[OneNode]:
    """The branch of every sublayer: one object per kind and stack.

    Raises:
        InputError: as `check_norms_divide`.
    """
    check_norms_divide(p.architecture)
    out: list[OneNode] = []
    output: dict[tuple[int, int], OneNode] = {}
    for i, key in enumerate(zip(p.stack.tolist(), p.kind.tolist(), strict=True)):
        if key not in output:
            output[key] = OneNode(kind_of(p, i).part("signal").of(p, key[0]), p.architecture.dropout)
        out.append(output[key])
    return out


@dataclass(frozen=True)
class ForwardState:
    """The forward values at branches and norms that their backward maps need; arrays (..., sublayers).

    Attributes: as of `Ahead`.
    """

    second: FloatArray
    r_read: FloatArray
    norm: FloatArray
    raw_branch: FloatArray
    memory: tuple[Array, Array] | None


def from_the_sum(p: Parametrization, f: ForwardState, maps: BranchBackward) -> BranchBackward:
    """Maps of whole branches, from the gradient at the sum to the stream: multiplier and norms included."""
    norm_gain = log(p.norm_output**2) - f.norm
    inner = log(p.branch**2) + np.where(placed(p, NORM_BEFORE), norm_gain, 0.0)
    scale = safe_exp(inner + log_on_branch(p, f))
    return BranchBackward(*(scale * column for column in maps))


def log_on_branch(p: Parametrization, f: ForwardState) -> FloatArray:
    """Log of what a norm on the branch multiplies gradients by, (..., sublayers); 0 without one."""
    sandwich = p.placement == PLACEMENTS.index("sandwich")
    gain = log(np.where(sandwich, p.post_norm_gain, p.norm_output) ** 2)
    divisor = np.logaddexp(f.raw_branch, log(float(p.architecture.norm_eps)))
    return np.asarray(np.where(placed(p, NORM_ON_BRANCH), gain - divisor, 0.0))


def backward_maps(
    p: Parametrization, branches: list[OneNode], f: ForwardState
) -> tuple[BranchBackward, BranchBackward | None]:
    """Backward maps of all sublayers, (..., n); and to the encoder's output, or to what the first attention reads.

    The latter is None where nothing goes there.
    """
    shape = p.skip.shape
    maps = BranchBackward(*(np.zeros(shape) for _ in range(4)))
    to_memory: BranchBackward | None = None
    for branch, where in _groups(branches):
        second, r = f.second[..., where], f.r_read[..., where]
        sent = branch.backward(where, (second, r), _spread(f.memory, second))
        for column, value in zip(maps, sent.stream, strict=True):
            column[..., where] = value
        if sent.memory is not None:
            to_memory = to_memory or BranchBackward(*(np.zeros(shape) for _ in range(4)))
            for column, value in zip(to_memory, sent.memory, strict=True):
                column[..., where] = value
    return maps, to_memory


def _groups(branches: list[OneNode]) -> list[tuple[OneNode, Rowset]]:
    """Every object once, with its rows."""
    identity = np.fromiter(map(id, branches), np.int64, len(branches))
    first = np.sort(np.unique(identity, return_index=True)[1]).tolist()
    return [(branches[i], np.flatnonzero(identity == identity[i])) for i in first]


def _spread(memory: tuple[Array, Array] | None, like: FloatArray) -> tuple[FloatArray, FloatArray] | None:
    """One memory for many sublayers."""
    if memory is None:
        return None
    second, r = (np.broadcast_to(np.asarray(m)[..., None], like.shape) for m in memory)
    return second, r


class Returned(NamedTuple):
    """How gradients come back through every sublayer, arrays (..., sublayers).

    Attributes:
        maps: from the gradient at the sublayer's output to what its branch sends to the stream that it reads.
        skip: the factor on the gradient along the skip path; a norm after the sum is in both.
        skip_share: of the skip path in the variance of the sum.
    """

    maps: BranchBackward
    skip: FloatArray
    skip_share: FloatArray


def returned(parametrization: Parametrization, profile: Profile) -> Returned:
    """The backward pass of every sublayer at the forward signal of a profile, predicted or measured."""
    p = parametrization
    branches = branches_of(p)
    f = forward_state_of(p, branches, profile)[0]
    maps = from_the_sum(p, f, backward_maps(p, branches, f)[0])
    skip = np.where(p.parallel, 1.0, p.skip)  # a parallel layer has the skip of its first row
    log_skip = log(skip**2) + np.maximum(profile.forward["stream_in"].log_variance, NO_SIGNAL)
    log_branch = log(p.branch**2) + np.maximum(profile.forward["branch"].log_variance, NO_SIGNAL)
    log_sum = np.logaddexp(log_skip, log_branch)
    norm = np.logaddexp(log_sum, log(float(p.architecture.norm_eps)))
    after = safe_exp(np.where(placed(p, NORM_AFTER), log(p.norm_output**2) - norm, 0.0))
    return Returned(
        maps=BranchBackward(*(after * column for column in maps)),
        skip=np.sqrt(after) * skip,
        skip_share=np.exp(log_skip - log_sum),
    )


def forward_state_of(
    p: Parametrization, branches: list[OneNode], profile: Profile
) -> tuple[ForwardState, tuple[FloatArray, FloatArray]]:
    """The forward values of a profile at branches and norms (norms after the sum apart), and the branches' outputs.

    That is the log variance before a norm on it, and the token correlation.
    """
    a = p.architecture
    if a.several_streams:
        raise InputError("this is derived for one residual stream; leave them out, or take predict or simulate")
    stream, after = profile.forward["stream_in"], profile.forward["stream_out"]
    log_v = np.maximum(stream.log_variance, NO_SIGNAL)
    second, r_read, norm, raw, output_r = (np.zeros(log_v.shape) for _ in range(5))
    memory = None
    if a.kind == "encoder-decoder":
        last = next(stacks_of(p))[1][-1]
        memory, _ = read_memory(p, after.log_variance[..., last], after.token_correlation[..., last])
    for branch, members in _groups(branches):
        for placement in sorted(set(p.placement[members].tolist())):
            i = members[p.placement[members] == placement]
            name = PLACEMENTS[placement]
            given = log_v[..., i], stream.token_correlation[..., i], stream.mean[..., i]
            beyond: Array = 0.0
            if name in NORM_BEFORE:
                numbers = row(p.norm_output, i) ** 2, log(float(a.norm_eps))
                second[..., i], r_read[..., i], norm[..., i] = read_normed(a, *numbers, *given)
                second[..., i], r_read[..., i] = with_bias(second[..., i], r_read[..., i], row(p.norm_shift, i))
            else:
                second[..., i], r_read[..., i], beyond = read_raw(a, *given)
            read = second[..., i], r_read[..., i]
            output = branch.forward(i, read, _spread(memory, read[0]))
            per_token, shared = map(np.asarray, output)
            raw[..., i] = log(per_token) + beyond
            output_r[..., i] = correlation(shared, per_token)
    return ForwardState(second=second, r_read=r_read, norm=norm, raw_branch=raw, memory=memory), (raw, output_r)

"""Fidelity `kernel`: the token kernel K_ij = E x_i . x_j / d_model through every sublayer, and back.

Where positions differ, averages over them do not compound rightly: in a decoder an early token is read by every later
one, so gradients pile up on it with every layer; a class token carries the whole gradient. Exact statistics of real
token ids enter position by position and sequence by sequence: what two positions share is equal tokens, all or
nothing, and a non-linear function of an average over sequences is not the average of the function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from signalprop.errors import InputError
from signalprop.files.limits import check_fits
from signalprop.kernels.ends import input_kernel, sequences, top_kernel
from signalprop.kernels.grid import Grid
from signalprop.kernels.stack import Back, Stack
from signalprop.kernels.state import State, exp_of, inverse_roots
from signalprop.network.inputs import InputStatistics
from signalprop.network.layout import layer_starts
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.network.residual import back_through
from signalprop.results.profile import POINTS, Profile, Series
from signalprop.theory.elements import squashed
from signalprop.theory.network import sensitivity_gain, token_share
from signalprop.theory.scatter import Overlaps, with_scatter

# Called with a sublayer's index and the stream that it reads, or the gradient there; and with the number of sublayers
# and what leaves the stack.
See = Callable[[int, State], None]
# (the last stream, ln of the share of its variance that a token's own embedding still has) -> as `ends.top_kernel`
Top = Callable[[State, float], tuple[FloatArray, FloatArray]]


_MATRICES = 35  # of tokens x tokens that are held at once, at least: 35 for 4 layers, 64 for 32


def _unseen(_: int, __: State) -> None:
    pass


@dataclass
class Columns:
    """Moments of one sequence, or of several, collected sublayer by sublayer.

    Attributes:
        overlap: as of `scatter.Overlaps`, (sublayers, 2).
        keep: which positions count, None: all; or the grid that kernels stand on.
    """

    log_variance: dict[str, FloatArray]
    correlation: dict[str, FloatArray]
    overlap: FloatArray
    keep: NDArray[np.bool_] | Grid | None = None

    @staticmethod
    def empty(n: int, keep: NDArray[np.bool_] | Grid | None = None) -> Columns:
        return Columns({k: np.zeros(n) for k in POINTS}, {k: np.zeros(n) for k in POINTS}, np.zeros((n, 2)), keep)

    @staticmethod
    def pooled(parts: Sequence[Columns], counts: FloatArray) -> Columns:
        """Moments over all sequences, as measured: variances average over tokens, covariances over pairs of tokens.

        Args:
            counts: number of tokens of every sequence.
        """
        if len(parts) == 1:
            return parts[0]
        tokens = counts / counts.sum()
        pairs = counts * (counts - 1) / max(float((counts * (counts - 1)).sum()), 1.0)
        log_variance, correlation = {}, {}
        for k in POINTS:
            logs = np.stack([part.log_variance[k] for part in parts])
            top = logs.max(0)
            variances = np.exp(np.maximum(logs - top, -745.0))
            variance = tokens @ variances
            shared = pairs @ (variances * np.stack([part.correlation[k] for part in parts]))
            log_variance[k], correlation[k] = top + np.log(variance), np.clip(shared / variance, -1.0, 1.0)
        return Columns(log_variance, correlation, np.asarray(np.tensordot(tokens, [part.overlap for part in parts], 1)))

    def meet(self, i: int, kept: State, added: State) -> None:
        """Keep how alike two addends of a sum are."""
        self.overlap[i] = kept.overlap(added, self.keep), added.overlap(added, self.keep)

    def put(self, point: str, i: int, state: State) -> None:
        self.log_variance[point][i], self.correlation[point][i] = state.moments(self.keep)

    def series(self, relative_to: float = 0.0) -> dict[str, Series]:
        return {
            k: Series.of(log_variance=self.log_variance[k] - relative_to, token_correlation=self.correlation[k])
            for k in POINTS
        }


def predict_token_kernels(
    parametrization: Parametrization, inputs: InputStatistics, *, backward: bool = True, grid: Grid | None = None
) -> Profile:
    """Profile of an encoder or decoder by token kernels: averages over positions of what each position does.

    Real ids: every sequence by itself, moments over all of them (as measured); of more than 4 sequences (2 beyond 512
    tokens) as many as stand evenly spaced in the order of their token correlation, which the notes say. O(T^2) work per
    sublayer and sequence and O(T^2 sqrt(n_sublayers)) memory (segments of the forward pass are computed again for the
    backward one). Measured errors: docs/accuracy.md, and of the choice of sequences docs/theory/kernels.md.

    Args:
        grid: of `grid_for`: only these positions are followed, for statistics without real ids.

    Raises:
        InputError: the architecture is an encoder-decoder, or the parametrization is a sweep.
    """
    p, a = parametrization, parametrization.architecture
    check_covered(p, None if grid is None else 2 * len(grid.n))
    stack = Stack(p, grid=grid)
    parts, note = sequences(a, inputs)
    if grid is not None:
        note = f"{len(grid.n)} of {a.seq_len:,} positions, interpolated in between; fidelity kernel follows all of them"
    passed = []
    for part, keep in parts:
        top = partial(top_kernel, p, part) if backward else None
        start = input_kernel(p, part, None if grid is None else 2 * len(grid.n))
        passed.append(passes(stack, State(start).rescaled(), top, keep if grid is None else grid))
    counts = [a.seq_len if keep is None else int(keep.sum()) for _, keep in parts]
    return profile_of(p, passed, counts, note)


def check_covered(parametrization: Parametrization, rows: int | None = None) -> None:
    """Refuse what token kernels do not cover, and what cannot fit into memory.

    Raises:
        InputError: the architecture is an encoder-decoder, the parametrization is a sweep, or it has too many tokens.
    """
    tokens = parametrization.architecture.seq_len
    check_fits(
        8 * _MATRICES * (rows or tokens) ** 2,
        f"a token kernel of {tokens:,} tokens",
        "take fewer tokens (seq_len), or fidelity moments",
    )
    if parametrization.architecture.kind == "encoder-decoder":
        raise InputError(
            "fidelity 'kernel' covers encoders and decoders; use moments or simulate for an encoder-decoder"
        )
    if parametrization.skip.ndim != 1:
        raise InputError("fidelity 'kernel' takes one parametrization at a time; use moments for a sweep")


def profile_of(
    parametrization: Parametrization,
    passed: Sequence[tuple[Columns, Columns | None]],
    counts: Sequence[int],
    note: str = "",
) -> Profile:
    """The Profile of what `passes` found for one sequence or several of so many tokens each."""
    tokens = np.array(counts, np.float64)
    ahead = Columns.pooled([ahead for ahead, _ in passed], tokens)
    forward = ahead.series()
    gradient, back_overlap = None, None
    backs = [back for _, back in passed if back is not None]
    if backs:
        columns = Columns.pooled(backs, tokens)
        gradient = columns.series(relative_to=float(columns.log_variance["stream_out"][-1]))
        back_overlap = columns.overlap
    profile = Profile(
        source="theory",
        fidelity="kernel",
        architecture=parametrization.architecture,
        scheme=parametrization.scheme,
        input={
            "mean": 0.0,
            "variance": float(forward["stream_in"].variance[0]),
            "token_correlation": float(forward["stream_in"].token_correlation[0]),
        },
        forward=forward,
        gradient=gradient,
        statistics=sensitivity_gain(parametrization),
        notes=(note,) if note else (),
    )
    return with_scatter(parametrization, profile, Overlaps(ahead.overlap, back_overlap))


def passes(
    stack: Stack,
    start: State,
    top: Top | None,
    keep: NDArray[np.bool_] | Grid | None = None,
    see: See = _unseen,
    see_back: See = _unseen,
) -> tuple[Columns, Columns | None]:
    """Forward and backward moments of one token kernel.

    Args:
        start: what enters the first sublayer.
        top: gradient kernels at the head's input, given the last stream; None: no backward pass.
        keep: which positions count, None: all; or the grid that kernels stand on.
        see, see_back: called with every stream, and with every gradient (on its way back).
    """
    p, n = stack.p, stack.n
    starts = layer_starts(p)
    kept = set(starts[:: max(1, math.isqrt(len(starts)))].tolist())
    checkpoints: dict[int, State] = {}
    reads: dict[int, State] = {}  # of all sublayers, where they are small
    columns, log_norm = Columns.empty(n, keep), np.zeros(n)

    def seen(i: int, layer_in: State, branch: State, stream_out: State) -> None:
        if not stack.parallel[i]:
            see(i, layer_in)
        if i in kept:
            checkpoints[i] = layer_in
        if isinstance(keep, Grid):
            reads[i] = layer_in
        columns.put("stream_in", i, layer_in)
        columns.put("branch", i, branch)
        columns.put("stream_out", i, stream_out)
        columns.meet(i, layer_in, branch)
        if i in stack.own:
            log_norm[i] = math.log(max(float(stack.own.pop(i).mean()), 1e-300))

    last = stack.run(start, range(n), seen)
    see(n, last)
    if top is None:
        return columns, None
    gradient = top(last, float(token_share(p, log_norm)))
    return columns, _backward(stack, gradient, checkpoints, reads, last, keep, see_back)


def _backward(
    stack: Stack,
    top: tuple[FloatArray, FloatArray],
    checkpoints: dict[int, State],
    reads: dict[int, State],
    last: State,
    keep: NDArray[np.bool_] | Grid | None,
    see: See,
) -> Columns:
    a, n = stack.a, stack.n
    kernel, across = top
    if a.has_final_norm and a.squash:  # what two tokens share of it is in the kernel already
        own = np.diagonal(last.kernel) * exp_of(last.log_scale)
        root = np.sqrt(squashed(a.squash, stack.p.head.final_norm_slope, own, np.zeros_like(own))[2])
        kernel = across = kernel * root * root[:, None]
    elif a.has_final_norm:
        root = inverse_roots(np.diagonal(last.kernel) + a.norm_eps * exp_of(-last.log_scale))
        kernel = across = kernel * root * root[:, None]
    gradient = State(kernel).rescaled()
    columns = Columns.empty(n, keep)
    see(n, gradient)

    def seen(point: str, i: int, gradient: State) -> None:
        columns.put(point, i, gradient)
        if point == "stream_in" and not stack.parallel[i]:
            see(i, gradient)

    borders = [*sorted(checkpoints), n]
    for first, end in reversed(list(pairwise(borders))):
        back = Back(stack, across, columns.meet)

        def read(i: int, layer_in: State, *_: State, back: Back = back) -> None:
            back.reads[i] = layer_in

        if reads:
            back.reads = reads
        else:
            stack.run(checkpoints[first], range(first, end), read)
        gradient = back_through(
            range(first, end), stack.parallel, back.sublayer, back.together, lambda share: share, gradient, seen
        )
    return columns

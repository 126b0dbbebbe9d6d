"""The way forward through a stack and the way back: what is stored of them, and what is computed again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from signalprop.kernels.embedding_and_loss import through_final_norm
from signalprop.kernels.layer_moments import Columns
from signalprop.kernels.position_grid import Grid
from signalprop.kernels.scaled_kernel import State
from signalprop.kernels.stack import Stack
from signalprop.kernels.streams.stack import Kernels, back_of
from signalprop.kernels.tied_head import Along, along_of
from signalprop.network.inputs import InputStatistics
from signalprop.network.layout import layer_starts, stacks_of
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.network.residual import back_through

# Called with a sublayer's index and the stream that it reads, or the gradient there; and with the number of sublayers
# and what leaves the stack.
Record = Callable[[int, State], None]
# (the last stream, ln of the share of its variance that a token's embedding still has) -> as `ends.top_kernel`
Top = Callable[[State, float], tuple[FloatArray, FloatArray]]
Keep = NDArray[np.bool_] | None

_STORED_LENGTH = 640  # tokens up to which a segment's attentions are stored for the way back: 3 MiB a matrix
_ALL_STORED = 512 * 2**20  # bytes up to which all are, and no segment is computed again
_EACH = 6  # matrices of a sublayer that are stored, on average: 11 of attention, one of a feed-forward


def unseen(_: int, __: State) -> None:
    pass


def passes(
    stack: Stack,
    start: State,
    top: Top | None,
    keep: NDArray[np.bool_] | Grid | None = None,
    record: Record = unseen,
    see_back: Record = unseen,
    inputs: InputStatistics | None = None,
    bands: bool = True,
) -> tuple[Columns, Columns | None]:
    """Forward and backward moments of one token kernel.

    Args:
        start: what enters the first sublayer.
        top: gradient kernels at the head's input, given the last stream; None: no backward pass.
        keep: which positions count, None: all; or the grid of the kernels.
        record, see_back: called with every stream, and with every gradient (on its way back).
        inputs: of the loss that `top` is of; None: of another gradient. bands: whether overlaps are stored.
    """
    columns, log_norm = Columns.empty(stack.n, keep, bands), np.zeros(stack.n)
    entering = stack.enter(start)
    ahead = Ahead(stack, columns, log_norm, record, top is not None and _all_count(stack, entering))
    last = ahead.run(entering, range(stack.n))
    record(stack.n, last)
    if top is None:
        return columns, None
    gradient, across = _at_last(ahead, last, top, inputs)
    back = Columns.empty(stack.n, keep, bands)
    see_back(stack.n, gradient)
    backward(ahead, gradient, across, back, see_back)
    return columns, back


def _all_count(stack: Stack, start: State) -> bool:
    """Whether the way back has every stream and attention of the way forward, so that nothing is computed again."""
    return isinstance(start, State) and _stored(stack.n, start.kernel.nbytes) <= _ALL_STORED


def _stored(sublayers: int, kernel: int) -> int:
    """Bytes of all that the way back has of the way forward then, by those of one kernel."""
    return _EACH * sublayers * kernel


@dataclass
class Ahead:
    """The way forward through one stack, and what the way back needs of it.

    Attributes:
        columns, log_norm: where its rows' moments, and logs of what its post-norms divide by, are put.
        all_count: as `_all_count`. along: of the gradient on its way back, where a tied head favours tokens.
        checkpoints: some of the streams; reads: all of them, where they are stored.
    """

    stack: Stack
    columns: Columns
    log_norm: FloatArray
    record: Record = unseen
    all_count: bool = False
    along: Along | None = None
    rows: range = range(0)
    checkpoints: dict[int, State] = field(default_factory=dict)
    reads: dict[int, State] = field(default_factory=dict)

    def run(self, start: State, rows: range) -> State:
        """The last stream."""
        self.rows = rows
        starts = [i for i in layer_starts(self.stack.p).tolist() if i in rows]
        self.segment_starts = set(starts[:: max(1, math.isqrt(len(starts)))])
        self.stack.cache_attention(self.all_count)
        last = self.stack.run(start, rows, self.record_sublayer)
        self.stack.cache_attention(False)
        return last

    def record_sublayer(self, i: int, layer_in: State, branch: State, stream_out: State) -> None:
        """Keep what is needed of a sublayer."""
        if not self.stack.parallel[i]:
            self.record(i, layer_in)
        if i in self.segment_starts:
            self.checkpoints[i] = layer_in
        if self.all_count:
            self.reads[i] = layer_in
        for point, state in (("stream_in", layer_in), ("branch", branch), ("stream_out", stream_out)):
            self.columns.put(point, i, state)
        streams: Any = stream_out
        if isinstance(streams, Kernels) and self.stack.a.streams is not None:
            self.columns.between.append(streams.between(self.columns.keep))
        self.columns.add_overlap(i, layer_in, branch)
        if i in self.stack.sum_divisors:
            divisors, keep = self.stack.sum_divisors[i], self.columns.keep
            if isinstance(keep, Grid):
                mean = divisors[..., : len(keep.n)] @ keep.weights / keep.tokens
            else:
                mean = divisors.mean()
            self.log_norm[i] = np.log(np.maximum(mean, 1e-300))


def _at_last(ahead: Ahead, last: State, top: Top, inputs: InputStatistics | None) -> tuple[State, State]:
    """The gradient at the last stream, and what a post-norm there sends back."""
    stack = ahead.stack
    last = stack.leave(last)
    log_share = stack.log_token_share(ahead.log_norm)
    kernel, across = top(last, log_share)
    if inputs is not None and not isinstance(ahead.columns.keep, Grid):
        ahead.along = along_of(stack, inputs, last, log_share)
    gradient = through_final_norm(stack.p, last, kernel)
    return stack.back(gradient), gradient if stack.a.has_final_norm else State(across)


def backward(ahead: Ahead, gradient: State, across: State, columns: Columns, record: Record = unseen) -> list[State]:
    """Puts the gradient's moments into `columns`; gives what was sent to an encoder's output.

    Args:
        gradient: at the last stream. across: what a post-norm there sends back.
    """
    stack, memory = ahead.stack, list[State]()

    def record_gradient(point: str, i: int, gradient: State) -> None:
        columns.put(point, i, gradient)
        if point == "stream_in" and not stack.parallel[i]:
            record(i, gradient)

    borders = [*sorted(ahead.checkpoints), ahead.rows.stop]
    for first, end in reversed(list(pairwise(borders))):
        back = back_of(stack, across, columns.add_overlap)
        back.along = ahead.along
        if ahead.reads:
            back.reads = ahead.reads
        else:
            stack.cache_attention(len(gradient.kernel) <= _STORED_LENGTH)
            stack.run(ahead.checkpoints[first], range(first, end), back.keep)
            stack.cache_attention(False)
        rows, between = range(first, end), back.entering_back if stack.a.layer_inputs else None
        gradient = back_through(
            rows, stack.parallel, back.sublayer, back.together, lambda share: share, gradient, record_gradient, between
        )
        memory += back.memory
    return memory


def passes_of_both(
    stack: Stack,
    starts: tuple[State, State],
    top: Top | None,
    counted: tuple[Keep | Grid, Keep | Grid] = (None, None),
    record: Record = unseen,
    inputs: InputStatistics | None = None,
    bands: bool = True,
) -> tuple[Columns, Columns | None]:
    """`passes` of an encoder-decoder: the encoder, then the decoder whose cross-attentions read it.

    Args:
        starts, counted: of encoder and decoder. record: called with every stream that a sublayer reads.
        inputs, bands: as of `passes`, of the decoder.
    """
    p, n = stack.p, stack.n
    columns, log_norm = Columns.empty(n, bands=bands), np.zeros(n)
    (_, encoder), (_, decoder) = stacks_of(p)
    every = top is not None and _all_count(stack, max(starts, key=lambda start: start.kernel.size))
    first, second = (Ahead(stack, replace(columns, keep=keep), log_norm, record, every) for keep in counted)
    read = first.run(starts[0], encoder)
    memory = stack.read_memory(read)
    encoder_grid, keep = (counted[0], None) if isinstance(counted[0], Grid) else (None, counted[0])
    stack.remember(memory if keep is None else memory[np.ix_(keep, keep)], encoder_grid)
    last = second.run(starts[1], decoder)
    if top is None:
        return columns, None
    gradient, across = _at_last(second, last, top, inputs)
    back = Columns.empty(n, bands=bands)
    sent = backward(second, gradient, across, replace(back, keep=counted[1]))
    total = sent[0]
    for one in sent[1:]:
        total = total.plus(one)
    arrived = total.kernel
    if second.along is not None:
        arrived = arrived + second.along.at_memory(memory if keep is None else memory[np.ix_(keep, keep)], total)
        first.along = second.along.of_encoder(read) if keep is None else None
    if keep is not None:
        whole = np.zeros_like(memory)
        whole[np.ix_(keep, keep)], arrived = arrived, whole
    at_last = through_final_norm(stack.p, read, arrived)
    log_scale = at_last.log_scale + total.log_scale
    if stack.a.has_final_norm:
        log_scale += math.log(max(p.head.final_norm_gain**2, 1e-300))
    at_last = State(at_last.kernel, log_scale)
    backward(first, at_last, at_last, replace(back, keep=counted[0]))
    return columns, back


def most_together(p: Parametrization, grid: Grid) -> int:
    """How many fit into the memory that is allowed."""
    return int(_ALL_STORED // _stored(p.n_sublayers, 8 * (2 * len(grid.n)) ** 2))

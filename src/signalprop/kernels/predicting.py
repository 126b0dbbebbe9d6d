"""Fidelity `kernel`: the token kernel K_ij = E x_i . x_j / d_model through every sublayer, and back.

Where positions differ, averages over them do not compound rightly: in a decoder an early token is read by every later
one, so gradients pile up on it with every layer; a class token carries the whole gradient. Exact statistics of real
token ids enter position by position and sequence by sequence: what two positions share is equal tokens, all or
nothing, and a non-linear function of an average over sequences is not the average of the function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from signalprop.kernels.embedding_and_loss import (
    input_kernel,
    sequences,
    sequences_of_both,
    through_final_norm,
    top_kernel,
)
from signalprop.kernels.layer_moments import Columns
from signalprop.kernels.mean_over_draws import mean_of_networks
from signalprop.kernels.memory_limits import check_fits_of
from signalprop.kernels.position_grid import EqualTokens, Grid
from signalprop.kernels.scaled_kernel import State
from signalprop.kernels.stack import Stack
from signalprop.kernels.streams.stack import Kernels, back_of, stack_of
from signalprop.kernels.tied_head import Along, along_of
from signalprop.network.inputs import InputStatistics
from signalprop.network.layout import layer_starts, stacks_of
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.network.residual import back_through
from signalprop.results.between_streams import STREAM_COVARIANCE
from signalprop.results.profile import Profile
from signalprop.theory.network import sensitivity_gain, token_share
from signalprop.theory.scatter.bands import with_scatter
from signalprop.theory.scatter.response import Overlaps

# Called with a sublayer's index and the stream that it reads, or the gradient there; and with the number of sublayers
# and what leaves the stack.
Record = Callable[[int, State], None]
# (the last stream, ln of the share of its variance that a token's embedding still has) -> as `ends.top_kernel`
Top = Callable[[State, float], tuple[FloatArray, FloatArray]]
Keep = NDArray[np.bool_] | None
# (a stack, which positions of each of its halves count, or the grid) -> what is called in one pass
Watch = Callable[[Stack, Sequence[Keep | Grid]], Record]


_STORED_LENGTH = 640  # tokens up to which a segment's attentions are stored for the way back: 3 MiB a matrix
_ALL_STORED = 512 * 2**20  # bytes up to which all are, and no segment is computed again
_EACH = 6  # matrices of a sublayer that are stored, on average: 11 of attention, one of a feed-forward


def _unseen(_: int, __: State) -> None:
    pass


def predict_token_kernels(
    parametrization: Parametrization,
    inputs: InputStatistics,
    *,
    backward: bool = True,
    grid: Grid | None = None,
    watch: Watch | None = None,
    progress: Callable[[int, int], None] | None = None,
    bands: bool = True,
) -> Profile:
    """Profile by token kernels: averages over positions of what each position does.

    Real ids: every sequence by itself, moments over all of them (as measured); of more than 4 sequences (2 beyond 512
    tokens) as many as stand evenly spaced in the order of their token correlation, which the notes say. O(T^2) work per
    sublayer and sequence and O(T^2 sqrt(n_sublayers)) memory (segments of the forward pass are computed again for the
    backward one). Measured errors: records/accuracy.md, and of the choice of sequences docs/theory/kernels.md.

    Args:
        grid: of `grid_for`: only these positions are followed, for statistics without real ids.
        watch: called before every pass with its stack and the positions that count; what it gives sees every stream.
        progress: called with how many sublayers of a network were passed, both ways, and how many there are; of an
            encoder or a decoder alone.
        bands: also how far single networks scatter, a sixth of the time.

    Raises:
        InputError: the parametrization is a sweep.
    """
    p, a = parametrization, parametrization.architecture
    check_fits_of(p, None if grid is None else 2 * len(grid.n))
    if a.kind == "encoder-decoder":
        return _of_encoder_decoder(p, inputs, backward, grid, watch, bands)
    stack = stack_of(p, grid)
    parts, note = sequences(a, inputs) if grid is None else ([(inputs, None)], _on_grid(grid))
    counts = [a.seq_len if keep is None else int(keep.sum()) for _, keep in parts]

    def of_network(number: int) -> Profile:
        passed: list[tuple[Columns, Columns | None]] = []
        stack.draw(number)
        for done, (part, keep) in enumerate(parts):
            top = partial(top_kernel, p, part, grid=grid) if backward else None
            start = input_kernel(p, part, None if grid is None else 2 * len(grid.n))
            counted = keep if grid is None else grid
            record = _unseen if watch is None else watch(stack, (counted,))
            ahead, back = _counting(progress, stack.n, done, len(parts), backward)
            passed.append(passes(stack, State(start).rescaled(), top, counted, _both(record, ahead), back, part, bands))
        return profile_of(p, passed, counts, note, bands)

    return mean_of_networks(of_network) if stack.draws else of_network(0)


def predict_together(tables: Sequence[Parametrization], inputs: InputStatistics, grid: Grid) -> list[Profile]:
    """`predict_token_kernels` without bands of parametrizations of one architecture and placement on a grid.

    All that matrices take is computed for all at once, in a fifth of the time for 20 members of 32 nodes, whose
    matrices take less time than the calls of Python on them; duals of activations one by one.
    """
    first, n = tables[0], tables[0].n_sublayers
    p = Parametrization.sweep([replace(table, embedding=first.embedding, head=first.head) for table in tables])
    stack, rows, members = Stack(p, grid), 2 * len(grid.n), (len(tables),)
    columns, back = (Columns.empty(n, grid, False, members) for _ in range(2))
    ahead = _Ahead(stack, columns, np.zeros((n, *members)), all_count=True)
    starts = np.stack([input_kernel(table, inputs, rows) for table in tables])
    last = ahead.run(State(starts, np.zeros((*members, 1))).rescaled(), range(n))
    tops: list[tuple[State, State]] = []
    for which, table in enumerate(tables):
        one = last.of_member(which)
        kernel, across = top_kernel(table, inputs, one, float(token_share(table, ahead.log_norm[:, which])), grid)
        gradient = through_final_norm(table, one, kernel)
        tops.append((gradient, gradient if stack.a.has_final_norm else State(across)))
    at_last, at_norm = (
        State(np.stack([x.kernel for x in side]), np.array([[x.log_scale] for x in side]))
        for side in zip(*tops, strict=True)
    )
    _backward(ahead, at_last, at_norm, back)
    return [
        profile_of(table, [(columns.of_member(i), back.of_member(i))], [grid.tokens], _on_grid(grid), bands=False)
        for i, table in enumerate(tables)
    ]


def most_together(p: Parametrization, grid: Grid) -> int:
    """How many fit into the memory that is allowed."""
    return int(_ALL_STORED // (_EACH * p.n_sublayers * 8 * (2 * len(grid.n)) ** 2))


def _counting(
    progress: Callable[[int, int], None] | None, n: int, done: int, parts: int, backward: bool
) -> tuple[Record, Record]:
    """Progress on the way forward and on the way back, each `n` sublayers."""
    if progress is None:
        return _unseen, _unseen
    ways = 1 + backward
    every = max(1, n * ways * parts // 100)

    def told(passed: int) -> None:
        now = passed + ways * n * done
        if now % every == 0 and now:
            progress(now, ways * n * parts)

    return lambda i, _: told(i), lambda i, _: told(2 * n - i) if i < n else None


def _both(one: Record, other: Record) -> Record:
    if other is _unseen:
        return one

    def record(i: int, state: State) -> None:
        one(i, state)
        other(i, state)

    return record


def _of_encoder_decoder(
    p: Parametrization, inputs: InputStatistics, backward: bool, grid: Grid | None, watch: Watch | None, bands: bool
) -> Profile:
    a = p.architecture
    encoder_grid = None if grid is None else EqualTokens(a.seq_len)
    stack = Stack(p, grid=grid, encoder_grid=encoder_grid)
    parts, note = sequences_of_both(a, inputs)
    if grid is not None:
        note = _on_grid(grid)

    def of_network(number: int) -> Profile:
        passed, counts = [], []
        stack.draw(number)
        for (read, encoder_keep), (written, decoder_keep) in parts:
            rows = (None, None) if grid is None else (2, 2 * len(grid.n))
            starts = input_kernel(p, read, rows[0]), input_kernel(p, written, rows[1], decoder=True)
            top = partial(top_kernel, p, written, grid=grid) if backward else None
            states = State(starts[0]).rescaled(), State(starts[1]).rescaled()
            counted = (encoder_keep, decoder_keep) if grid is None else (encoder_grid, grid)
            record = _unseen if watch is None else watch(stack, counted)
            passed.append(passes_of_both(stack, states, top, counted, record, written, bands))
            lengths = [_tokens(start, of) for start, of in zip(starts, counted, strict=True)]
            counts.append(np.array(lengths)[p.stack])
        return profile_of(p, passed, np.stack(counts), note, bands)

    return mean_of_networks(of_network) if stack.draws else of_network(0)


def _on_grid(grid: Grid) -> str:
    return f"{len(grid.n)} of {grid.tokens:,} positions are followed, the others interpolated"


def _tokens(kernel: FloatArray, keep: Keep | Grid) -> int:
    """How many tokens a kernel is of."""
    if isinstance(keep, Grid):
        return keep.tokens
    return len(kernel) if keep is None else int(keep.sum())


def profile_of(
    parametrization: Parametrization,
    passed: Sequence[tuple[Columns, Columns | None]],
    counts: Sequence[int] | FloatArray,
    note: str = "",
    bands: bool = True,
) -> Profile:
    """The Profile of what `passes` found for one sequence or several; counts as of `Columns.pooled`."""
    tokens = np.asarray(counts, np.float64).reshape(len(passed), -1)
    ahead = Columns.pooled([ahead for ahead, _ in passed], tokens)
    forward = ahead.series()
    gradient, back_overlap = None, None
    backs = [back for _, back in passed if back is not None]
    if backs:
        columns = Columns.pooled(backs, tokens)
        gradient = columns.series(relative_to=float(columns.log_variance["stream_out"][-1]))
        back_overlap = columns.overlap
    between = {STREAM_COVARIANCE: np.array(ahead.between).tolist()} if ahead.between else {}
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
        statistics=sensitivity_gain(parametrization) | between,
        notes=(note,) if note else (),
    )
    if not bands:
        return profile
    return with_scatter(parametrization, profile, Overlaps(ahead.overlap, back_overlap))


def passes(
    stack: Stack,
    start: State,
    top: Top | None,
    keep: NDArray[np.bool_] | Grid | None = None,
    record: Record = _unseen,
    see_back: Record = _unseen,
    inputs: InputStatistics | None = None,
    bands: bool = True,
) -> tuple[Columns, Columns | None]:
    """Forward and backward moments of one token kernel.

    Args:
        start: what enters the first sublayer.
        top: gradient kernels at the head's input, given the last stream; None: no backward pass.
        keep: which positions count, None: all; or the grid that kernels stand on.
        record, see_back: called with every stream, and with every gradient (on its way back).
        inputs: of the loss that `top` is of; None: of another gradient. bands: whether overlaps are stored.
    """
    columns, log_norm = Columns.empty(stack.n, keep, bands), np.zeros(stack.n)
    entering = stack.enter(start)
    ahead = _Ahead(stack, columns, log_norm, record, top is not None and _all_count(stack, entering))
    last = ahead.run(entering, range(stack.n))
    record(stack.n, last)
    if top is None:
        return columns, None
    gradient, across = _at_last(ahead, last, top, inputs)
    back = Columns.empty(stack.n, keep, bands)
    see_back(stack.n, gradient)
    _backward(ahead, gradient, across, back, see_back)
    return columns, back


def _all_count(stack: Stack, start: State) -> bool:
    """Whether the way back has every stream and attention of the way forward, so that nothing is computed again."""
    return isinstance(start, State) and _EACH * stack.n * start.kernel.nbytes <= _ALL_STORED


@dataclass
class _Ahead:
    """The way forward through one stack, and what the way back needs of it.

    Attributes:
        columns, log_norm: where its rows' moments, and logs of what its post-norms divide by, are put.
        all_count: as `_all_count`. along: of the gradient on its way back, where a tied head favours tokens.
        checkpoints: some of the streams; reads: all of them, where they are stored.
    """

    stack: Stack
    columns: Columns
    log_norm: FloatArray
    record: Record = _unseen
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


def _at_last(ahead: _Ahead, last: State, top: Top, inputs: InputStatistics | None) -> tuple[State, State]:
    """The gradient at the last stream, and what a post-norm there sends back."""
    stack = ahead.stack
    last = stack.leave(last)
    log_share = stack.log_token_share(ahead.log_norm)
    kernel, across = top(last, log_share)
    if inputs is not None and not isinstance(ahead.columns.keep, Grid):
        ahead.along = along_of(stack, inputs, last, log_share)
    gradient = through_final_norm(stack.p, last, kernel)
    return stack.back(gradient), gradient if stack.a.has_final_norm else State(across)


def _backward(ahead: _Ahead, gradient: State, across: State, columns: Columns, record: Record = _unseen) -> list[State]:
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
    record: Record = _unseen,
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
    first, second = (_Ahead(stack, replace(columns, keep=keep), log_norm, record, every) for keep in counted)
    read = first.run(starts[0], encoder)
    memory = stack.read_memory(read)
    encoder_grid, keep = (counted[0], None) if isinstance(counted[0], Grid) else (None, counted[0])
    stack.remember(memory if keep is None else memory[np.ix_(keep, keep)], encoder_grid)
    last = second.run(starts[1], decoder)
    if top is None:
        return columns, None
    gradient, across = _at_last(second, last, top, inputs)
    back = Columns.empty(n, bands=bands)
    sent = _backward(second, gradient, across, replace(back, keep=counted[1]))
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
    _backward(first, at_last, at_last, replace(back, keep=counted[0]))
    return columns, back

"""Fidelity `kernel`: the token kernel K_ij = E x_i . x_j / d_model through every sublayer, and back.

Where positions differ, averages over them do not compound rightly: in a decoder an early token is read by every later
one, so gradients pile up on it with every layer; a class token carries the whole gradient. Exact statistics of real
token ids enter position by position and sequence by sequence: what two positions share is equal tokens, all or
nothing, and a non-linear function of an average over sequences is not the average of the function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

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
from signalprop.kernels.passes import Ahead, Keep, Record, backward, passes, passes_of_both, unseen
from signalprop.kernels.position_grid import EqualTokens, Grid
from signalprop.kernels.scaled_kernel import State
from signalprop.kernels.stack import Stack
from signalprop.kernels.streams.stack import stack_of
from signalprop.network.inputs import InputStatistics
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.results.between_streams import STREAM_COVARIANCE
from signalprop.results.profile import Profile
from signalprop.theory.network import sensitivity_gain, token_share
from signalprop.theory.scatter.bands import with_scatter
from signalprop.theory.scatter.response import Overlaps

# (a stack, which positions of each of its halves count, or the grid) -> what is called in one pass
Watch = Callable[[Stack, Sequence[Keep | Grid]], Record]


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
            record = unseen if watch is None else watch(stack, (counted,))
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
    ahead = Ahead(stack, columns, np.zeros((n, *members)), all_count=True)
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
    backward(ahead, at_last, at_norm, back)
    return [
        profile_of(table, [(columns.of_member(i), back.of_member(i))], [grid.tokens], _on_grid(grid), bands=False)
        for i, table in enumerate(tables)
    ]


def _counting(
    progress: Callable[[int, int], None] | None, n: int, done: int, parts: int, backward: bool
) -> tuple[Record, Record]:
    """Progress on the way forward and on the way back, each `n` sublayers."""
    if progress is None:
        return unseen, unseen
    ways = 1 + backward
    every = max(1, n * ways * parts // 100)

    def told(passed: int) -> None:
        now = passed + ways * n * done
        if now % every == 0 and now:
            progress(now, ways * n * parts)

    return lambda i, _: told(i), lambda i, _: told(2 * n - i) if i < n else None


def _both(one: Record, other: Record) -> Record:
    if other is unseen:
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
            record = unseen if watch is None else watch(stack, counted)
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

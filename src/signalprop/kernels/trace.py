"""The trace of a token kernel: its matrices after every layer, and those of the gradient on its way back.

The `kernel` fidelity of `predict` says how variance and mean correlation move; the trace shows the T x T kernels that
these are averages of: which tokens become equal, at which distances, and from which layer on all of them are one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from signalprop.data.batches import default_statistics
from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.kernels.embedding_and_loss import each, input_kernel, top_kernel
from signalprop.kernels.given_kernels import checked_kernel
from signalprop.kernels.kernel_statistics import RANGE, KernelSeries, distances, effective_rank, lag_cosine, pooled
from signalprop.kernels.memory_limits import check_covered
from signalprop.kernels.passes import Top, passes
from signalprop.kernels.predicting import profile_of
from signalprop.kernels.scaled_kernel import State, normalised
from signalprop.kernels.stack import Stack
from signalprop.network.inputs import InputStatistics
from signalprop.network.kinds import rows_where
from signalprop.network.layout import PLACEMENTS, layer_starts
from signalprop.network.moments import FloatArray
from signalprop.network.parametrization import Parametrization
from signalprop.results.profile import Profile

Matrices = Literal["both", "forward", "none"]
LAGS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
# Rank collapse: the mean of 1 - cosine falls below the one, the effective rank below the other.
COLLAPSED_DISTANCE, COLLAPSED_RANK = 1e-6, 1.01
# Effective ranks take O(T^3): at all depths up to so many tokens, at chosen depths up to the second number.
_RANK_EVERYWHERE, _RANK_AT = 128, 1024


@typed
@dataclass(frozen=True, eq=False)
class Trace:
    """What `trace` found.

    Attributes:
        parametrization: of the network. n_tokens: T.
        forward: numbers of the kernels at all depths. gradient: of the gradient kernels, None without a backward pass.
        at: depths that were asked for.
        kernels, gradients: raw kernels by those depths, (T, T), where they are stored; of the first of several
            sequences. A gradient kernel is relative to the mean diagonal at the top.
        profile: variances and correlations sublayer by sublayer, as `predict` has them.
        sequences: how many were followed; forward and gradient hold their means, forward_sd and gradient_sd their
            standard deviations by name of the column (None for a single one).
        source: where the input comes from, in words.
    """

    parametrization: Parametrization
    n_tokens: int
    forward: KernelSeries
    gradient: KernelSeries | None
    at: tuple[int, ...]
    kernels: Mapping[int, FloatArray]
    gradients: Mapping[int, FloatArray]
    profile: Profile
    sequences: int = 1
    forward_sd: Mapping[str, FloatArray] | None = None
    gradient_sd: Mapping[str, FloatArray] | None = None
    source: str = ""

    def __repr__(self) -> str:
        at = ", ".join(map(str, self.at))
        return f"<Trace: {self.parametrization.scheme}; {self.n_tokens} tokens, {self.sequences} sequences; at {at}>"

    @property
    def collapse_depth(self) -> int | None:
        """First depth at which the mean of 1 - cosine is below 1e-6; None if there is none."""
        return _first(self.forward.distance < COLLAPSED_DISTANCE)

    @property
    def rank_collapse_depth(self) -> int | None:
        """First depth with an effective rank below 1.01, of those where it was computed; None of one token."""
        return None if self.n_tokens == 1 else _first(self.forward.effective_rank < COLLAPSED_RANK)

    @typed
    def cosines(self, depth: int) -> FloatArray:
        """The normalised kernel at a stored `depth`, (T, T).

        Raises:
            InputError: the kernel at that depth is not stored.
        """
        if depth not in self.kernels:
            depths = ", ".join(map(str, self.kernels)) or "none"
            raise InputError(
                f"the kernel at depth {depth} was not stored; the stored ones: {depths} (at= names others)"
            )
        return normalised(self.kernels[depth])

    def to_json(self) -> dict[str, Any]:
        """All numbers, without the matrices."""

        def both(series: KernelSeries | None, sd: Mapping[str, FloatArray] | None) -> dict[str, Any] | None:
            if series is None:
                return None
            out: dict[str, Any] = dict(series.columns())
            return out if sd is None else out | {f"{name}_sd": column for name, column in sd.items()}

        a = self.parametrization.architecture
        return {
            "scheme": self.parametrization.scheme,
            "options": dict(self.parametrization.options),
            "architecture": a.model_dump(mode="json", exclude_defaults=True),
            "source": self.source,
            "sequences": self.sequences,
            "n_tokens": self.n_tokens,
            "n_layers": a.n_layers,
            "collapse_depth": self.collapse_depth,
            "rank_collapse_depth": self.rank_collapse_depth,
            "forward": both(self.forward, self.forward_sd),
            "gradient": both(self.gradient, self.gradient_sd),
        }


@typed
def trace(
    parametrization: Parametrization,
    kernel: ArrayLike | None = None,
    *,
    inputs: InputStatistics | None = None,
    at: Sequence[int] | None = None,
    top: ArrayLike | None = None,
    backward: bool = True,
    rank: bool | None = None,
    matrices: Matrices = "both",
    progress: Callable[[int, int], None] | None = None,
) -> Trace:
    """Follow a token kernel through every layer of an encoder or decoder, and its gradient back.

    Exact for infinite width where scores are zero or attention is shaped (He et al. 2023 (SPA), appendix H.3); with
    random scores as good as the `kernel` fidelity (docs/theory/kernels.md). O(T^2) work per sublayer; memory for the
    kernels that are stored and O(sqrt(layers)) more, whatever the depth.

    Args:
        parametrization: of an encoder or a decoder; not a sweep. backward: the gradient's kernels too.
        kernel: of the stream that enters the first sublayer, (T, T), for any T that the network takes.
        inputs: statistics of the data, where no kernel is given (default: Zipf's law); every sequence of ids is
            followed by itself.
        at: depths at which matrices are stored, 0 to n_layers; default: about a dozen.
        top: gradient kernel at the head's input, after a final norm; default: that of the loss.
        rank: compute effective ranks at all depths, or nowhere; default: at all depths up to 128 tokens, at the chosen
            depths up to 1,024.
        matrices: which kernels to store at the depths in `at`: `both` those of signal and gradient, `forward`, `none`.
        progress: called with how many sequences are done, and how many there are.

    Raises:
        InputError: an encoder-decoder, a sweep, an invalid kernel, or a depth that the network does not have.
    """
    check_covered(parametrization)
    p = parametrization
    if kernel is not None:
        matrix = checked_kernel(kernel)
        p = replace(p, architecture=p.architecture.replace(seq_len=len(matrix)))
    statistics = default_statistics(p.architecture) if inputs is None else inputs
    parts = [(statistics, None)] if kernel is not None else each(p.architecture, statistics)
    head = None if top is None else _top_of(top, p.architecture.seq_len)
    depths = depths_of(p, at)
    if matrices not in get_args(Matrices):
        raise InputError(f"matrices is {matrices!r:.40}; expected {', '.join(get_args(Matrices))}")
    stack = Stack(p)
    ahead, back, passed = list[_Reader](), list[_Reader](), []
    for number, (part, keep) in enumerate(parts):
        start = matrix if kernel is not None else input_kernel(p, part)
        ahead.append(_Reader(p, depths, rank, keep, keep_matrices=number == 0 and matrices != "none"))
        back.append(_Reader(p, depths, rank, keep, keep_matrices=number == 0 and matrices == "both", relative=True))
        loss = None if not backward else partial(top_kernel, p, part) if head is None else head
        of = part if head is None else None
        passed.append(passes(stack, State(start).rescaled(), loss, keep, ahead[-1].see, back[-1].see, of))
        if progress is not None:
            progress(number + 1, len(parts))
    forward, forward_sd = pooled([reader.series() for reader in ahead])
    gradient, gradient_sd = pooled([reader.series() for reader in back]) if backward else (None, None)
    counts = [p.architecture.seq_len if keep is None else int(keep.sum()) for _, keep in parts]
    return Trace(
        parametrization=p,
        n_tokens=p.architecture.seq_len,
        forward=forward,
        gradient=gradient,
        at=depths,
        kernels=ahead[0].matrices,
        gradients=back[0].matrices,
        profile=profile_of(p, passed, counts),
        sequences=len(parts),
        forward_sd=forward_sd,
        gradient_sd=gradient_sd,
        source="a given kernel" if kernel is not None else statistics.source,
    )


@typed
def attention_only(parametrization: Parametrization) -> Parametrization:
    """The network of `parametrization` with attention alone: other sublayers and norms pass the stream on unchanged.

    It shows what attention does by itself, as in figures 1 and 7 of the SPA paper.
    """
    p = parametrization
    other = ~rows_where(p, lambda kind: kind.attends)
    silenced = {
        f"{group}__{role}": np.where(other, 0.0, column)
        for group, columns in (("weight", p.weights), ("bias", p.biases))
        for role, column in columns.items()
    }
    return replace(
        p.with_columns(skip=np.where(other, 1.0, p.skip), branch=np.where(other, 0.0, p.branch), **silenced),
        placement=np.where(other, PLACEMENTS.index("none"), p.placement).astype(p.placement.dtype),
    )


def _first(where: NDArray[np.bool_]) -> int | None:
    found = np.flatnonzero(where)
    return int(found[0]) if found.size else None


def depths_of(p: Parametrization, at: Sequence[int] | None) -> tuple[int, ...]:
    n = p.architecture.n_layers
    if at is None:
        return (0, *sorted({round(depth) for depth in np.geomspace(1, n, min(n, 11))}))
    wrong = [depth for depth in at if not 0 <= depth <= n]
    if wrong or not at:
        raise InputError(f"depth {wrong[0] if wrong else 'list is empty'}; expected depths from 0 to {n}, the layers")
    return tuple(sorted(set(at)))


def _top_of(top: ArrayLike, length: int) -> Top:
    kernel = checked_kernel(top, "the gradient kernel at the top")
    if len(kernel) != length:
        raise InputError(f"the gradient kernel at the top is of {len(kernel)} tokens, the input of {length}")
    return lambda _, __: (kernel, kernel)


class _Reader:
    """Collects numbers and matrices of one direction of one sequence, depth by depth.

    Attributes:
        keep: positions that count, None: all. stored_depths: of stored matrices. relative: numbers are relative to
            the mean diagonal of the first kernel.
    """

    def __init__(
        self, p: Parametrization, depths: Sequence[int], rank: bool | None, keep: NDArray[np.bool_] | None, *,
        keep_matrices: bool, relative: bool = False,
    ) -> None:  # fmt: skip
        n, t = p.architecture.n_layers, p.architecture.seq_len
        self.depth_of = {int(i): depth for depth, i in enumerate(layer_starts(p))} | {p.n_sublayers: n}
        self.keep, self.log_unit = keep, None if relative else 0.0
        self.stored_depths = set(depths) if keep_matrices else set()
        everywhere = t <= _RANK_EVERYWHERE if rank is None else rank
        self.ranked = set(range(n + 1)) if everywhere else set(depths) if rank is None and t <= _RANK_AT else set()
        names = (field.name for field in fields(KernelSeries) if field.name != "lags")
        self.columns = {name: np.full(n + 1, np.nan) for name in names}
        self.by_lag = {lag: np.full(n + 1, np.nan) for lag in LAGS if lag < t}
        self.matrices: dict[int, FloatArray] = {}

    @np.errstate(over="ignore", invalid="ignore")  # scores far beyond what the recursion holds for
    def see(self, i: int, state: State) -> None:
        if self.log_unit is None:
            self.log_unit = state.log_scale + math.log(max(float(np.diagonal(state.kernel).mean()), 1e-300))
        depth = self.depth_of.get(i)
        if depth is None:
            return
        kernel = state.kernel if self.keep is None else state.kernel[np.ix_(self.keep, self.keep)]
        mean, largest = distances(kernel)
        diagonal = np.diagonal(kernel)
        size, level = float(diagonal.mean()), state.log_scale - self.log_unit
        factor = math.exp(min(max(level, -RANGE), RANGE))
        found = {
            "distance": mean,
            "min_cosine": 1 - largest,
            "log_diagonal": math.log(size) + level if size > 0 else -math.inf,
            "diagonal_sd": float(diagonal.std()) * factor,
            "diagonal_min": float(diagonal.min()) * factor,
            "diagonal_max": float(diagonal.max()) * factor,
        }
        if depth in self.ranked:
            found["effective_rank"] = effective_rank(kernel)
        for name, value in found.items():
            self.columns[name][depth] = value
        for lag, column in self.by_lag.items():
            if lag < len(kernel):
                column[depth] = lag_cosine(kernel, lag)
        if depth in self.stored_depths:
            self.matrices[depth] = state.kernel * factor

    def series(self) -> KernelSeries:
        return KernelSeries(lags=self.by_lag, **self.columns)

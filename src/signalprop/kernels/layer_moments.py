"""Moments of one sequence of tokens, or of several, sublayer by sublayer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from signalprop.kernels.position_grid import Grid
from signalprop.kernels.scaled_kernel import State
from signalprop.network.moments import Array, FloatArray
from signalprop.results.profile import POINTS
from signalprop.results.series import Series


@dataclass
class Columns:
    """Moments of one sequence, or of several, collected sublayer by sublayer.

    Attributes:
        overlap: as of `scatter.Overlaps`, (sublayers, 2).
        between: covariance of several streams after every sublayer, as of `Kernels`; empty of one.
        keep: which positions count, None: all; or the grid of the kernels.
        bands: whether overlaps are wanted, from which bands are computed.
    """

    log_variance: dict[str, FloatArray]
    correlation: dict[str, FloatArray]
    overlap: FloatArray
    between: list[FloatArray] = field(default_factory=list)
    keep: NDArray[np.bool_] | Grid | None = None
    bands: bool = True
    _last: tuple[State, tuple[Array, Array]] | None = None

    @staticmethod
    def empty(
        n: int, keep: NDArray[np.bool_] | Grid | None = None, bands: bool = True, members: tuple[int, ...] = ()
    ) -> Columns:
        """Of n sublayers, to be filled; of so many `members`, where several are followed together."""
        logs, correlations = ({k: np.zeros((n, *members)) for k in POINTS} for _ in range(2))
        return Columns(logs, correlations, np.zeros((n, 2)), keep=keep, bands=bands)

    def of_member(self, which: int) -> Columns:
        """Those of one of several members."""
        logs, correlations = (
            {k: x[:, which] for k, x in side.items()} for side in (self.log_variance, self.correlation)
        )
        return Columns(logs, correlations, self.overlap, keep=self.keep, bands=False)

    @staticmethod
    def pooled(parts: Sequence[Columns], counts: FloatArray) -> Columns:
        """Moments over all sequences, as measured: variances average over tokens, covariances over pairs of tokens.

        Args:
            counts: number of tokens of every sequence, (sequences, 1), or that every sublayer reads of it,
                (sequences, sublayers).
        """
        if len(parts) == 1:
            return parts[0]
        tokens = counts / counts.sum(0)
        pairs = counts * (counts - 1) / np.maximum((counts * (counts - 1)).sum(0), 1.0)
        log_variance, correlation = {}, {}
        between: list[FloatArray] = []
        for k in POINTS:
            logs = np.stack([part.log_variance[k] for part in parts])
            top = logs.max(0)
            variances = np.exp(np.maximum(logs - top, -745.0))
            variance = (tokens * variances).sum(0)
            shared = (pairs * variances * np.stack([part.correlation[k] for part in parts])).sum(0)
            if k == "stream_out" and parts[0].between:
                weights = (tokens * variances / variance)[..., None, None]
                between = list((weights * np.array([part.between for part in parts])).sum(0))
            log_variance[k], correlation[k] = top + np.log(variance), np.clip(shared / variance, -1.0, 1.0)
        overlap = (tokens[..., None] * np.stack([part.overlap for part in parts])).sum(0)
        return Columns(log_variance, correlation, overlap, between)

    def add_overlap(self, i: int, skipped: State, added: State) -> None:
        """Store the similarity of two addends of a sum; not of several streams, whose bands are not derived."""
        if self.bands and isinstance(skipped, State):
            self.overlap[i] = skipped.overlap(added, self.keep), added.overlap(added, self.keep)

    def put(self, point: str, i: int, state: State) -> None:
        if self._last is None or self._last[0] is not state:  # what one sublayer ends with, the next one begins with
            self._last = state, state.moments(self.keep)
        self.log_variance[point][i], self.correlation[point][i] = self._last[1]

    def series(self, relative_to: float = 0.0) -> dict[str, Series]:
        return {
            k: Series.of(log_variance=self.log_variance[k] - relative_to, token_correlation=self.correlation[k])
            for k in POINTS
        }

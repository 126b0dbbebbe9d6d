"""Input statistics: the similarity of two tokens of the data, before any weight.

Formulas: TGS v1 section B.1 with its corrected finite-length form, derived in `docs/theory/components.md`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from signalprop.errors import InputError
from signalprop.files.validation import typed
from signalprop.network.moments import FloatArray, Moments

IntArray = NDArray[np.int64]
InputKind = Literal["tokens", "patches", "frames", "stream"]
_LARGEST = 1e50  # of a number in the data: squares and their sums stay finite through every embedding
_IMAGE_PAIRS, _IMAGES = 1_500_000, 4  # pairs of patches whose second moments are kept, in so many images at least
_LARGEST_SUM = 100_000  # beyond this many words Zipf's sums come from the Euler-Maclaurin formula, exact to 1e-15


@typed
@dataclass(frozen=True, eq=False)
class InputStatistics:
    """What the data says about the model's input and about the gradient that enters at its top.

    Attributes:
        kind: `tokens` (look-ups of embedding rows), `patches` (numbers through a linear embedding), `frames` (numbers
            through convolutions over time), or `stream` (moments measured where the residual stream begins).
        token_correlation: for tokens the probability that two tokens of one sequence are equal; for patches, frames
            and streams the correlation of one feature at two positions.
        mean, variance: of one number (patches, frames, stream); a look-up has none.
        segment_correlation: probability that two tokens of one sequence lie in one segment (2/3: uniform boundary).
        target_correlation: probability that the targets of two positions that carry loss are equal.
        loss_fraction: share of positions that carry loss (0.15 in masked language modelling).
        tokens, targets: optional ids of shape (batch, tokens), -1 where a position is padding or carries no loss. The
            token-kernel fidelity uses them position by position. segments: of each token, likewise.
        second_moments: optional (images, positions, positions), E x_i x_j over the features of patches; the same
            fidelity follows every image separately, since norms divide each by its size. A matrix (positions,
            positions) is an average image.
        decoder: statistics of the decoder's input in an encoder-decoder (default: those of the encoder, where those
            are not of frames).
        source: where the numbers come from, in words.

    Raises:
        InputError: a number that is not one, or out of range.
    """

    kind: InputKind = "tokens"
    token_correlation: float = 0.0
    mean: float = 0.0
    variance: float = 1.0
    segment_correlation: float = 2 / 3
    target_correlation: float = 0.0
    loss_fraction: float = 1.0
    tokens: IntArray | None = None
    targets: IntArray | None = None
    second_moments: FloatArray | None = None
    decoder: InputStatistics | None = None
    source: str = ""
    segments: IntArray | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(InputKind):
            raise InputError(f"kind of the input is {self.kind!r}; expected one of {', '.join(get_args(InputKind))}")
        for name in ("token_correlation", "segment_correlation", "target_correlation"):
            self._check(name, -1.0, 1.0)
        self._check("mean", -_LARGEST, _LARGEST)
        self._check("variance", 0.0, _LARGEST**2)
        self._check("loss_fraction", 0.0, 1.0)
        if self.loss_fraction == 0:
            raise InputError("loss_fraction is 0; expected a positive share: without loss there is no gradient")
        if not (self.decoder is None or isinstance(self.decoder, InputStatistics)):
            raise InputError(f"decoder is a {type(self.decoder).__name__}; expected InputStatistics")

    def _check(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
        if not (number and low <= value <= high):
            raise InputError(f"{name} of the input is {value!r:.60}; expected a number from {low:g} to {high:g}")

    @property
    def of_decoder(self) -> InputStatistics:
        """Statistics of what the decoder of an encoder-decoder reads.

        Raises:
            InputError: these are statistics of frames, and none of tokens are given.
        """
        if self.decoder is None and self.kind == "frames":
            raise InputError("these are statistics of frames, and the decoder reads tokens; give decoder= as well")
        return self.decoder or self

    def describe(self) -> dict[str, Any]:
        """The scalar statistics, for JSON and tables."""
        out: dict[str, Any] = {
            "kind": self.kind,
            "source": self.source,
            "mean": self.mean,
            "variance": self.variance,
            "token_correlation": self.token_correlation,
            "segment_correlation": self.segment_correlation,
            "target_correlation": self.target_correlation,
            "loss_fraction": self.loss_fraction,
        }
        if self.decoder is not None:
            out["decoder"] = self.decoder.describe()
        return out


def zipf_token_correlation(vocab_size: int, *, approximate: bool = False) -> float:
    """Probability that two tokens drawn by Zipf's law (p_i ~ 1/i) are equal, sum of p_i^2; any sequence length.

    The exact value is H_V^(2) / H_V^2; `approximate` gives the papers' pi^2 / (6 ln^2 V) (TGS appendix A.1, v1 B.1),
    which is 11 % too high at V = 32,000.
    """
    if vocab_size < 1:
        raise InputError(f"vocab_size is {vocab_size}; expected at least 1")
    if approximate:
        return math.pi**2 / (6 * math.log(vocab_size) ** 2) if vocab_size > 1 else 1.0
    if vocab_size > _LARGEST_SUM:
        v = float(vocab_size)
        first = math.log(v) + np.euler_gamma + 1 / (2 * v) - 1 / (12 * v**2)
        second = math.pi**2 / 6 - 1 / v + 1 / (2 * v**2) - 1 / (6 * v**3)
        return float(second / first**2)
    inverse = 1.0 / np.arange(1, vocab_size + 1)
    return float(np.sum(inverse**2) / np.sum(inverse) ** 2)


def segment_correlation(length: int | None = None) -> float:
    """Token correlation of a two-row segment table whose boundary is uniform.

    Uniform on 0..L (either segment may be empty): 2/3 at any L. With `length` given, uniform on 1..L-1 (both
    segments non-empty): 2/3 - 2/(3(L-1)). TGS v1 section B.1; derivation in `docs/theory/components.md`.
    """
    if length is None:
        return 2 / 3
    if length < 2:
        raise InputError(f"length is {length}; two non-empty segments need at least 2 tokens")
    return 2 / 3 - 2 / (3 * (length - 1))


def zipf(vocab_size: int, *, loss_fraction: float = 1.0) -> InputStatistics:
    """Statistics of text without any text: tokens and targets by Zipf's law."""
    r = zipf_token_correlation(vocab_size)
    source = f"Zipf's law, {vocab_size} words"
    return InputStatistics(token_correlation=r, target_correlation=r, loss_fraction=loss_fraction, source=source)


def collision_probability(ids: ArrayLike, *, ignore: int | None = -1) -> float:
    """Probability that two different positions of one sequence hold the same id, from counts (exact).

    Sequences are pooled pair by pair, so that a longer one weighs more.

    Args:
        ids: integers of shape (batch, tokens) or (tokens,).
        ignore: id of positions that do not count (padding); None: every position counts.

    Returns 0 when no sequence has two positions that count.
    """
    rows = _id_rows(ids)
    equal = pairs = 0
    for row in rows:
        row = row if ignore is None else row[row != ignore]
        counts = np.unique(row, return_counts=True)[1].astype(np.int64)
        equal += int(np.sum(counts * (counts - 1)))
        pairs += row.size * (row.size - 1)
    return equal / pairs if pairs else 0.0


def from_tokens(
    tokens: ArrayLike,
    *,
    targets: ArrayLike | None = None,
    segments: ArrayLike | None = None,
    ignore: int = -1,
    causal: bool = False,
    loss_fraction: float | None = None,
    source: str = "token ids",
) -> InputStatistics:
    """Exact statistics of real token ids.

    Args:
        tokens: ids of shape (batch, tokens), `ignore` or any negative number at padding.
        targets: ids that the loss asks for, `ignore` or any negative number where a position carries none (-100 in
            Hugging Face's labels); padding never does. Default: the next token if `causal`, else the token itself.
        segments: segment ids of the same shape; default: a boundary uniform over the sequence, 2/3.
        loss_fraction: share of positions that carry loss; default: the share of targets that are not `ignore`.

    Raises:
        InputError: not integers of one shape, no token at all, or targets of which none carries loss.
    """
    ids = _id_rows(tokens)
    ids = np.where((ids == ignore) | (ids < 0), -1, ids)
    real = ids != -1
    if not real.any():
        raise InputError("there is no token in the input; expected at least one id that is not padding")
    if targets is not None:
        aims = _same_shape("targets", targets, ids)
    elif causal:
        aims = np.full_like(ids, -1)
        aims[:, :-1] = ids[:, 1:]
    else:
        aims = ids
    aims = np.where((aims == ignore) | (aims < 0) | ~real, -1, aims)
    share = float(np.mean(aims[real] != -1))
    if share == 0 and targets is not None:
        raise InputError("no position carries loss: every target is padding; expected at least one")
    if share == 0:  # sequences of one token have no next one; no pair of positions either, so the share says nothing
        share = 1.0
    segment, segment_ids = 2 / 3, None
    if segments is not None:
        segment_ids = np.where(real, _same_shape("segments", segments, ids), -1)
        segment = collision_probability(segment_ids)
    return InputStatistics(
        token_correlation=collision_probability(ids),
        segment_correlation=segment,
        target_correlation=collision_probability(aims),
        loss_fraction=share if loss_fraction is None else loss_fraction,
        tokens=ids,
        targets=aims,
        segments=segment_ids,
        source=source,
    )


def from_patches(patches: ArrayLike, *, source: str = "image patches") -> InputStatistics:
    """Statistics of image patches (or any features) that a linear embedding reads.

    Second moments are those of all images, or of those that stand evenly spaced in the order of their mean squares: 39
    of 196 patches, 1.5 million pairs in all, 4 at least.

    Args:
        patches: numbers of shape (batch, tokens, features).

    Raises:
        InputError: as `tensor_moments`.
    """
    found = _of_tensor("patches", patches, source)
    x = np.asarray(patches, np.float64)
    x = x[evenly_spaced(np.einsum("bid,bid->b", x, x), max(_IMAGES, _IMAGE_PAIRS // x.shape[1] ** 2))]
    return replace(found, second_moments=np.einsum("bid,bjd->bij", x, x) / x.shape[2])


def evenly_spaced(values: ArrayLike, most: int) -> IntArray:
    """Indices of at most so many of the values, evenly spaced in their order."""
    ranks = np.argsort(np.asarray(values), kind="stable")
    if len(ranks) <= most:
        return np.arange(len(ranks))
    return ranks[((np.arange(most) + 0.5) * len(ranks) / most).astype(np.int64)]


def from_frames(
    frames: ArrayLike, *, decoder: InputStatistics | None = None, source: str = "speech features"
) -> InputStatistics:
    """Statistics of speech features that convolutions over time read.

    Args:
        frames: numbers of shape (batch, frames, features).
        decoder: statistics of what the decoder reads, if there is one.

    Raises:
        InputError: as `tensor_moments`.
    """
    return replace(_of_tensor("frames", frames, source), decoder=decoder)


def measured(stream: ArrayLike, *, source: str = "measured") -> InputStatistics:
    """Statistics of a tensor (batch, tokens, features) measured where the residual stream begins.

    Raises:
        InputError: as `tensor_moments`.
    """
    return _of_tensor("stream", stream, source)


def _of_tensor(kind: InputKind, values: ArrayLike, source: str) -> InputStatistics:
    moments = tensor_moments(values)
    return InputStatistics(
        kind=kind,
        mean=float(moments.mean),
        variance=float(moments.variance),
        token_correlation=float(moments.token_correlation),
        source=source,
    )


def tensor_moments(values: ArrayLike, mask: ArrayLike | None = None) -> Moments:
    """Mean, variance and token correlation of an array (batch, tokens, features); `mask` (batch, tokens), True: counts.

    The token correlation averages over pairs of different tokens of one sequence; it is 0 for a single token and for
    a constant.

    Raises:
        InputError: not three-dimensional, empty, not finite, beyond 1e50, or no token counts.
    """
    try:
        x: FloatArray = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError("expected an array of numbers of shape (batch, tokens, features)") from None
    if x.ndim != 3 or x.size == 0:
        raise InputError(f"expected an array of shape (batch, tokens, features), got shape {x.shape}")
    if not np.isfinite(x).all():
        raise InputError("the array holds NaN or infinite values; expected finite numbers")
    largest = float(np.abs(x).max())
    if largest > _LARGEST:
        raise InputError(f"the array holds {largest:.3g}; expected numbers up to {_LARGEST:g}")
    keep = np.ones(x.shape[:2], bool) if mask is None else np.asarray(mask, dtype=bool)
    if keep.shape != x.shape[:2]:
        raise InputError(f"the mask has shape {keep.shape}; expected (batch, tokens) {x.shape[:2]}")
    counts = keep.sum(1)
    n = int(counts.sum()) * x.shape[2]
    if n == 0:
        raise InputError("the mask leaves no token; expected at least one")
    mean = float(x[keep].sum()) / n
    centred = np.where(keep[..., None], x - mean, 0.0)
    squares = float((centred**2).sum())
    pairs = int((counts * (counts - 1)).sum()) * x.shape[2]
    cross = float((centred.sum(1) ** 2).sum()) - squares
    correlation = cross / pairs / (squares / n) if pairs and squares > 0 else 0.0
    return Moments(mean, squares / n, min(1.0, max(-1.0, correlation)))


def _id_rows(ids: ArrayLike | Sequence[Sequence[int]]) -> IntArray:
    try:
        rows = np.atleast_2d(np.asarray(ids))
    except (TypeError, ValueError):
        raise InputError("token ids are ragged; expected integers (batch, tokens), padded with -1") from None
    if rows.ndim != 2 or not np.issubdtype(rows.dtype, np.integer):
        raise InputError(f"token ids have shape {rows.shape} and type {rows.dtype}; expected integers (batch, tokens)")
    return rows.astype(np.int64)


def _same_shape(name: str, ids: ArrayLike, like: IntArray) -> IntArray:
    rows = _id_rows(ids)
    if rows.shape != like.shape:
        raise InputError(f"{name} have shape {rows.shape}, tokens {like.shape}; expected the same shape")
    return rows

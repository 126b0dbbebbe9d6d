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

from signalprop.data.batches import default_text, speech_features
from signalprop.errors import InputError, require
from signalprop.network.moments import FloatArray
from signalprop_lab.training.recipe import Data
from signalprop_lab.training.sources import (
    AUDIO,
    TRANSCRIPT,
    Place,
    Table,
    is_hub_name,
    missing,
    open_table,
    read_arrays,
    text_in,
)

Frames = NDArray[np.float32]  # (frames, features)
_SOUNDS = (".wav", ".flac", ".ogg", ".mp3", ".opus", ".aiff")
_WINDOW, _HOP = 0.025, 0.010  # seconds
_FLOOR = 1e-10
_SLOWEST, _FASTEST = 1000, 1_000_000  # Hz of a file
_HOUR = 3600.0  # seconds; silence of days packs into a small file
_LOUDEST = 1e30  # of a sample or a feature; squares and their sums stay finite
SYNTHETIC = 20_000  # utterances, if no limit is given
_LONGEST, _SHORTEST = 6, 3  # frames of a synthetic byte
_NOISE = 0.5


@dataclass(frozen=True, eq=False)
class Utterance:
    """What is said, and its features."""

    frames: Frames
    text: str


def utterances(data: Data, place: Place) -> Iterator[Utterance]:
    """The utterances of a source.

    A source is a NumPy file (.npz: `audio`, all samples, or `frames`, all features, one utterance behind the other;
    `offsets`, where each begins, and the end; `text`; `sample_rate`; those of another split have its name behind
    theirs, as in `text_test`), a directory of sound files with a .tsv, .csv or
    .jsonl of their transcripts, such a table itself, or a set of `datasets`.

    Raises:
        InputError: nothing there, damaged, or without transcripts.
    """
    path = Path(place.source)
    if path.is_file() and path.suffix == ".npz":
        yield from _arrays(data, path, place.split)
        return
    if not path.exists() and not is_hub_name(place.source):
        raise missing(place.source)
    table = open_table(data, place)
    audio, text = _columns(data, table)
    base = path if path.is_dir() else path.parent
    for where, row in table.read([audio, text]):
        name = f"{table.name}: {where}"
        samples, rate = _samples_in(row[audio], base, name)
        yield Utterance(log_mel(resampled(samples, rate, data), data), text_in(row, text, name))


def log_mel(samples: FloatArray, data: Data) -> Frames:
    """Normalised log-mel features, (frames, data.frame_dim): a frame per 10 ms.

    Every feature of an utterance has mean 0 and variance 1 (cepstral mean and variance normalisation).
    """
    values = log_mel_energies(samples, data.sample_rate, data.frame_dim)
    values = values - values.mean(0)
    return np.asarray(values / np.maximum(values.std(0), 1e-5), np.float32)


def log_mel_energies(samples: FloatArray, rate: int, n: int) -> FloatArray:
    """log10 of the energies of n mel filters, (frames, n): Hann windows of 25 ms every 10 ms, centred on the frame."""
    width, hop = round(_WINDOW * rate), round(_HOP * rate)
    x = np.pad(np.asarray(samples, np.float64), width // 2, mode="reflect" if samples.size > width // 2 else "constant")
    starts = np.arange(0, x.size - width + 1, hop)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(width) / width)
    power = np.abs(np.fft.rfft(x[starts[:, None] + np.arange(width)] * window, axis=1)) ** 2
    return np.asarray(np.log10(np.maximum(power @ mel_filters(rate, width, n), _FLOOR)))


@lru_cache(maxsize=8)
def mel_filters(rate: int, width: int, n: int) -> FloatArray:
    """Triangles on the mel scale, each of area 1 over Hz, (width // 2 + 1, n): linear to 1 kHz, logarithmic above.

    The scale of Slaney's Auditory Toolbox (1998), which librosa and Whisper use.
    """
    step, knee = 200 / 3, 1000.0  # Hz per mel below the knee
    ratio = math.log(6.4) / 27  # of frequencies per mel above it

    def mel(hz: float) -> float:
        return hz / step if hz < knee else knee / step + math.log(hz / knee) / ratio

    mels = np.linspace(0, mel(rate / 2), n + 2)
    edges = np.where(mels < knee / step, mels * step, knee * np.exp(ratio * (mels - knee / step)))
    bins = np.arange(width // 2 + 1) * rate / width
    rising = (bins[:, None] - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins[:, None]) / (edges[2:] - edges[1:-1])
    return np.asarray(np.maximum(0, np.minimum(rising, falling)) * 2 / (edges[2:] - edges[:-2]))


def resampled(samples: FloatArray, rate: int, data: Data) -> FloatArray:
    """Sound at data.sample_rate."""
    if rate == data.sample_rate:
        return samples
    signal = require("scipy.signal", "training")
    divisor = math.gcd(rate, data.sample_rate)
    return np.asarray(signal.resample_poly(samples, data.sample_rate // divisor, rate // divisor))


def _columns(data: Data, table: Table) -> tuple[str, str]:
    if table.columns == ("1", "2") and data.audio is None and data.text is None:
        return "1", "2"
    return (
        table.column(data.audio, "data.audio", AUDIO),
        table.column(data.text or data.target, "data.text", TRANSCRIPT),
    )


def _samples_in(value: Any, base: Path, where: str) -> tuple[FloatArray, int]:
    """(samples, rate) of a cell: a path, encoded ({"bytes": ..., "path": ...}) or decoded ({"array": ...})."""
    if isinstance(value, dict) and value.get("array") is not None:
        try:
            samples = np.asarray(value["array"], np.float64)
        except (TypeError, ValueError, OverflowError):
            samples = np.zeros(0)
        if samples.ndim != 1 or not samples.size:
            raise InputError(f"{where} holds no sound; expected a list of samples")
        return _checked(samples, value.get("sampling_rate"), where)
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return _read(io.BytesIO(value), where)
    if not isinstance(value, str) or not value:
        raise InputError(f"{where} holds no sound; expected the path of a file")
    paths = [base / name for name in (value, *(value + suffix for suffix in _SOUNDS))]
    found = None
    with suppress(OSError, ValueError):  # a name that is too long, or holds a null byte
        found = next((path for path in paths if path.is_file()), None)
    if found is not None:
        return _read(found, str(found))
    raise InputError(f"{where} names the sound {value!r}; there is no such file in {base}")


def _read(file: Any, name: str) -> tuple[FloatArray, int]:
    soundfile = require("soundfile", "training")
    try:
        with soundfile.SoundFile(file) as opened:
            rate, seconds = opened.samplerate, opened.frames / opened.samplerate
            samples = opened.read(dtype="float64", always_2d=True) if seconds <= _HOUR else None
    except Exception as error:  # soundfile has its own
        raise InputError(f"cannot read the sound {name}: {' '.join(str(error).split())[:200]}") from None
    if samples is None:
        raise InputError(f"the sound {name} lasts {seconds:,.0f} s; expected an hour at most")
    if not samples.size:
        raise InputError(f"the sound {name} is empty")
    return _checked(samples.mean(1), rate, f"the sound {name}")


def _checked(samples: FloatArray, rate: Any, where: str) -> tuple[FloatArray, int]:
    """(samples, rate), where both can be reckoned with; a rate that lies would make gigabytes of a second of sound."""
    if not isinstance(rate, (int, np.integer)) or isinstance(rate, bool) or not _SLOWEST <= rate <= _FASTEST:
        raise InputError(f"{where} has the sample rate {rate!r:.40}; expected {_SLOWEST} to {_FASTEST} Hz")
    if not np.abs(samples).max() <= _LOUDEST:
        raise InputError(f"{where} has samples that are not finite, or beyond {_LOUDEST:g}")
    return samples, int(rate)


def _arrays(data: Data, path: Path, split: str) -> Iterator[Utterance]:
    wanted = [f"{name}{end}" for name in ("frames", "audio", "offsets", "text") for end in ("", f"_{split}")]
    found, known = read_arrays(path, [*wanted, "sample_rate"])
    end = f"_{split}" if split != "train" or f"text_{split}" in found else ""
    content = "frames" if f"frames{end}" in found else "audio"
    for name in (content, "offsets", "text"):
        if name + end not in found:
            raise InputError(
                f"{path} has no array {name + end!r}; its arrays: {known}; expected audio{end} or frames{end}, "
                f"offsets{end} and text{end}"
            )
    values, offsets, texts = found[content + end], found["offsets" + end], found["text" + end]
    fits = offsets.ndim == texts.ndim == 1 and offsets.size == texts.size + 1 and offsets.dtype.kind in "iu"
    if not fits or values.ndim != (2 if content == "frames" else 1) or values.dtype.kind not in "fi":
        raise InputError(f"{path} has arrays that do not fit each other: n texts need n + 1 offsets into {content}")
    if not (np.all(np.diff(offsets.astype(np.int64)) > 0) and offsets[0] >= 0 and offsets[-1] <= len(values)):
        raise InputError(f"{path} has offsets that do not rise, or that leave {content}")
    if content == "frames" and values.shape[1] != data.frame_dim:
        raise InputError(f"{path} has frames of {values.shape[1]} features; set data.frame_dim to that")
    given = found.get("sample_rate", np.asarray(data.sample_rate))
    rate = given.item() if given.size == 1 else given.tolist()
    scale = 1 / np.iinfo(values.dtype).max if values.dtype.kind == "i" else 1.0
    for i, text in enumerate(texts):
        part = values[offsets[i] : offsets[i + 1]]
        name = f"{path}: text {i + 1}"
        if content == "frames":
            yield Utterance(_checked(part, data.sample_rate, name)[0].astype(np.float32), str(text))
        else:
            samples, hertz = _checked(part * scale, rate, name)
            yield Utterance(log_mel(resampled(samples, hertz, data), data), str(text))


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

    Each byte of the text has a spectrum of its own, always the same, and lasts 3 to 6 frames. To these, of variance 1,
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

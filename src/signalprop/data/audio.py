"""Recorded speech as what a speech model reads: a WAV or FLAC file through the model's feature extractor."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from signalprop.data.batches import Batch
from signalprop.errors import InputError, refusing, require
from signalprop.families import find, names
from signalprop.families.base import Family
from signalprop.files.limits import check_fits
from signalprop.files.storage import opened, reading
from signalprop.network.architecture import Architecture
from signalprop.network.moments import FloatArray

RATE = 16000  # samples per second that both extractors expect
_HOP = 160  # samples from one frame to the next: 10 ms
_SLOWEST, _FASTEST = 1000, 1_000_000  # Hz of a file; one that lies would make gigabytes of a second of sound
_HOUR = 3600.0  # seconds; silence of days packs into a small file
_LOUDEST = 1e30  # of a sample; squares and their sums stay finite


def read_audio(path: str | Path) -> FloatArray:
    """The samples of a WAV or FLAC file between -1 and 1: channels averaged, 16,000 per second."""
    with reading(path), opened(path, copies=8) as file:
        samples, rate = read_sound(file, str(path))
    mono = resampled(samples, rate, RATE)
    if not mono.any():
        raise InputError(f"{path} holds silence; expected speech")
    return mono


def read_sound(file: Any, name: str) -> tuple[FloatArray, int]:
    """(samples, rate) of an open sound file, channels averaged.

    Raises:
        InputError: no sound, more than an hour, a sample rate outside 1 kHz to 1 MHz, or samples that are not finite.
    """
    soundfile = require("soundfile", "audio")
    holding = refusing(f"{name} holds no sound that can be read", "expected WAV or FLAC")
    with holding, soundfile.SoundFile(file) as sound:
        rate, seconds = sound.samplerate, sound.frames / sound.samplerate
        if seconds > _HOUR:
            raise InputError(f"{name} lasts {seconds:,.0f} s; expected an hour at most")
        if not _SLOWEST <= rate <= _FASTEST:
            raise InputError(f"{name} has the sample rate {rate}; expected {_SLOWEST:,} to {_FASTEST:,} Hz")
        check_fits(8.0 * sound.frames * (sound.channels + 1), f"the sound in {name}", "give a shorter recording")
        samples = sound.read(dtype="float64", always_2d=True)
    if not samples.size:
        raise InputError(f"{name} holds no sound: it is empty")
    if not np.abs(samples).max() <= _LOUDEST:
        raise InputError(f"{name} has samples that are not finite, or beyond {_LOUDEST:g}")
    return samples.mean(1), int(rate)


def resampled(samples: FloatArray, rate: int, wanted: int) -> FloatArray:
    """Samples of one rate at another one."""
    if rate == wanted:
        return samples
    signal = require("scipy.signal", "models")
    divisor = math.gcd(rate, wanted)
    return np.asarray(signal.resample_poly(samples, wanted // divisor, rate // divisor))


def is_sound(path: Path | None) -> bool:
    """Whether the name is that of a recording."""
    return path is not None and path.suffix.lower() in (".wav", ".flac")


def check_reads_audio(architecture: Architecture) -> Family:
    """The family of a model that hears; audio is refused for others."""
    a = architecture
    family = find(a.family)
    if a.input != "frames" or family is None or family.hears is None:
        known = [name for name in names() if getattr(find(name), "hears", None)]
        raise InputError(f"recorded speech is for {' and '.join(known)}; this model ({a.family}) reads {a.input}")
    return family


def with_audio(batch: Batch, architecture: Architecture, path: str | Path, first: int = 0) -> Batch:
    """A batch that hears a recording instead of synthetic frames.

    Args:
        batch: what the decoder reads and is asked for. architecture: of the model.
        path: see `read_audio`. It is cut into stretches as long as the model hears, from the first on and over again;
            what is missing in the last one is silence.
        first: the stretch that the first sequence hears.
    """
    a = architecture
    family = check_reads_audio(a)
    samples = read_audio(path)
    if len(samples) < RATE // 10:
        raise InputError(f"{path} holds {len(samples) / RATE:.3f} seconds; expected at least 0.1")
    assert family.hears is not None
    name, units = family.hears
    length = a.n_frames * _HOP
    starts = range(0, len(samples), length)
    chosen = [starts[(first + k) % len(starts)] for k in range(len(batch.targets))]
    pieces = [samples[at : at + length].astype(np.float32) for at in chosen]
    extractor: Any = getattr(require("transformers", "models"), name)(feature_size=a.frame_dim, sampling_rate=RATE)
    found = extractor(
        pieces, sampling_rate=RATE, padding="max_length", max_length=a.n_frames * units, truncation=True,
        return_tensors="np",
    )["input_features"]  # fmt: skip
    frames = np.asarray(found, np.float64)
    if family.paths[0].features_first:
        frames = frames.transpose(0, 2, 1)
    text = batch.source.rpartition(", ")[2]
    return replace(batch, frames=frames, source=f"speech in {path}{f', {text}' if text else ''}")

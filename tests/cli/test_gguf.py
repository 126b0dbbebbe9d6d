"""A .gguf file where a directory is expected: measured and looked into as the model that it was made of."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

import signalprop as sp
import tiny
from commandline import Command
from gguf_file import write_gguf


def test_a_gguf_file_is_measured_as_its_model(command: Command, refused: Callable[..., str], tmp_path: Path) -> None:
    words = " ".join(f"word{i * i % 50}" for i in range(400))
    bpe = tiny.bpe(words, 300)
    model = tiny.llama(
        vocab_size=bpe.get_vocab_size(), hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, rms_norm_eps=1e-6,
    ).eval()  # fmt: skip
    (tmp_path / "words").write_text(words)
    model.save_pretrained(tmp_path / "plain")
    write_gguf(tmp_path / "model.gguf", model, bpe)
    options = ("--data", str(tmp_path / "words"), "--seq-len", "16", "--json", "-")
    found = []
    for source in ("plain", "model.gguf"):
        status, out, err = command("measure", str(tmp_path / source), *options)
        assert status == 0, err
        found.append(sp.Profile.from_json(json.loads(out)))
    for where in ("branch", "stream_out"):
        plain, quantised = (profile.forward[where].variance for profile in found)
        np.testing.assert_allclose(quantised, plain, rtol=1e-5)
    status, out, err = command("anatomy", str(tmp_path / "model.gguf"))
    assert status == 0 and "4 of 4 sums" in out, err
    assert "leave --random-init out" in refused("measure", str(tmp_path / "model.gguf"), "--random-init")

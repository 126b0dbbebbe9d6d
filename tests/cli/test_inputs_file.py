"""`--data FILE.npz`: the file's sequences are what the model reads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import signalprop as sp
from signalprop.cli import run

IDS = np.arange(40).reshape(2, 20) % 37


@pytest.fixture
def made(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=32))
    model.save_pretrained(tmp_path / "model")
    np.savez(tmp_path / "ids.npz", input_ids=IDS)
    return tmp_path


def test_diagnose(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = made / "d.json"
    model_and_inputs = [str(made / "model"), "--data", str(made / "ids.npz")]
    assert run(["diagnose", *model_and_inputs, "--no-trials", "--json", str(out)]) == 0
    model = GPT2LMHeadModel.from_pretrained(made / "model")
    loss = torch.nn.functional.cross_entropy
    with torch.no_grad():
        logits = model(torch.as_tensor(IDS)).logits
    wanted = loss(logits[:, :-1].flatten(0, 1), torch.as_tensor(IDS[:, 1:]).flatten())
    assert json.loads(out.read_text())["loss"]["value"] == pytest.approx(float(wanted), rel=1e-5)
    for command in ("diagnose", "measure", "compare"):
        assert run([command, *model_and_inputs, "--seq-len", "8"]) == 2
        assert "leave out --seq-len" in capsys.readouterr().err


def test_fold_and_fit(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = GPT2LMHeadModel.from_pretrained(made / "model")
    sp.apply(model, "lns", redraw=True)
    sp.save(model, made / "applied")
    inputs = ["--data", str(made / "ids.npz")]
    assert run(["fold", str(made / "applied"), *inputs, "--out", str(made / "folded")]) == 0
    result = made / "f.json"
    assert run(["fit", str(made / "folded"), *inputs, "--out", str(made / "fitted"), "--json", str(result)]) == 0
    assert json.loads(result.read_text())["read"].endswith("ids.npz")
    (made / "ids.pt").write_bytes(b"")
    for command, source in (("fold", "applied"), ("fit", "folded"), ("diagnose", "folded")):
        out = [] if command == "diagnose" else ["--out", str(made / "no")]
        capsys.readouterr()
        assert run([command, str(made / source), "--data", str(made / "ids.pt"), *out]) == 2
        assert "expected a .safetensors or .npz file" in capsys.readouterr().err and not (made / "no").exists()

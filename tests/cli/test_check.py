"""`signalprop check`: exit status, table and JSON, fresh and saved models, and input that cannot be checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commandline import Command, Refused
from signalprop.cli import loading
from signalprop.network.architecture import Architecture
from signalprop.schemes import scheme

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit"])
def test_right_models(command: Command, hf_directories: Path, name: str) -> None:
    status, out, err = command("check", str(hf_directories / name), "--scheme", "huggingface")
    assert status == 0, err
    found, table = out.split("\n\n", 1)
    assert " ".join(found.split()).endswith("weights and multipliers are right")
    assert table.splitlines()[0].split() == ["layer", "weight", "wanted", "measured", "±", "se", "verdict"]


def test_wrong_models(command: Command, hf_directories: Path, tmp_path: Path) -> None:
    file = tmp_path / "check.json"
    status, out, err = command("check", str(hf_directories / "gpt2"), "--scheme", "fixed", "--json", str(file))
    assert status == 1
    assert err.startswith("signalprop: GPT2LMHeadModel does not carry scheme 'fixed': 4 of ") and err.count("\n") == 1
    assert "layer 0 attention output (transformer.h.0.attn.c_proj.weight): 0.0" in err
    assert [line.split()[:3] for line in out.splitlines() if line.endswith(" off")] == [
        ["0-1", "attn", "output"],
        ["0-1", "ffn", "down"],
    ]
    data = json.loads(file.read_text())
    assert data["schema"] == "signalprop/check/1" and data["ok"] is False and data["counts"]["off"] == 4
    status, out, err = command("check", str(hf_directories / "gpt2"), "--scheme", "fixed", "--json", "-")
    assert status == 1 and json.loads(out) == data


def test_a_model_that_was_saved_with_its_scheme(
    command: Command, hf_directories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from signalprop.repair import apply

    model = transformers.GPT2LMHeadModel.from_pretrained(hf_directories / "gpt2")
    apply(model, "stable-resnet", seed=0)
    with pytest.warns(UserWarning, match="carries scheme"):
        model.save_pretrained(tmp_path)
    status, _, err = command("check", str(tmp_path), "--scheme", "stable-resnet")
    assert status == 0, err
    assert command("check", str(tmp_path)).err == err  # what it carries
    assert command("check", str(tmp_path), "--scheme", "gpt2").status == 1
    monkeypatch.setattr("signalprop.files.checkpoint_loading.fetched", lambda *_, **__: tmp_path)  # from the hub
    assert command("check", "somebody/deep", "--scheme", "stable-resnet").status == 0


def test_bad_input(refused: Refused, hf_directories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    directory = str(hf_directories / "gpt2")
    assert "unknown scheme 'gpt-2'" in refused("check", directory, "--scheme", "gpt-2")
    assert "no option 'sd'" in refused("check", directory, "--scheme", "gpt2:sd=1")
    assert "the model carries no scheme; name one" in refused("check", directory)
    assert "cannot read a configuration" in refused("check", str(tmp_path), "--scheme", "gpt2")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text((hf_directories / "gpt2" / "config.json").read_text())
    assert "--random-init of" in refused("check", str(tmp_path / "bare"), "--scheme", "gpt2")
    assert "configuration from no/such-model: Cannot find" in refused("check", "no/such-model", "--scheme", "gpt2")
    file = tmp_path / "table.json"
    scheme("gpt2")(Architecture.from_hf(hf_directories / "gpt2", n_layers=7)).save(file)
    assert "is for another network" in refused("check", directory, "--scheme", str(file))
    config = transformers.MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=50, state_size=4)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path / "mamba")
    assert "only the stream is known" in refused("check", str(tmp_path / "mamba"), "--scheme", "gpt2")


def test_a_model_in_bfloat16_is_read_as_it_is_stored(
    command: Command, hf_directories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    read: list[Any] = []
    model = transformers.GPT2LMHeadModel.from_pretrained(hf_directories / "gpt2")
    folders = {dtype: tmp_path / str(dtype) for dtype in (torch.bfloat16, torch.float32)}
    for dtype, folder in folders.items():  # the same numbers
        model.to(torch.bfloat16).to(dtype).save_pretrained(folder)
    load = loading.load_model
    monkeypatch.setattr(loading, "load_model", lambda *a, **k: read.append(load(*a, **k)) or read[-1])
    half, single = (command("check", str(folder), "--scheme", "huggingface") for folder in folders.values())
    assert [{p.dtype for p in model.parameters()} for model in read] == [{dtype} for dtype in folders]
    assert half.status == 0 and half.out == single.out

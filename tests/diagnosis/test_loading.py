"""Models are read from directories, GGUF files and the hub's cache; pickles and untrusted code are not touched."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from gguf_file import write_gguf
from signalprop.diagnosis.loading import load
from signalprop.errors import InputError, MissingExtra

IDS = torch.arange(12)[None] % 50


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS).logits
    return found


@pytest.fixture
def folder(tmp_path: Path, llama: Any, tokenizer: Any) -> Path:
    where = tmp_path / "tiny-llama.v1"
    llama.save_pretrained(where)
    tokenizer.save_pretrained(where)
    return where


class TestDirectories:
    def test_model_and_tokenizer(self, folder: Path, llama: Any, tokenizer: Any) -> None:
        found = load(folder)
        assert found.name == "tiny-llama.v1" and found.notes == ()
        assert type(found.model) is type(llama) and not found.model.training
        assert torch.equal(logits(found.model), logits(llama))
        text = "The state of the Union is strong.\n\nAnd so on."
        assert found.tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert torch.equal(logits(load(str(folder / "config.json")).model), logits(llama))

    def test_auto_is_the_type_of_the_checkpoint(self, tmp_path: Path, llama: Any) -> None:
        llama.to(torch.bfloat16).save_pretrained(tmp_path / "half")
        assert next(load(tmp_path / "half", dtype="auto").model.parameters()).dtype == torch.bfloat16
        assert next(load(tmp_path / "half").model.parameters()).dtype == torch.float32
        with pytest.raises(InputError, match="dtype is 'fp8'; expected one of float32"):
            load(tmp_path / "half", dtype="fp8")  # type: ignore[arg-type]

    @pytest.mark.parametrize("source", ["/nothing/here", "./nothing", "a/b/c", "nothing/config.json"])
    def test_nothing_there(self, source: str) -> None:
        with pytest.raises(InputError, match=f"cannot read {source}: there is no such file or directory"):
            load(source)

    def test_a_directory_without_a_model(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="cannot read a configuration from"):
            load(tmp_path)
        (tmp_path / "model.gguf").touch()
        with pytest.raises(InputError, match=r"holds no config.json; give the .gguf file itself"):
            load(tmp_path)


class TestIncomplete:
    def test_a_checkpoint_without_its_head_comes_without(self, tmp_path: Path) -> None:
        config = transformers.MPNetConfig(
            vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
        )
        bare = transformers.MPNetModel(config).eval()
        bare.save_pretrained(tmp_path)
        described = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
        described["architectures"] = ["MPNetForMaskedLM"]  # as sentence encoders on the hub have it
        (tmp_path / "config.json").write_text(json.dumps(described), encoding="utf-8")
        found = load(tmp_path)
        assert type(found.model).__name__ == "MPNetModel"
        assert "no weights for the head of a MPNetForMaskedLM" in found.notes[0]
        assert torch.equal(found.model(IDS)[0], bare(IDS)[0])

    def test_missing_weights_are_not_made_up(self, folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        weights = load_file(folder / "model.safetensors")
        for name in ("model.layers.1.mlp.up_proj.weight", "model.norm.weight"):
            del weights[name]
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(InputError, match=r"no weights for model.layers.1.mlp.up_proj.weight and 1 more"):
            load(folder)


class TestTrust:
    def test_its_code_is_never_run(self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
        monkeypatch.setattr(sys, "path", [*sys.path])
        marker = tmp_path / "ran"
        code = f"""
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({str(marker)!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""
        (folder / "own.py").write_text(code, encoding="utf-8")
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        described |= {
            "model_type": "own", "architectures": ["OwnModel"],
            "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(described), encoding="utf-8")
        with pytest.raises(InputError, match="comes with its own code, which signalprop does not run"):
            load(folder)
        assert not marker.exists()


class TestHub:
    """Without a connection, which tests/conftest.py says there is none of."""

    def test_a_name_that_is_not_in_the_cache(self) -> None:
        with pytest.raises(InputError, match=r"expected a directory, a .gguf file, or the name of a model") as caught:
            load("nobody/no-such-model")
        assert "\n" not in str(caught.value)

    def test_a_name_that_is(self, folder: Path, tmp_path: Path, llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        commit = 40 * "a"
        place = tmp_path / "cache" / "models--somebody--tiny"
        (place / "refs").mkdir(parents=True)
        (place / "refs" / "main").write_text(commit, encoding="utf-8")
        shutil.copytree(folder, place / "snapshots" / commit)
        for name in ("constants.HF_HUB_CACHE", "file_download.HF_HUB_CACHE"):
            monkeypatch.setattr(f"huggingface_hub.{name}", str(tmp_path / "cache"), raising=False)
        monkeypatch.setattr("transformers.utils.hub.TRANSFORMERS_CACHE", str(tmp_path / "cache"), raising=False)
        found = load("somebody/tiny")
        assert found.name == "tiny" and found.tokenizer is not None
        assert torch.equal(logits(found.model), logits(llama))


class TestGguf:
    def test_model_and_tokenizer(self, tmp_path: Path, llama: Any, bpe: Any) -> None:
        path = tmp_path / "tiny.gguf"
        write_gguf(path, llama, bpe)
        found = load(path)
        assert found.name == "tiny.gguf" and not found.model.training
        assert torch.allclose(logits(found.model), logits(llama), rtol=1e-5, atol=1e-5)
        words = found.tokenizer("the United States", add_special_tokens=False)
        assert words["input_ids"] == bpe.encode("the United States").ids
        assert next(load(path, dtype="bfloat16").model.parameters()).dtype == torch.bfloat16
        found.model.save_pretrained(tmp_path / "plain")  # what removing layers ends with
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
        assert torch.equal(logits(again), logits(found.model))

    def test_bad_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(InputError, match=r"cannot read .*none.gguf: there is no such file"):
            load(tmp_path / "none.gguf")
        (tmp_path / "bad.gguf").write_bytes(b"not one")
        with pytest.raises(InputError, match=r"cannot read .*bad.gguf: it is not a GGUF") as caught:
            load(tmp_path / "bad.gguf")
        assert "\n" not in str(caught.value)
        monkeypatch.setitem(sys.modules, "gguf", None)
        with pytest.raises(MissingExtra, match=r"this needs gguf.*signalprop\[diagnose\]"):
            load(tmp_path / "bad.gguf")
